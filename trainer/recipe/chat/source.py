"""Finds the model of a chat: a model's folder, an output folder, a checkpoint, a run, or a name on the hub."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from ....protocol.errors import FtmonError, RunNotFoundError, SeveralRunsError, UsageError
from ....protocol.run import run_store
from ....protocol.run.rundir import RunDir
from ..checkpoint import folder as folders
from ..preflight.inputs import hub_refusal

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class Source(NamedTuple):
    """Place of a model's weights."""

    path: str
    """A folder, or a name on the hub."""
    is_checkpoint: bool
    """Whether it is a checkpoint of ftmon's trainer, not a model in Hugging Face's format."""
    text: str
    """Description for display."""


def find(target: str) -> Source:
    """Return the model of a chat: the final model if there is one, else the newest complete checkpoint."""
    path = Path(target).expanduser()
    if path.is_dir():
        found = _in_folder(path) or _of_run(RunDir(path))
        if found is None:
            raise UsageError(f"{target}: holds neither a model (config.json) nor a complete checkpoint")
        return found
    if path.exists() or target.startswith(("/", "./", "../", "~")) or _below_a_folder(path):
        raise UsageError(f"{target}: no such folder; give a model's folder, a run, or a name on the Hugging Face hub")
    try:
        run = run_store.find(target)
    except SeveralRunsError:
        raise
    except RunNotFoundError:
        if _HUB_NAME.fullmatch(target):
            if refusal := hub_refusal(target):
                raise UsageError(refusal) from None
            return Source(target, False, target)
        raise UsageError(f"{target}: no such run, folder or model; 'ftmon ls' lists runs") from None
    found = _of_run(run)
    if found is None:
        raise UsageError(
            f"{run.id}: has neither a final model nor a complete checkpoint; 'ftmon train' writes one every "
            "checkpoint.every steps"
        )
    # ``target`` may be the beginning of a name, or the name of several runs, one of them alive.
    return found._replace(text=f"{run.id}: {found.text}")


def _below_a_folder(path: Path) -> bool:
    """Return whether a name with a slash is a local folder: ``output/model`` if ``output`` exists."""
    return len(path.parts) > 1 and Path(path.parts[0]).is_dir()


def _in_folder(path: Path) -> Source | None:
    for name in ("adapter_config.json", "config.json"):
        if (path / name).is_file():
            return Source(str(path), False, str(path))
    one, _ = folders.examine(path)
    if one is not None:
        return _checkpoint(one)
    if (path / "model").is_dir() and (found := _in_folder(path / "model")):
        return found
    for folder in (path / "checkpoints", path):
        complete, _ = folders.complete(folder)
        if complete:
            return _checkpoint(complete[0])
    return None


def _of_run(run: RunDir) -> Source | None:
    """Return the model or newest checkpoint of a run of ftmon's trainer."""
    if not run.config.is_file():
        return None
    from ..config.load import load

    try:
        folder = load(str(run.config)).config.output.dir
    except (FtmonError, OSError):
        folder = ""  # a configuration of another version
    output = Path(folder) if folder else run.path / "output"
    return _in_folder(output) if output.is_dir() and os.access(output, os.R_OK) else None


def _checkpoint(found: folders.Found) -> Source:
    state = found.manifest.state
    return Source(str(found.path), True, f"{found.path}, after step {state.step:,}")
