"""The runs of this user on this host, live and recorded, and the jobs of a run as rows of a table."""

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import msgspec

from ...protocol.analysis.oom.detector import is_oom
from ...protocol.errors import FtmonError, RecordingError
from ...protocol.host.process import is_alive
from ...protocol.messages.hosts import Job, JobPhase, JobRank
from ...protocol.messages.telemetry import PHASES
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import RecordingInfo, run_state
from ...protocol.run import rundir
from ...protocol.run.rundir import ExitFile, Recipe, RunDir
from ...protocol.text import sanitize


class RunEntry(msgspec.Struct, frozen=True):
    """One run in the list. Times are seconds since the epoch."""

    id: str
    name: str
    kind: str
    state: str  # the run's state, or `lost`: its end was not recorded
    live: bool  # whether its hub or launcher lives on this host
    created: float
    ended: float | None  # time of its end or last message; None while live
    host: str
    command: list[str]
    ranks: int
    step: int
    exit_code: int | None
    recording: str
    recording_bytes: int
    problem: str  # reason why its recording cannot be read; empty if it can, or if there is none yet
    missing: str
    open_errors: list[str] = []  # kinds of its alerts of severity `error` that are not resolved, while it is live
    model: str = ""  # name of the trained model: the configuration's, else as the ranks reported it
    data: list[str] = []  # the training data of ftmon's trainer: files, or the name of a data set
    config: str = ""  # the configuration file of ftmon's trainer, as given
    overrides: list[str] = []
    script: list[str] = []  # another script and its own arguments, without its launcher; empty for ftmon's trainer
    loss: float | None = None
    evaluation_loss: float | None = None
    reason: str = ""

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
        found: list[RunEntry] = []
        for run in rundir.all_runs():
            with suppress(FtmonError):
                found.append(self.entry(run))
        return found

    def entry(self, run: RunDir) -> RunEntry:
        """Describe one run; raise ``RunDirError`` if it has no readable ``run.json``."""
        content, end = run.read_run(), run.read_exit()
        launched = content.launcher is not None and is_alive(content.launcher)
        live = end is None and (launched or run.living_hub() is not None)
        info, problem = self._info(run)
        last = max(info.last_t if info else 0.0, content.created)
        size = sum(size for _, size in _files(run.recording))
        return RunEntry(
            id=run.id,
            name=content.name,
            kind=content.kind,
            live=live,
            created=content.created,
            ended=None if live else end.time if end else last,
            host=content.host,
            command=list(content.command),
            recording=str(run.recording) if size else "",
            recording_bytes=size,
            problem=problem if size else "",
            **_recorded(info, end, live=live),
            **_trained(content.recipe, list(content.command), content.kind, info),
        )

    def _info(self, run: RunDir) -> tuple[RecordingInfo | None, str]:
        files = _files(run.recording)
        stamp = max((changed for changed, _ in files), default=0), sum(size for _, size in files)
        known = self._known.get(run.id)
        if known is None or known[0] != stamp:
            known = self._known[run.id] = (stamp, *_read_info(run))
        return known[1], known[2]


def recorded_entry(path: Path, info: RecordingInfo | None = None) -> RunEntry:
    """Return the entry of a run from its recording, which may be untrusted, and the arguments in its run directory.

    Raises ``RecordingError`` if the recording cannot be read.
    """
    if info is None:
        with Reader(path, once=True) as reader:
            info = reader.info()
    folder = _folder_of(path, info)
    end = folder.read_exit() if folder else None
    return RunEntry(
        id=info.run_id or path.parent.name,
        name=info.name,
        kind=info.kind,
        live=info.live,
        created=info.started,
        # The hub records some seconds longer than the run lasts.
        ended=None if info.live else end.time if end else max(info.last_t, info.started),
        host=info.host,
        command=list(info.command),
        recording=str(path),
        recording_bytes=sum(size for _, size in _files(path)),
        problem="",
        **_recorded(info, None, live=info.live),
        **_trained(folder.read_run().recipe if folder else None, list(info.command), info.kind, info),
    )


def _recorded(info: RecordingInfo | None, end: ExitFile | None, *, live: bool) -> dict[str, Any]:
    state = end.state if end is not None else run_state(info.state if info else "", live)
    return {
        "state": state,
        "ranks": len(info.ranks) if info else 0,
        "step": info.last_step if info else 0,
        "exit_code": end.exit_code if end else info.exit_code if info else None,
        "missing": info.missing if info and not live else "",
        "open_errors": info.open_errors if info and live else [],
        "reason": _reason(state, info, end),
    }


def _folder_of(recording: Path, info: RecordingInfo) -> RunDir | None:
    """Return the run's directory if the recording is in it."""
    with suppress(FtmonError):
        run = RunDir(recording.absolute().parent)
        return run if run.read_run().id == info.run_id else None
    return None


def _reason(state: str, info: RecordingInfo | None, end: ExitFile | None) -> str:
    if state not in ("failed", "stopped"):
        return ""
    text = end.text if end is not None else info.state_text if info is not None else ""
    failure = info.failure if info is not None and state == "failed" else ""
    return f"{failure} ({text})" if failure and text else failure or text


def _trained(recipe: Recipe | None, command: list[str], kind: str, info: RecordingInfo | None) -> dict[str, Any]:
    found: dict[str, Any] = {"model": info.model if info is not None else ""}
    if recipe is not None:
        found |= {"config": recipe.config, "overrides": list(recipe.overrides), "data": list(recipe.data)}
        found["model"] = recipe.model or found["model"]
    elif kind not in TRAINER_KINDS:
        found["script"] = script_words(command)
    if info is not None:
        found |= {"loss": info.loss, "evaluation_loss": info.evaluation_loss}
    return found


TRAINER_KINDS = ("demo", "train")  # kinds of the runs of ftmon's trainer
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


def _files(recording: Path) -> list[tuple[int, int]]:
    """Return the time of change and the size of a recording and of its write-ahead log, as far as they exist."""
    found: list[tuple[int, int]] = []
    for suffix in ("", "-wal"):
        with suppress(OSError):
            info = recording.with_name(recording.name + suffix).stat()
            found.append((info.st_mtime_ns, info.st_size))
    return found


_WORDS_LIMIT = 120
_RANK_OPTIONS = ("--local_rank=", "--local-rank=")


class JobRow(NamedTuple):
    """One job in the table."""

    job: Job
    words: str  # the words of its command line that differ from other jobs; for a single job, its script
    seconds: float

    @property
    def text(self) -> str:
        """Why it failed."""
        return sanitize(self.job.text)

    @property
    def outcome(self) -> str:
        """The state in one word; ``oom`` if memory ran out."""
        return "oom" if self.job.state == "failed" and is_oom(self.job.text) else self.job.state


def job_rows(jobs: Mapping[int, Job], now: float) -> list[JobRow]:
    """Return the table's rows, by number; ``now`` is the end of running jobs for their duration."""
    found: list[JobRow] = []
    for job, words in zip(jobs.values(), differing_words([job.argv for job in jobs.values()]), strict=True):
        restart = f"restart {job.restart}" if job.restart else ""
        seconds = max(0.0, (job.ended if job.ended is not None else now) - job.started)
        found.append(JobRow(job, ", ".join(filter(None, (words, restart))), seconds))
    return found


def job_row(jobs: Mapping[int, Job], number: int, now: float) -> JobRow:
    """Return a job's row of the table."""
    return next(row for row in job_rows(jobs, now) if row.job.number == number)


def differing_words(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return, for each command line, the words that not all of them share, option values with their options.

    If nothing differs, or there is only one, it is the script's name.
    """
    commands = [[word for word in command if not word.startswith(_RANK_OPTIONS)] for command in commands]
    sets = [set(command[1:]) for command in commands]
    common = set[str].intersection(*sets) if len(sets) > 1 else set[str]()
    return [_distinct_words(command, common, len(sets) > 1) for command in commands]


def _distinct_words(command: Sequence[str], common: Collection[str], several: bool) -> str:
    found: list[str] = []
    for at, word in enumerate(command):
        if at == 0 or not several or word in common:
            continue
        option = command[at - 1]
        if option.startswith("-") and option in common and "=" not in option:
            found.append(option)
        found.append(word)
    script = PurePath(command[0]).name if command else ""
    text = sanitize(" ".join(found) or script)
    return text if len(text) <= _WORDS_LIMIT else f"{text[: _WORDS_LIMIT - 3]}..."


def phases_of(rank: JobRank) -> list[JobPhase]:
    """List a rank's phases in drawing order."""
    order = {name: at for at, name in enumerate(PHASES)}
    return sorted(rank.phases, key=lambda phase: order.get(phase.name, len(order)))


def failed(jobs: Mapping[int, Job]) -> list[Job]:
    """List the jobs that failed."""
    return [job for job in jobs.values() if job.state == "failed"]
