"""One session of a sweep: runs configurations one at a time and writes a row for each, within the budget."""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ...protocol.analysis.sweep.budget import why_not_next
from ...protocol.run.rundir import RunDir
from ...protocol.sweep.rows import Ended, Predicted, Row, Settings, Started, key_of
from ...protocol.sweep.store import Results, Writer
from ..host.hardware.gpu_memory import GpuUse
from . import gpus, measure
from .jobs import STOP_GRACE_SECONDS, job
from .measure import Live
from .process import Ending, RefusedError, Running
from .spec import Spec

_POLL_SECONDS = 2.0
"""Seconds between reads of a live run's recording."""
_ENDING_SECONDS = STOP_GRACE_SECONDS + 10.0
"""Part of a budget reserved for the end of a run and of the sweep."""


class StopError(Exception):
    """Ends the session before its plan is finished."""

    def __init__(self, reason: Ended) -> None:
        """Keep the reason of the end."""
        super().__init__(reason.text)
        self.reason = reason


class Listener(Protocol):
    """Interface of a session's output."""

    def begins(self, settings: Settings, repeat: int, predicted: Predicted | None) -> None:
        """Show the start of a run."""

    def row(self, row: Row) -> None:
        """Show the end of a run."""


class Session:
    """Runs configurations and keeps their rows.

    Args:
        spec: the sweep.
        writer: writer of the results file.
        earlier: contents of the file before this session.
        listener: shows the session.
        fail_fast: whether the first run that is not done ends the session.
        interrupted: returns whether the session is to end.
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
        self.spec = spec
        self._writer = writer
        self.listener = listener
        self._fail_fast = fail_fast
        self.interrupted = interrupted
        self._answered = earlier.answered()
        self._used_before = earlier.seconds_used()
        self._begun = time.monotonic()
        self._next_poll = 0.0
        self._count = sum(isinstance(entry, Started) for entry in earlier.entries)
        self.rows = list(self._answered.values())
        """All rows, those of earlier sessions first."""

    @property
    def used_seconds(self) -> float:
        """Wall-clock time of all sessions."""
        return self._used_before + time.monotonic() - self._begun

    def has(self, settings: Settings, repeat: int = 0) -> bool:
        """Return whether there is a row of a run."""
        return (key_of(settings), repeat) in self._answered

    def measure(self, settings: Settings, repeat: int = 0, predicted: Predicted | None = None) -> Row:
        """Return the row of a run, after running it unless there is one.

        Raises:
            StopError: the budget is used up, the session was interrupted, or ``--fail-fast`` ends it.
        """
        key = (key_of(settings), repeat)
        if key in self._answered:
            return self._answered[key]
        self.check()
        self.listener.begins(settings, repeat, predicted)
        row = msgspec.structs.replace(self._run(settings, repeat), predicted=predicted)
        self.keep(row)
        return row

    def check(self) -> None:
        """Check that another run may begin.

        Raises:
            StopError: the budget is used up, or the session was interrupted.
        """
        if self.interrupted():
            raise StopError(Ended(time.time(), "interrupted"))
        if why := why_not_next(self.spec.budget, self.used_seconds, self.rows, _ENDING_SECONDS):
            raise StopError(Ended(time.time(), "budget", why))

    def next_name(self) -> str:
        """Return a name for the next run."""
        return f"{self.spec.name}-{self._count + 1:03d}"

    def started(self, settings: Settings, repeat: int, run: str = "") -> None:
        """Write the start of a run; ``run``: its directory."""
        self._count += 1
        self._writer.append(Started(time.time(), settings, repeat, run))

    def keep(self, row: Row) -> None:
        """Write a row.

        Raises:
            StopError: the session ends with it.
        """
        self._writer.append(row)
        self.listener.row(row)
        if row.verdict == "unfinished":
            if self.interrupted():
                raise StopError(Ended(time.time(), "interrupted"))
            raise StopError(Ended(time.time(), "budget", "the budget is used up"))
        self._answered[key_of(row.settings), row.repeat] = row
        self.rows.append(row)
        if row.note:
            raise StopError(Ended(time.time(), "gpus", row.note))
        if self._fail_fast and row.verdict != "done":
            raise StopError(Ended(time.time(), "failure", "--fail-fast: a run is not done"))

    def deadline(self, begun: float) -> tuple[float, str]:
        """Return a run's deadline, from its start ``begun`` (``time.monotonic``), and the reason: timeout or budget."""
        deadline = begun + self.spec.timeout
        if self.spec.budget.seconds is not None:
            room = max(0.0, self.spec.budget.seconds - self.used_seconds - _ENDING_SECONDS)
            if time.monotonic() + room < deadline:
                return time.monotonic() + room, "budget"
        return deadline, "timeout"

    def progress(self, run: RunDir) -> Live | None:
        """Return a live run's progress; None within two seconds of the last call."""
        if time.monotonic() < self._next_poll:
            return None
        self._next_poll = time.monotonic() + _POLL_SECONDS
        return measure.progress(run, time.time())

    def _run(self, settings: Settings, repeat: int) -> Row:
        clock = time.monotonic()
        earlier = gpus.before()
        try:
            running = Running(job(self.spec, settings, self.next_name()))
        except RefusedError as error:
            self.started(settings, repeat)
            found = measure.refused(error)
            return measure.row(settings, repeat, found, [], "", time.monotonic() - clock, time.time())
        self.started(settings, repeat, str(running.run.path))
        deadline, over = self.deadline(clock)
        ending = running.wait(deadline, lambda: self._why_end(running.run))
        if ending.ended_for == "timeout":
            ending = ending._replace(ended_for=over)
        return self._row(settings, repeat, ending, earlier, clock)

    def _why_end(self, run: RunDir) -> str:
        if self.interrupted():
            return "interrupt"
        live = self.progress(run)
        if live is None:
            return ""
        if self.spec.command and live.steps >= self.spec.steps + self.spec.warm_up:
            return "steps"
        return "hang" if live.hung_seconds >= self.spec.hang_grace else ""

    def _row(self, settings: Settings, repeat: int, ending: Ending, earlier: GpuUse | None, clock: float) -> Row:
        recorded = measure.read(ending.run)
        found = measure.why(ending, recorded, self.spec.timeout)
        ranks = measure.rank_rows(recorded, self.spec.warm_up, self.spec.steps) if recorded is not None else []
        held = measure.still_held(ending, recorded, earlier)
        row = measure.row(settings, repeat, found, ranks, ending.run.id, time.monotonic() - clock, time.time())
        return msgspec.structs.replace(row, note=held)
