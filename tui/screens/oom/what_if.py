"""The dry runs of the out-of-memory screen: their job, GPU and memory."""

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ....protocol.errors import FtmonError
from ....protocol.run.rundir import RunDir
from ....protocol.text import sanitize
from ....protocol.training_packages import TRAINING_PACKAGES
from ...model.oom import OomCase
from ...model.what_if import capacity_of, length_of
from ...source.dry_runs import DryRuns
from ...widgets.state.app_state import AppState

_MOST_BYTES = 1 << 20
_OWN = ("train", "demo")


class JobOfRun(NamedTuple):
    """The job to predict."""

    config: str
    """YAML."""
    words: list[str]
    """Options of ``ftmon predict``."""
    environment: dict[str, str]
    cwd: Path | None


def job_of(app_state: AppState, case: OomCase) -> JobOfRun | str:
    """Return the job to predict, as it was at the error; or in one line why there is none."""
    model, oom = app_state.model, case.oom
    folder = app_state.source.folder if app_state.source is not None else None
    if model.info.kind and model.info.kind not in _OWN:
        command = " ".join(model.info.command) or "COMMAND"
        return (
            "the model and configuration of a script other than ftmon's trainer are unknown here: "
            f"ftmon predict --what-if -- {sanitize(command, 200)}, or --model and --deepspeed"
        )
    rank = model.ranks.get(oom.rank)
    if oom.measure != "cuda" or rank is None or rank.hello is None or rank.hello.device.kind == "cpu":
        return "the ranks train on the CPU: a dry run predicts a GPU's memory"
    config = _config(folder) or (model.prediction.config if model.prediction is not None else "")
    if not config:
        return "the run's configuration is not at hand: ftmon predict CONFIG.yaml --what-if, where it is"
    missing = [name for name in TRAINING_PACKAGES if find_spec(name) is None]
    if missing:
        return f"a dry run needs {', '.join(missing)}, not installed here: pip install 'ftmon[train]'"
    words = [f"--gpu={rank.hello.device.name}", f"--capacity={max(1, capacity_of(oom))}"]
    if length := length_of(oom):
        words.append(f"--sequence-length={length}")
    settings = "expandable_segments:True" if oom.expandable else ""
    return JobOfRun(config, words, {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": ""}, _cwd(folder))


def begin(app_state: AppState, case: OomCase) -> DryRuns | str:
    """Start the dry runs of an error's job; return the reason in one line if they cannot start."""
    job = job_of(app_state, case)
    if isinstance(job, str):
        return job
    try:
        return DryRuns(job.config, job.words, job.environment, job.cwd)
    except OSError as error:
        return f"the dry runs cannot be started: {error.strerror}"


def _config(folder: Path | None) -> str:
    if folder is None:
        return ""
    with contextlib.suppress(OSError, UnicodeDecodeError), RunDir(folder).config.open("rb") as file:
        return file.read(_MOST_BYTES).decode()
    return ""


def _cwd(folder: Path | None) -> Path | None:
    """Return the working directory of the run, if it was on this host: the configuration's paths are relative to it."""
    if folder is None:
        return None
    try:
        cwd = Path(RunDir(folder).read_run().cwd)
    except FtmonError:
        return None
    return cwd if cwd.is_dir() else None
