"""Lists the runs of this user on this host, live and recorded; fast enough to be called every second."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import FtmonError, RecordingError
from ...protocol.host.process import is_alive
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import RecordingInfo, run_state
from ...protocol.run import run_store
from ...protocol.run.rundir import ExitFile, Recipe, RunDir


class RunEntry(msgspec.Struct, frozen=True):
    """One run in the list. Times are seconds since the epoch."""

    id: str
    name: str
    kind: str
    """``demo``, ``train``, ``run`` or ``watch``."""
    state: str
    """The run's state, or ``lost``: its end was not recorded."""
    live: bool
    """Whether its hub or launcher lives on this host."""
    created: float
    ended: float | None
    """Time of its end or last message; None while live."""
    host: str
    command: list[str]
    ranks: int
    step: int
    exit_code: int | None
    recording: str
    """Path of the recording; empty if there is none."""
    recording_bytes: int
    problem: str
    """Reason why its recording cannot be read; empty if it can, or if there is none yet."""
    missing: str
    """Missing parts of the recording, in words."""
    open_errors: list[str] = []
    """Kinds of its alerts of severity ``error`` that are not resolved, while it is live."""
    model: str = ""
    """Name of the trained model: the configuration's, else as the ranks reported it."""
    data: list[str] = []
    """The training data of ftmon's trainer: files, or the name of a data set."""
    config: str = ""
    """The configuration file of ftmon's trainer, as given."""
    overrides: list[str] = []
    """The arguments ``key.sub=value`` of ftmon's trainer."""
    script: list[str] = []
    """Another script and its own arguments, without its launcher; empty for ftmon's trainer."""
    loss: float | None = None
    """The last loss, mean over ranks."""
    evaluation_loss: float | None = None
    reason: str = ""
    """Why it failed, or was stopped; empty otherwise."""

    @property
    def condition(self) -> str:
        """Its displayed state: ``hung`` while it is live and has an alert about a hung rank."""
        return "hung" if "hang" in self.open_errors else self.state

    @property
    def subject(self) -> str:
        """What it trains, in words: model, data, configuration and overrides, or the script with its arguments."""
        words = shlex.join(self.script) if self.script else " ".join([self.config, *self.overrides]).strip()
        data = ", ".join(os.path.basename(each) if os.path.isabs(each) else each for each in self.data)
        model = os.path.basename(self.model) if os.path.isabs(self.model) else self.model
        return "  ".join(filter(None, (model, data, words)))

    def duration_s(self, now: float) -> float:
        """Duration of the run so far, seconds."""
        return max(0.0, (now if self.ended is None else self.ended) - self.created)


class RunList:
    """Lists runs; a recording is read again only after its file has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], RecordingInfo | None, str]] = {}

    def entries(self) -> list[RunEntry]:
        """List the runs, the newest first; runs being created or removed are skipped."""
        return list(self._entries())

    def entry(self, run: RunDir) -> RunEntry:
        """Describe one run.

        Raises:
            RunDirError: it has no readable ``run.json``.
        """
        content, end = run.read_run(), run.read_exit()
        launched = content.launcher is not None and is_alive(content.launcher)
        live = end is None and (launched or run.living_hub() is not None)
        info, problem = self._info(run)
        recorded = info.state if info else ""
        state = end.state if end is not None else run_state(recorded, live)
        last = max(info.last_t if info else 0.0, content.created)
        size = _size(run)
        return RunEntry(
            id=run.id,
            name=content.name,
            kind=content.kind,
            state=state,
            live=live,
            created=content.created,
            ended=None if live else end.time if end else last,
            host=content.host,
            command=list(content.command),
            ranks=len(info.ranks) if info else 0,
            step=info.last_step if info else 0,
            exit_code=end.exit_code if end else info.exit_code if info else None,
            recording=str(run.recording) if size else "",
            recording_bytes=size,
            problem=problem if size else "",
            missing=info.missing if info and not live else "",
            open_errors=info.open_errors if info and live else [],
            reason=_reason(state, info, end),
            **_trained(content.recipe, list(content.command), content.kind, info),
        )

    def _entries(self) -> Iterator[RunEntry]:
        for run in run_store.all_runs():
            try:
                yield self.entry(run)
            except FtmonError:
                continue

    def _info(self, run: RunDir) -> tuple[RecordingInfo | None, str]:
        stamp = _stamp(run)
        known = self._known.get(run.id)
        if known is None or known[0] != stamp:
            info, problem = _read_info(run)
            known = self._known[run.id] = (stamp, info, problem)
        return known[1], known[2]


def recorded_entry(path: Path, info: RecordingInfo | None = None) -> RunEntry:
    """Return the entry of a run from its recording, which may be untrusted, and the arguments in its run directory.

    Raises:
        RecordingError: the recording cannot be read.
    """
    if info is None:
        with Reader(path, once=True) as reader:
            info = reader.info()
    state = run_state(info.state, info.live)
    size = sum(found for _, found in _sizes(path))
    return RunEntry(
        id=info.run_id or path.parent.name,
        name=info.name,
        kind=info.kind,
        state=state,
        live=info.live,
        created=info.started,
        ended=None if info.live else max(info.last_t, info.started),
        host=info.host,
        command=list(info.command),
        ranks=len(info.ranks),
        step=info.last_step,
        exit_code=info.exit_code,
        recording=str(path),
        recording_bytes=size,
        problem="",
        missing="" if info.live else info.missing,
        open_errors=info.open_errors if info.live else [],
        reason=_reason(state, info, None),
        **_trained(_recipe_beside(path, info), list(info.command), info.kind, info),
    )


def _recipe_beside(recording: Path, info: RecordingInfo) -> Recipe | None:
    with suppress(FtmonError):
        content = RunDir(recording.absolute().parent).read_run()
        return content.recipe if content.id == info.run_id else None
    return None


def _reason(state: str, info: RecordingInfo | None, end: ExitFile | None) -> str:
    """Return why a run failed or was stopped: the alert that explains it, else its end in words."""
    if state not in ("failed", "stopped"):
        return ""
    text = end.text if end is not None else info.state_text if info is not None else ""
    failure = info.failure if info is not None and state == "failed" else ""
    return f"{failure} ({text})" if failure and text else failure or text


def _trained(recipe: Recipe | None, command: list[str], kind: str, info: RecordingInfo | None) -> dict[str, Any]:
    """Return the entry's fields about model, data, arguments and losses."""
    found: dict[str, Any] = {"model": info.model if info is not None else ""}
    if recipe is not None:
        found |= {"config": recipe.config, "overrides": list(recipe.overrides), "data": list(recipe.data)}
        found["model"] = recipe.model or found["model"]
    elif kind not in TRAINER_KINDS:
        found["script"] = script_words(command)
    if info is not None:
        found |= {"loss": info.loss, "evaluation_loss": info.evaluation_loss}
    return found


TRAINER_KINDS = ("demo", "train")
"""Kinds of the runs of ftmon's trainer."""

_LAUNCHERS = ("torch.distributed", "accelerate", "deepspeed")
"""Modules that start ranks, as in ``python -m torch.distributed.run``."""


def script_words(command: Sequence[str]) -> list[str]:
    """Return the script of a command with its own arguments, without the launcher; all words if no script is found."""
    for place, word in enumerate(command):
        if word in ("-m", "--module") and place + 1 < len(command) and not command[place + 1].startswith(_LAUNCHERS):
            return list(command[place:])
        if place and word.endswith((".py", ".sh")) and not word.startswith("-"):
            return list(command[place:])
    return list(command)


def _read_info(run: RunDir) -> tuple[RecordingInfo | None, str]:
    try:
        with Reader(run.recording, once=True) as reader:
            return reader.info(), ""
    except RecordingError as error:
        return None, str(error)


def _size(run: RunDir) -> int:
    """Return the bytes of the recording including its write-ahead log."""
    return sum(size for _, size in _files(run))


def _stamp(run: RunDir) -> tuple[int, int]:
    """Return a value that changes whenever the recording does."""
    return max((changed for changed, _ in _files(run)), default=0), _size(run)


def _files(run: RunDir) -> list[tuple[int, int]]:
    return _sizes(run.recording)


def _sizes(recording: Path) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for suffix in ("", "-wal"):
        try:
            info = recording.with_name(recording.name + suffix).stat()
        except OSError:
            continue
        found.append((info.st_mtime_ns, info.st_size))
    return found
