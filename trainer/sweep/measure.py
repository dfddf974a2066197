"""Reads a run's results from its recording: figures of each rank after the warm-up, and the cause of a failure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...protocol.analysis.sweep.figures import figures
from ...protocol.errors import RecordingError
from ...protocol.messages.control import Alert
from ...protocol.messages.telemetry import Hello, Step
from ...protocol.recording.collect import RecordedRun
from ...protocol.recording.reader import Reader
from ...protocol.run.job_log import last_lines
from ...protocol.run.rundir import RunDir
from ...protocol.sweep.rows import RankRow, Row, Settings, Verdict
from ...protocol.text import first_line
from ..host.hardware.gpu_memory import GpuUse
from . import gpus
from .process import Ending, RefusedError

_TEXT = 300


def read(run: RunDir) -> RecordedRun | None:
    """Return a run's recording; None if there is none, or it cannot be read."""
    try:
        return RecordedRun(run.recording)
    except RecordingError:
        return None


class Live(NamedTuple):
    """Progress of a live run."""

    steps: int
    """Steps finished by every rank; 0 while a rank has finished none."""
    hung_seconds: float
    """Seconds for which the monitor has reported it as hung; 0: it is not."""


def progress(run: RunDir, now: float) -> Live:
    """Return a live run's progress from its recording; without a readable one, no progress."""
    try:
        with Reader(run.recording) as reader:
            state = [frame.message for frame in reader.state_at(math.inf)]
            steps = _steps_of_all(reader, state)
    except RecordingError:
        return Live(0, 0.0)
    hung = [alert.time for alert in state if isinstance(alert, Alert) and alert.kind == "hang" and not alert.resolved]
    return Live(steps, now - min(hung) if hung else 0.0)


def _steps_of_all(reader: Reader, state: Sequence[object]) -> int:
    """Return how many steps every rank has taken; not the last one's number, which continues after a resume."""
    world = max((message.world_size for message in state if isinstance(message, Hello)), default=0)
    ranks = {message.rank for message in state if isinstance(message, Step)}
    if not world or len(ranks) < world:
        return 0
    return min(sum(point.count for point in reader.series(rank, 0.0, math.inf, limit=1)) for rank in ranks)


def rank_rows(recorded: RecordedRun, warm_up: int, most: int) -> list[RankRow]:
    """Return the figures of each rank over ``most`` steps after ``warm_up``."""
    hellos, nvml = recorded.hellos, recorded.nvml
    return [
        figures(rank, recorded.steps(rank), warm_up, most, hellos.get(rank), nvml.get(rank, 0))
        for rank in recorded.ranks
    ]


def length_rows(recorded: RecordedRun, index: int, warm_up: int, most: int) -> list[RankRow]:
    """Return the figures of each rank at one of the lengths measured in one process.

    NVML's figures are omitted, as they do not shrink from one length to the next.
    """
    first = index * (warm_up + most)
    found: list[RankRow] = []
    for rank in recorded.ranks:
        own = [step for step in recorded.steps(rank) if first < step.step <= first + warm_up + most]
        found.append(figures(rank, own, warm_up, most, recorded.hellos.get(rank)))
    return found


def still_held(ending: Ending, recorded: RecordedRun | None, earlier: GpuUse | None) -> str:
    """Wait until a run's processes and memory are gone; return the rest in words, or empty."""
    pids, devices = (recorded.pids, recorded.devices) if recorded is not None else ([], set[int]())
    held = gpus.still_held(earlier, pids, devices)
    if ending.left:
        held = "; ".join(filter(None, (held, f"processes {', '.join(map(str, ending.left))} did not end")))
    return held


class Why(NamedTuple):
    """Outcome of a run."""

    verdict: Verdict
    text: str = ""
    phase: str = ""
    rank: int | None = None
    step: int | None = None
    asked_bytes: int = 0


def refused(error: RefusedError) -> Why:
    """Return the outcome of a run that was not started."""
    return Why("refused", str(error).removeprefix("ftmon: "))


def why(ending: Ending, recorded: RecordedRun | None, timeout: float) -> Why:
    """Return the outcome of a run, with the evidence."""
    if ending.ended_for in ("interrupt", "budget"):
        return Why("unfinished", ending.ended_for)
    failed = ending.exit is None or ending.exit.exit_code != 0
    if ending.ended_for == "steps" or (not failed and not ending.ended_for):
        taken = recorded is not None and any(recorded.steps_seen(rank) for rank in recorded.ranks)
        return Why("done") if taken else Why("no-steps", "the run exited with status 0, but ftmon recorded no step")
    ended_for_hang = ending.ended_for == "hang"
    hung = ended_for_hang or (ending.exit is not None and ending.exit.cause in ("hang", "hang-at-exit"))
    if recorded is None:
        return Why("hang" if hung else "timeout" if ending.ended_for else "crash", _last_words(ending))
    if recorded.ooms:
        oom = min(recorded.ooms, key=lambda one: one.time)
        return Why("out-of-memory", _line(oom.message), oom.phase, oom.rank, oom.step, oom.requested_bytes)
    hangs = [alert for alert in recorded.alerts if alert.kind == "hang"]
    if hung or (ending.ended_for == "timeout" and any(alert.resolved is None for alert in hangs)):
        return _hang(hangs, ending)
    if ending.ended_for == "timeout":
        return Why("timeout", f"ended after {timeout:.0f} s", step=_step_reached(recorded))
    return _failure(ending, recorded)


def _failure(ending: Ending, recorded: RecordedRun) -> Why:
    """Return the cause of a failure: out of memory by the kernel's report, an exception, a signal, or the last line."""
    alerts = {alert.kind: alert for alert in reversed(recorded.alerts)}
    if "oom" in alerts:
        return _of_alert("out-of-memory", alerts["oom"])
    if recorded.failures:
        failure = min(recorded.failures, key=lambda one: one.time)
        return Why("crash", _line(failure.error), failure.phase, failure.rank, failure.step)
    alert = alerts.get("died") or alerts.get("failure")
    return _of_alert("crash", alert) if alert is not None else Why("crash", _last_words(ending))


def _of_alert(verdict: Verdict, alert: Alert) -> Why:
    return Why(verdict, alert.title, alert.phase, alert.rank, alert.step)


def _hang(alerts: Sequence[Alert], ending: Ending) -> Why:
    if not alerts:
        return Why("hang", ending.exit.text if ending.exit is not None else "")
    # While the run is ended, a rank that takes longer than the others looks as if they waited for it.
    alert = ([alert for alert in alerts if alert.time <= ending.asked] or alerts)[-1]
    hung = alert.evidence.get("hung")
    rank = hung[0] if isinstance(hung, list) and hung and isinstance(hung[0], int) else alert.rank
    return Why("hang", alert.title, alert.phase, rank, alert.step)


def _step_reached(recorded: RecordedRun) -> int | None:
    return min((recorded.steps(rank)[-1].step for rank in recorded.ranks if recorded.steps(rank)), default=None)


def _last_words(ending: Ending) -> str:
    """Return the last line of the run's output, for a failure that no rank reported."""
    end = ending.exit
    status = f"status {end.exit_code}" if end is not None else "it is unknown how it ended"
    logs = [*sorted(ending.run.logs.glob("*.err")), ending.run.logs / "launcher.log"]
    for path in logs:
        lines = last_lines(path, 1)
        if lines:
            return f"{status}: {_line(lines[0])}"
    return status if end is None or not end.text else f"{status}: {_line(end.text)}"


def _line(text: str) -> str:
    return first_line(text, _TEXT)


def row(settings: Settings, repeat: int, found: Why, ranks: list[RankRow], run: str, seconds: float, now: float) -> Row:
    """Return the row of a run."""
    return Row(
        settings,
        found.verdict,
        now,
        seconds=round(seconds, 3),
        repeat=repeat,
        run=run,
        text=found.text,
        phase=found.phase,
        rank=found.rank,
        step=found.step,
        asked_bytes=found.asked_bytes,
        ranks=ranks,
    )
