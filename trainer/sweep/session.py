"""One session of a sweep: runs configurations one at a time and writes a row for each, within the budget."""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ...protocol.analysis.sweep.budget import why_not_next
from ...protocol.rundir import RunDir
from ...protocol.sweep.rows import Ended, Predicted, Row, Settings, Started, key_of
from ...protocol.sweep.store import Results, Writer
from . import gpus, measure
from .jobs import STOP_GRACE_SECONDS, job
from .process import Ending, RefusedError, Running
from .spec import Spec

_LOOK_SECONDS = 2.0
"""Between looks at a live run's recording."""
_ENDING_SECONDS = STOP_GRACE_SECONDS + 10.0
"""Of a budget, kept for the end of a run and of the sweep."""


class StopError(Exception):
    """The session ends before its plan is done."""

    def __init__(self, reason: Ended) -> None:
        """Keep how the session ends."""
        super().__init__(reason.text)
        self.reason = reason


class Listener(Protocol):
    """What shows a session."""

    def begins(self, settings: Settings, repeat: int, predicted: Predicted | None) -> None:
        """A run begins."""

    def row(self, row: Row) -> None:
        """A run has ended."""


class Session:
    """Runs configurations and keeps their rows.

    Args:
        spec: the sweep.
        writer: of the results file.
        earlier: what the file had before this session.
        listener: what shows it.
        fail_fast: the first run that is not done ends the session.
        interrupted: whether the session is to end.
    """

    def __init__(
        self,
        spec: Spec,
        writer: Writer,
        earlier: Results,
        listener: Listener,
        fail_fast: bool,
        interrupted: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._writer = writer
        self._listener = listener
        self._fail_fast = fail_fast
        self._interrupted = interrupted
        self._answered = earlier.answered()
        self._used_before = earlier.seconds_used()
        self._begun = time.monotonic()
        self._next_look = 0.0
        self._count = sum(isinstance(entry, Started) for entry in earlier.entries)
        self.rows = list(self._answered.values())
        """All answers, those of earlier sessions first."""

    @property
    def used_seconds(self) -> float:
        """Wall-clock time of all sessions."""
        return self._used_before + time.monotonic() - self._begun

    def has(self, settings: Settings, repeat: int = 0) -> bool:
        """Whether there is a row of a run."""
        return (key_of(settings), repeat) in self._answered

    def measure(self, settings: Settings, repeat: int = 0, predicted: Predicted | None = None) -> Row:
        """Return the row of a run, which is run unless there is one.

        Raises:
            StopError: the budget is used up, the session was interrupted, or ``--fail-fast`` ends it.
        """
        key = (key_of(settings), repeat)
        if key in self._answered:
            return self._answered[key]
        if self._interrupted():
            raise StopError(Ended(time.time(), "interrupted"))
        if why := why_not_next(self._spec.budget, self.used_seconds, self.rows, _ENDING_SECONDS):
            raise StopError(Ended(time.time(), "budget", why))
        self._listener.begins(settings, repeat, predicted)
        row = msgspec.structs.replace(self._run(settings, repeat), predicted=predicted)
        self._writer.append(row)
        self._listener.row(row)
        if row.verdict == "unfinished":
            if self._interrupted():
                raise StopError(Ended(time.time(), "interrupted"))
            raise StopError(Ended(time.time(), "budget", "the budget is used up"))
        self._answered[key] = row
        self.rows.append(row)
        if row.note:
            raise StopError(Ended(time.time(), "gpus", row.note))
        if self._fail_fast and row.verdict != "done":
            raise StopError(Ended(time.time(), "failure", "--fail-fast: a run is not done"))
        return row

    def _run(self, settings: Settings, repeat: int) -> Row:
        self._count += 1
        begun, clock = time.time(), time.monotonic()
        earlier = gpus.before()
        try:
            running = Running(job(self._spec, settings, f"{self._spec.name}-{self._count:03d}"))
        except RefusedError as error:
            self._writer.append(Started(begun, settings, repeat))
            found = measure.Why("refused", str(error).removeprefix("ftmon: "))
            return measure.row(settings, repeat, found, [], "", time.monotonic() - clock, time.time())
        self._writer.append(Started(begun, settings, repeat, str(running.run.path)))
        deadline, over = clock + self._spec.timeout, ""
        if self._spec.budget.seconds is not None:
            room = self._spec.budget.seconds - self.used_seconds - _ENDING_SECONDS
            if time.monotonic() + room < deadline:
                deadline, over = time.monotonic() + max(0.0, room), "budget"
        ending = running.wait(deadline, lambda: self._why_end(running.run))
        if over and ending.ended_for == "timeout":
            ending = ending._replace(ended_for=over)
        return self._row(settings, repeat, ending, earlier, clock)

    def _why_end(self, run: RunDir) -> str:
        if self._interrupted():
            return "interrupt"
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + _LOOK_SECONDS
        live = measure.look(run, time.time())
        if self._spec.command and live.steps >= self._spec.steps + self._spec.warm_up:
            return "steps"
        return "hang" if live.hung_seconds >= self._spec.hang_grace else ""

    def _row(self, settings: Settings, repeat: int, ending: Ending, earlier: "gpus.GpuUse | None", clock: float) -> Row:
        recorded = measure.read(ending.run)
        found = measure.why(ending, recorded, self._spec.timeout)
        ranks = measure.rank_rows(recorded, self._spec.warm_up, self._spec.steps) if recorded is not None else []
        pids, devices = (recorded.pids, recorded.devices) if recorded is not None else ([], set[int]())
        held = gpus.still_held(earlier, pids, devices)
        if ending.left:
            held = "; ".join(filter(None, (held, f"processes {', '.join(map(str, ending.left))} did not end")))
        row = measure.row(settings, repeat, found, ranks, ending.run.id, time.monotonic() - clock, time.time())
        return msgspec.structs.replace(row, note=held)
