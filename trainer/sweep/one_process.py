"""Measures sequence lengths of one configuration in one process, shortest first.

The row of each length is written as soon as its steps are recorded. A length that fails ends the process; later ones
run in another process.
"""

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from ...protocol.recording.collect import RecordedRun
from ...protocol.run.rundir import RunDir
from ...protocol.sweep.rows import Planned, RankRow, Settings
from ..host.hardware.gpu_memory import GpuUse
from . import gpus, measure
from .jobs import group_of, job
from .measure import Why
from .process import Ending, RefusedError, Running
from .session import Session
from .spec import LENGTH


def measure_plan(
    session: Session, runs: Sequence[Planned], repeat: int, progress: Callable[[], object] | None = None
) -> None:
    """Measure configurations; those that differ only in their sequence length share a process.

    Args:
        session: keeps the rows.
        runs: the configurations.
        repeat: which repeat this is, from 0.
        progress: called after each row.

    Raises:
        StopError: the session ends before its plan is done.
    """
    groups: dict[str, list[Planned]] = {}
    for run in runs:
        if not session.has(run.settings, repeat):
            groups.setdefault(group_of(run.settings, LENGTH), []).append(run)
    for group in groups.values():
        waiting = sorted(group, key=lambda run: _length(run.settings))
        while waiting:
            waiting = waiting[_Process(session, waiting, repeat, progress).measure() :]


def _length(settings: Settings) -> int:
    value = settings[LENGTH]
    assert isinstance(value, int)  # checked with the sweep file
    return value


class _Process:
    """One process, and the lengths to measure in it."""

    def __init__(
        self, session: Session, runs: Sequence[Planned], repeat: int, progress: Callable[[], object] | None
    ) -> None:
        self._session = session
        self._spec = session.spec
        self._runs = runs
        self._repeat = repeat
        self._progress = progress
        self._done = 0
        """Number of lengths with a row."""
        self._begun = time.time()
        """Time at which the present length began."""

    def measure(self) -> int:
        """Run the process, and return the number of lengths with a row, at least one.

        Raises:
            StopError: the session ends.
        """
        session, earlier = self._session, gpus.before()
        session.check()
        first = self._runs[0]
        session.listener.begins(first.settings, self._repeat, first.predicted)
        lengths = [_length(run.settings) for run in self._runs]
        try:
            running = Running(job(self._spec, first.settings, session.next_name(), lengths))
        except RefusedError as error:
            for number, run in enumerate(self._runs):
                if number:
                    session.listener.begins(run.settings, self._repeat, run.predicted)
                session.started(run.settings, self._repeat)
                self._row(measure.refused(error), [], "", "")
            return self._done
        session.started(first.settings, self._repeat, str(running.run.path))
        self._end(running.wait(math.inf, lambda: self._poll(running.run)), earlier)
        return self._done

    def _poll(self, run: RunDir) -> str:
        """Write the rows of measured lengths; return the reason to end the process, or empty."""
        if self._session.interrupted():
            return "interrupt"
        deadline, over = self._session.deadline(time.monotonic() - (time.time() - self._begun))
        if time.monotonic() >= deadline:
            return over
        live = self._session.progress(run)
        if live is None:
            return ""
        # The last row is written once the process is gone.
        done = min(live.steps // (self._spec.warm_up + self._spec.steps), len(self._runs) - 1)
        if done > self._done and (recorded := measure.read(run)) is not None:
            while self._done < done:
                self._measured(recorded, run, "")
        return "hang" if live.hung_seconds >= self._spec.hang_grace else ""

    def _end(self, ending: Ending, earlier: GpuUse | None) -> None:
        recorded = measure.read(ending.run)
        held = measure.still_held(ending, recorded, earlier)
        count = len(self._runs)
        done = recorded is not None and min(map(recorded.steps_seen, recorded.ranks), default=0)
        done = min(count, done // (self._spec.warm_up + self._spec.steps))
        while recorded is not None and self._done < done:
            self._measured(recorded, ending.run, held if self._done == count - 1 else "")
        if self._done == count:
            return
        found = measure.why(ending, recorded, self._spec.timeout)
        if found.verdict == "done":
            found = Why("crash", "the process exited with status 0 before it had measured this length")
        if found.step is not None:
            found = found._replace(step=found.step - self._done * (self._spec.warm_up + self._spec.steps))
        ranks: list[RankRow] = []
        if recorded is not None:
            ranks = measure.length_rows(recorded, self._done, self._spec.warm_up, self._spec.steps)
        self._row(found, ranks, ending.run.id, held)

    def _measured(self, recorded: RecordedRun, run: RunDir, held: str) -> None:
        """Write the row of a finished length, after the next one has begun."""
        ranks = measure.length_rows(recorded, self._done, self._spec.warm_up, self._spec.steps)
        last = (self._done + 1) * (self._spec.warm_up + self._spec.steps)
        ends = [
            step.started + step.host_us / 1e6
            for rank in recorded.ranks
            for step in recorded.steps(rank)
            if step.step == last
        ]
        more = self._done + 1 < len(self._runs)
        self._row(Why("done"), ranks, run.id, held, max(ends, default=None) if more else None)
        if more:
            following = self._runs[self._done]
            self._session.listener.begins(following.settings, self._repeat, following.predicted)
            self._session.started(following.settings, self._repeat, str(run.path))

    def _row(self, found: Why, ranks: list[RankRow], run: str, held: str, ended: float | None = None) -> None:
        """Write the row of the present length.

        Args:
            found: its outcome.
            ranks: its figures.
            run: the run's identifier.
            held: resources still in use, in words.
            ended: time of its end; None: now.

        Raises:
            StopError: the session ends with it.
        """
        planned, now = self._runs[self._done], ended or time.time()
        row = measure.row(planned.settings, self._repeat, found, ranks, run, now - self._begun, now)
        self._done += 1
        self._begun = now
        self._session.keep(msgspec.structs.replace(row, predicted=planned.predicted, note=held))
        if self._progress is not None:
            self._progress()
