"""Runs a sweep's configurations one at a time, reads their recordings, and writes a row for each, within the budget.

With ``one_process`` a process measures the sequence lengths of a configuration, shortest first. The row of each length
is written as soon as its steps are recorded. A length that fails ends the process; later ones run in another process.
"""

import contextlib
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...protocol.analysis.sweep.search import why_not_next
from ...protocol.analysis.sweep.summary import figures
from ...protocol.errors import RecordingError
from ...protocol.host.process import is_alive
from ...protocol.messages.control import Alert
from ...protocol.messages.telemetry import Hello, Step
from ...protocol.recording.reader import Reader, RecordedRun
from ...protocol.run.end import last_lines
from ...protocol.run.rundir import ExitFile, RunDir
from ...protocol.run.start import CommandEnd, spawn_start, started_run
from ...protocol.sweep.rows import (
    Ended,
    Entry,
    Planned,
    Predicted,
    RankRow,
    Results,
    Row,
    Settings,
    Started,
    Verdict,
    group_of,
    key_of,
)
from ...protocol.text import first_line
from ..host import processes
from ..host.end.kill import sweep
from ..host.hardware.gpus import GpuUse, gpu_use
from .plan import LENGTH, STOP_GRACE_SECONDS, Job, Lines, Spec, job, still_held

_START_SECONDS = 180.0
_POLL_SECONDS = 0.5
_CLOSING_SECONDS = 90.0  # slightly more than a launcher's wait for its hub to finish the recording
_END_SECONDS = 30.0


class RefusedError(Exception):
    """The run was not started; the text is the starter's output, one line."""


class Ending(NamedTuple):
    """How a run ended."""

    run: RunDir
    exit: ExitFile | None  # the recorded end, or None
    ended_for: str
    """Reason why the sweep ended it: ``timeout``, ``hang``, ``steps``, ``interrupt``, ``budget``; empty: it ended by
    itself, or the monitor ended it."""
    left: list[int]  # pids of the run's processes that could not be ended
    asked: float = math.inf  # when the sweep began to end it, seconds since the epoch; infinity: it ended by itself


class Running:
    """A run that depends on this process: if this process dies, its launcher ends it.

    Raises ``RefusedError`` if it was not started.
    """

    def __init__(self, job: Job) -> None:
        self._line = CommandEnd()
        process, request = spawn_start(job.request, self._line, environ=job.environment)
        try:
            output, errors = process.communicate(request, timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise RefusedError(f"its start took more than {_START_SECONDS:.0f} s") from None
        if process.returncode:
            words = errors.decode(errors="replace").strip().splitlines()
            raise RefusedError(words[-1] if words else f"its start ended with status {process.returncode}")
        run = started_run(output)
        if run is None:
            raise RefusedError("its start did not say which run it is")
        self.run = run

    def wait(self, deadline: float, ended: Callable[[], str]) -> Ending:
        """Wait for the run's end, or end it at a deadline (``time.monotonic``).

        ``ended`` is called twice a second, and returns a reason to end the run now, or empty.
        """
        why = ""
        while not why and not self._over():
            self._wait(_POLL_SECONDS)
            if not self._over():  # else it ended by itself meanwhile
                why = "timeout" if time.monotonic() >= deadline else ended()
        asked = time.time() if why else math.inf
        if why:
            self._end()
        closing = time.monotonic() + _CLOSING_SECONDS
        while not self._line.closed and time.monotonic() < closing:
            self._wait(_POLL_SECONDS)
        return Ending(self.run, self._exit(), why, self._clear(), asked)

    def _over(self) -> bool:
        return self._exit() is not None or self._line.closed

    def _exit(self) -> ExitFile | None:
        self._line.read()
        return self._line.end or self.run.read_exit()

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(InterruptedError):
            select.select([self._line.fileno()], [], [], seconds)
        self._line.read()

    def _end(self) -> None:
        """Make the launcher end the run; it kills the remaining processes after the run's grace time."""
        asked = False
        deadline = time.monotonic() + STOP_GRACE_SECONDS + _END_SECONDS
        while not self._over() and time.monotonic() < deadline:
            launcher = self._line.launcher or self.run.read_run().launcher
            if not asked and launcher is not None and is_alive(launcher):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(launcher.pid, signal.SIGTERM)
                asked = True
            self._wait(_POLL_SECONDS / 5)

    def _clear(self) -> list[int]:
        """End the run's remaining processes; return those that could not be ended."""
        return [process.pid for process in sweep(lambda: processes.of_run(self.run.path, (), {os.getpid()}))]


def clear_lost(run: RunDir) -> None:
    """End the run of a killed sweep; its launcher does that itself unless it was killed too."""
    deadline = time.monotonic() + STOP_GRACE_SECONDS + _END_SECONDS
    while run.path.exists() and run.read_exit() is None and time.monotonic() < deadline:
        launcher = run.read_run().launcher
        if launcher is None or not is_alive(launcher):
            break
        time.sleep(_POLL_SECONDS / 5)
    sweep(lambda: processes.of_run(run.path, (), {os.getpid()}))


_TEXT = 300


def read(run: RunDir) -> RecordedRun | None:
    """Return a run's recording; None if there is none, or it cannot be read."""
    try:
        return RecordedRun(run.recording)
    except RecordingError:
        return None


class Live(NamedTuple):
    """Progress of a live run."""

    steps: int  # finished by every rank; 0 while a rank has finished none
    hung_seconds: float  # for which the monitor has reported it as hung; 0: it is not


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


def rank_rows(recorded: RecordedRun, warm_up: int, most: int, index: int | None = None) -> list[RankRow]:
    """Return the figures of each rank over ``most`` steps after ``warm_up``.

    ``index``: of this one of the lengths measured in one process; NVML's figures are then omitted, as they do not
    shrink from one length to the next.
    """
    first = (index or 0) * (warm_up + most)
    found: list[RankRow] = []
    for rank in recorded.ranks:
        steps, nvml = recorded.steps(rank), recorded.nvml.get(rank, 0)
        if index is not None:
            steps, nvml = [step for step in steps if first < step.step <= first + warm_up + most], 0
        found.append(figures(rank, steps, warm_up, most, recorded.hellos.get(rank), nvml))
    return found


class Why(NamedTuple):
    """Outcome of a run."""

    verdict: Verdict
    text: str = ""
    phase: str = ""
    rank: int | None = None
    step: int | None = None
    asked_bytes: int = 0


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
        last = [steps[-1].step for rank in recorded.ranks if (steps := recorded.steps(rank))]
        return Why("timeout", f"ended after {timeout:.0f} s", step=min(last, default=None))
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


_SESSION_POLL_SECONDS = 2.0  # seconds between reads of a live run's recording
_ENDING_SECONDS = STOP_GRACE_SECONDS + 10.0  # part of a budget reserved for the end of a run and of the sweep


class StopError(Exception):
    """Ends the session before its plan is finished."""

    def __init__(self, reason: Ended) -> None:
        super().__init__(reason.text)
        self.reason = reason


class Session:
    """Runs configurations and keeps their rows.

    ``append`` keeps an entry, or raises ``FtmonError``. ``earlier``: contents of the results file before this session.
    ``fail_fast``: the first run that is not done ends the session. ``interrupted`` returns whether it is to end.
    """

    jobs: Any = None  # ``engines.Jobs``, which runs configurations elsewhere; None: on this host

    def __init__(
        self,
        spec: Spec,
        append: Callable[[Entry], None],
        earlier: Results,
        lines: Lines,
        fail_fast: bool,
        interrupted: Callable[[], bool],
    ) -> None:
        self.spec = spec
        self._append = append
        self.lines = lines
        self._fail_fast = fail_fast
        self.interrupted = interrupted
        self._answered = earlier.answered()
        self._used_before = earlier.seconds_used()
        self._begun = time.monotonic()
        self._next_poll = 0.0
        self._count = sum(isinstance(entry, Started) for entry in earlier.entries)
        self.rows = list(self._answered.values())  # all rows, those of earlier sessions first

    @property
    def used_seconds(self) -> float:
        """Wall-clock time of all sessions."""
        return self._used_before + time.monotonic() - self._begun

    def has(self, settings: Settings, repeat: int = 0) -> bool:
        """Return whether there is a row of a run."""
        return (key_of(settings), repeat) in self._answered

    def measure(self, settings: Settings, repeat: int = 0, predicted: Predicted | None = None) -> Row:
        """Return the row of a run, after running it unless there is one.

        Raises ``StopError`` if the budget is used up, the session was interrupted, or ``--fail-fast`` ends it.
        """
        key = (key_of(settings), repeat)
        if key not in self._answered:
            planned = Planned(settings, predicted)
            if self.jobs is not None:
                self.jobs.measure([(planned, repeat)], lambda: None)
            else:
                Process(self, [planned], repeat).measure()
        return self._answered[key]

    def check(self) -> None:
        """Check that another run may begin.

        Raises ``StopError`` if the budget is used up, or the session was interrupted.
        """
        if self.interrupted():
            raise StopError(Ended(time.time(), "interrupted"))
        if why := why_not_next(self.spec.budget, self.used_seconds, self.rows, _ENDING_SECONDS):
            raise StopError(Ended(time.time(), "budget", why))

    @property
    def next_name(self) -> str:
        """Name of the next run."""
        return f"{self.spec.name}-{self._count + 1:03d}"

    def started(self, settings: Settings, repeat: int, run: str = "", job: str = "") -> None:
        """Write the start of a run; ``run``: its directory; ``job``: its number elsewhere."""
        self._count += 1
        self._append(Started(time.time(), settings, repeat, run, job))

    def lost(self, row: Row) -> None:
        """Write the unfinished row of a job elsewhere, which will be run again."""
        self._append(row)
        self.lines.row(row)

    def keep(self, row: Row) -> None:
        """Write a row; raise ``StopError`` if the session ends with it."""
        self._append(row)
        self.lines.row(row)
        if row.verdict == "unfinished":
            reason, text = ("interrupted", "") if self.interrupted() else ("budget", "the budget is used up")
            raise StopError(Ended(time.time(), reason, text))
        self._answered[key_of(row.settings), row.repeat] = row
        self.rows.append(row)
        if row.note and self.jobs is None:  # of another host it is only said
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
        self._next_poll = time.monotonic() + _SESSION_POLL_SECONDS
        return progress(run, time.time())


def length_of(settings: Settings) -> int:
    """Return the sequence length of a configuration of a sweep over lengths."""
    value = settings[LENGTH]
    assert isinstance(value, int)  # checked with the sweep file
    return value


class Process:
    """One process, and the configurations to measure in it: one, or several that differ only in their length."""

    def __init__(
        self, session: Session, runs: Sequence[Planned], repeat: int, progress: Callable[[], object] = lambda: None
    ) -> None:
        self._session = session
        self._spec = session.spec
        self._runs = runs
        self._lengths = [length_of(run.settings) for run in runs] if self._spec.one_process else []
        self._steps = self._spec.warm_up + self._spec.steps  # steps of each run
        self._repeat = repeat
        self._progress = progress
        self._done = 0  # number of lengths with a row
        self._begun = time.time()  # time at which the present length began

    def measure(self) -> int:
        """Run the process, and return the number of configurations with a row, at least one.

        Raises ``StopError`` if the session ends.
        """
        session, earlier = self._session, gpu_use(())
        session.check()
        first = self._runs[0]
        session.lines.begins(first.settings, self._repeat, first.predicted)
        try:
            running = Running(job(self._spec, first.settings, session.next_name, self._lengths))
        except RefusedError as error:
            for number, run in enumerate(self._runs):
                if number:
                    session.lines.begins(run.settings, self._repeat, run.predicted)
                session.started(run.settings, self._repeat)
                self._row(Why("refused", str(error).removeprefix("ftmon: ")), [], "", "")
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
        if self._spec.command and live.steps >= self._steps:
            return "steps"
        # The last row is written once the process is gone.
        done = min(live.steps // self._steps, len(self._runs) - 1)
        if done > self._done and (recorded := read(run)) is not None:
            while self._done < done:
                self._measured(recorded, run, "")
        return "hang" if live.hung_seconds >= self._spec.hang_grace else ""

    def _end(self, ending: Ending, earlier: GpuUse | None) -> None:
        recorded = read(ending.run)
        held = still_held(earlier, recorded.pids, recorded.devices) if recorded else still_held(earlier, (), ())
        if ending.left:
            held = "; ".join(filter(None, (held, f"processes {', '.join(map(str, ending.left))} did not end")))
        count = len(self._runs)
        done = recorded is not None and min(map(recorded.steps_seen, recorded.ranks), default=0)
        done = min(count, done // self._steps) if self._lengths else 0
        while recorded is not None and self._done < done:
            self._measured(recorded, ending.run, held if self._done == count - 1 else "")
        if self._done == count:
            return
        found = why(ending, recorded, self._spec.timeout)
        if self._lengths and found.verdict == "done":
            found = Why("crash", "the process exited with status 0 before it had measured this length")
        if found.step is not None:
            found = found._replace(step=found.step - self._done * self._steps)
        self._row(found, self._ranks(recorded), ending.run.id, held)

    def _ranks(self, recorded: RecordedRun | None) -> list[RankRow]:
        index = self._done if self._lengths else None
        return rank_rows(recorded, self._spec.warm_up, self._spec.steps, index) if recorded is not None else []

    def _measured(self, recorded: RecordedRun, run: RunDir, held: str) -> None:
        """Write the row of a finished length, after the next one has begun."""
        last = (self._done + 1) * self._steps
        steps = [step for rank in recorded.ranks for step in recorded.steps(rank) if step.step == last]
        ends = [step.started + step.host_us / 1e6 for step in steps]
        more = self._done + 1 < len(self._runs)
        self._row(Why("done"), self._ranks(recorded), run.id, held, max(ends, default=None) if more else None)
        if more:
            following = self._runs[self._done]
            self._session.lines.begins(following.settings, self._repeat, following.predicted)
            self._session.started(following.settings, self._repeat, str(run.path))

    def _row(self, found: Why, ranks: list[RankRow], run: str, held: str, ended: float | None = None) -> None:
        """Write the row of the present configuration, which ended at ``ended`` or now; ``held``: still in use."""
        planned, now = self._runs[self._done], ended or time.time()
        row = Row(
            planned.settings,
            time=now,
            seconds=round(now - self._begun, 3),
            repeat=self._repeat,
            run=run,
            ranks=ranks,
            predicted=planned.predicted,
            note=held,
            **found._asdict(),
        )
        self._done += 1
        self._begun = now
        self._session.keep(row)
        self._progress()


def measure_plan(
    session: Session, runs: Sequence[Planned], repeat: int, progress: Callable[[], object] = lambda: None
) -> None:
    """Measure configurations; those that differ only in their sequence length share a process.

    ``progress`` is called after each row. Raises ``StopError`` if the session ends before its plan is done.
    """
    groups: dict[str, list[Planned]] = {}
    for run in runs:
        if not session.has(run.settings, repeat):
            groups.setdefault(group_of(run.settings, LENGTH), []).append(run)
    for group in groups.values():
        waiting = sorted(group, key=lambda run: length_of(run.settings))
        while waiting:
            waiting = waiting[Process(session, waiting, repeat, progress).measure() :]
