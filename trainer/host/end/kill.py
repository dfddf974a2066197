"""Kills ranks, or a whole run, and verifies it: signals in steps, to processes known by pid and start time."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....protocol.run.environment import RANK_PID_ENV
from ....protocol.text import counted, duration, kernel_sleep, sanitize
from .. import processes
from ..hardware.gpus import GpuUse, gpu_use, verdict, wait_until_free
from ..inspection import inspect
from ..loop import Post, Reply, in_thread
from ..processes import Origin, Process, escaped, origin

INT_SECONDS = 2.0
TERM_SECONDS = 3.0
KILL_SECONDS = 8.0  # Time limits of the steps of an escalation; the last one is for the whole kill
ONE_SIGNAL_SECONDS = 8.0  # Time to wait after a single signal that the user chose
_GPU_SECONDS = 5.0
_RANK_PID = f"{RANK_PID_ENV}=".encode()
_LAUNCHER = "ftmon.trainer.launch.launcher"
_POLL_SECONDS = 0.05


def sweep(
    find: Callable[[], list[Process]],
    on_wait: Callable[[], None] = lambda: None,
    term_seconds: float = 2.0,
    kill_seconds: float = 8.0,
) -> list[Process]:
    """End all processes that ``find`` returns, calling it repeatedly, because a process may start others until it dies.

    KILL follows TERM after ``term_seconds`` and is repeated for ``kill_seconds``; ``on_wait`` is called between polls.
    Returns the processes still alive, usually in uninterruptible sleep (state D).
    """
    begun = time.monotonic()
    killed_at: float | None = None
    reported: set[tuple[int, int]] = set()
    while True:
        now = time.monotonic()
        left = find()
        if not left or (killed_at is not None and now - killed_at > kill_seconds):
            return left
        if killed_at is None and now - begun >= term_seconds:
            killed_at = now
        for process in left:
            with contextlib.suppress(PermissionError):
                if killed_at is not None:
                    processes.send_signal(process, signal.SIGKILL)
                elif process.key not in reported:
                    reported.add(process.key)
                    processes.send_signal(process, signal.SIGTERM)
                    processes.send_signal(process, signal.SIGCONT)
        on_wait()
        time.sleep(_POLL_SECONDS)


def why_stays(process: Process, otherwise: str = "") -> str:
    """Return why a process is still alive after a kill, as a sentence."""
    subject = f"pid {process.pid} ({process.name}) is"
    if process.state == "D":
        sleeps = kernel_sleep(inspect.wchan(process.pid, process.pid))
        return f"{subject} {sleeps}: it ends when the kernel returns"
    return f"{subject} still alive in state {process.state}{otherwise}"


class Target(NamedTuple):
    """A rank's process."""

    rank: int
    pid: int
    start_ticks: int


class Outcome(NamedTuple):
    """Outcome of a kill, or another command."""

    ok: bool
    text: str
    data: dict[str, Any]


async def at_once(text: str, data: dict[str, Any]) -> Outcome:
    """Return a successful outcome."""
    return Outcome(True, text, data)


NO_THREAD = Outcome(False, "no thread can be started on this host", {})


@dataclass(frozen=True)
class KillScope:
    """Processes of one host that a kill ends."""

    run: Path  # The run directory's path, found in its processes' environment
    targets: list[Target]  # The ranks to end; for the whole run, all ranks known on this host
    spared: Collection[int]  # Pids never to signal: hub and launcher
    whole_run: bool = False  # Also end the job's launchers and all processes with the run in their environment
    roots: Collection[int] = ()  # For the whole run, pids whose descendants all belong to it (the launcher)
    others: Collection[Target] = ()
    """The ranks of this host to spare, with their children, even if a target started them."""


class Kill:
    """One kill; ``number`` is the signal to send, None to escalate INT, TERM, KILL.

    It reads the process table again before each step, because a dying rank may leave new workers, and ends only when no
    process is left or its time limit is reached.
    """

    def __init__(self, scope: KillScope, number: signal.Signals | None, on_gpu: bool) -> None:
        self._scope = scope
        self._targets = scope.targets
        self._number = number
        self._on_gpu = on_gpu
        self._known: dict[tuple[int, int], Process] = {}
        self._origins: list[Origin] = []  # What identifies processes of the ranks, read before the first signal
        self._last_signal: signal.Signals | None = None
        self._refused: set[int] = set()
        self._gpus_before: GpuUse | None = None

    def run(self) -> Outcome:
        """Kill, verify, report."""
        try:
            return self._kill()
        except Exception as error:  # the user must get an answer after any error
            return Outcome(False, f"the kill itself failed: {type(error).__name__}: {error}", {})

    def _kill(self) -> Outcome:
        begun = time.monotonic()
        table = processes.table()
        origins = [origin(target.rank, target.pid, table) for target in self._targets]
        self._origins = [one for one in origins if one is not None]
        first = self._find()
        if self._on_gpu:
            self._gpus_before = gpu_use([process.pid for process in first])
        left = self._escalate(first) if self._number is None else self._one_signal(first, self._number)
        return self._report(left, time.monotonic() - begun)

    def _find(self) -> list[Process]:
        """Return the targets' living processes, also those found earlier: workers of a dead rank lose their parent."""
        table = processes.table()
        spared, roots = self._scope.spared, self._scope.roots
        mains = {process.pid for process in self._mains(table.values())}
        if self._scope.whole_run:
            # Without the spared processes (except the roots), so that their descendants are not found.
            others = {pid: process for pid, process in table.items() if pid in roots or pid not in spared}
            below = {process.pid for process in processes.descendants(roots, others)}
            found = processes.of_run(self._scope.run, mains | below, spared)
        else:
            found = self._of_ranks(mains, table)
        self._known |= {process.key: process for process in found}
        now = [table[pid] for pid, _ in self._known if pid in table and pid not in spared]
        return [process for process in now if process.key in self._known and process.alive]

    def _of_ranks(self, mains: set[int], table: dict[int, Process]) -> list[Process]:
        """Return the ranks' own processes (``mains``) and their children, except for other ranks and their children."""
        others = {process.pid for process in _alive(self._scope.others, table.values())}
        others.update(process.pid for process in processes.descendants(others, table, apart=mains))
        found = [table[pid] for pid in mains] + processes.descendants(mains, table, apart=others)
        found += processes.marked(self._scope.run, table.values(), [target.pid for target in self._targets])
        away = [daemon for daemons in escaped(self._origins, table).values() for daemon in daemons]
        found += [*away, *processes.descendants([daemon.pid for daemon in away], table)]
        return [process for process in found if process.pid not in others]

    def _mains(self, among: Iterable[Process]) -> list[Process]:
        return _alive(self._targets, among)

    def _escalate(self, first: list[Process]) -> list[Process]:
        # INT goes to the ranks only: they can clean up, and their launcher sees them end.
        self._signal(self._mains(first) or first, signal.SIGINT)
        left = self._wait(first, INT_SECONDS, stop_early=not self._scope.whole_run)
        if left:
            self._signal(left, signal.SIGTERM)
            left = self._wait(left, TERM_SECONDS)
        if left:
            self._last_signal = signal.SIGKILL
            left = sweep(self._find, term_seconds=0.0, kill_seconds=KILL_SECONDS)
        return left

    def _one_signal(self, first: list[Process], number: signal.Signals) -> list[Process]:
        mains = self._mains(first)
        everything = number is signal.SIGKILL or self._scope.whole_run or not mains
        self._signal(first if everything else mains, number)
        left = self._wait(first, ONE_SIGNAL_SECONDS, stop_early=not everything)
        if left and (number is signal.SIGKILL or not self._mains(left)):
            left = sweep(self._find)  # the ranks are gone, so no parent ends their children
        return left

    def _wait(self, left: list[Process], seconds: float, stop_early: bool = False) -> list[Process]:
        """Wait until no process, or with ``stop_early`` no rank, is left; return those left."""
        deadline = time.monotonic() + seconds
        is_over = False
        while left and not is_over:
            time.sleep(_POLL_SECONDS)
            is_over = time.monotonic() >= deadline  # before the last look: this thread may not run for a while
            left = self._find()
            if stop_early and not self._mains(left):
                break
        return left

    def _signal(self, to: list[Process], number: signal.Signals) -> None:
        self._last_signal = number
        for process in to:
            try:
                processes.send_signal(process, number)
                if number is not signal.SIGKILL:  # a stopped process handles the signal only after SIGCONT
                    processes.send_signal(process, signal.SIGCONT)
            except PermissionError:
                self._refused.add(process.pid)

    def _report(self, left: list[Process], seconds: float) -> Outcome:
        alive = {process.key for process in left}
        ended = [process for key, process in self._known.items() if key not in alive]
        targets = [target for target in self._targets if target.rank >= 0]
        ranks = [target.rank for target in targets if (target.pid, target.start_ticks) not in alive]
        data: dict[str, Any] = {
            "ended": [process.pid for process in ended],
            "left": [process.pid for process in left],
            "ranks": ranks,
            "seconds": round(seconds, 3),
            "signal": self._last_signal.name if self._last_signal and self._known else "",
        }
        if not self._known:
            return Outcome(True, "no process of the run was left", data)
        sentences = [f"{counted(len(ended), 'process')} ended in {duration(seconds)} ({data['signal']})"]
        sentences += [self._why_left(process) for process in left]
        held = False
        if self._on_gpu:
            held, words = verdict(self._gpus_before, wait_until_free([process.pid for process in ended], _GPU_SECONDS))
            sentences.append(words)
        strays = [] if self._scope.whole_run else self._unattributed()
        if strays:
            names = ", ".join(f"pid {stray.pid} ({sanitize(stray.name, 40)})" for stray in strays[:8])
            sentences.append(
                f"not ended, because it is unknown which rank started them: {names}; killing the run ends them"
            )
            data["strays"] = [stray.pid for stray in strays]
        elif not left:
            sentences.append("nothing is left of the run" if self._scope.whole_run else "no process of theirs is left")
        return Outcome(not left and not held, "; ".join(sentences), data)

    def _unattributed(self) -> list[Process]:
        """Return daemons with another environment that an unknown rank of this run left behind.

        They are children of the run's launcher, which did not start them, because it is a subreaper.
        """
        table = processes.table()
        launchers = [pid for pid in self._scope.spared if pid in table and processes.runs_module(pid, _LAUNCHER)]
        oldest = min((one.start_ticks for one in self._origins), default=0)
        ranks = {f"RANK={target.rank}".encode() for target in self._targets}
        found: list[Process] = []
        for process in table.values():
            started = process.parent in launchers and process.start_ticks > oldest
            if not started or not process.alive or process.pid in self._scope.spared:
                continue
            variables = [one for one in processes.environment_of(process.pid) if one.startswith((b"RANK=", _RANK_PID))]
            if not variables or any(one in ranks for one in variables):
                found.append(process)
        return found

    def _why_left(self, process: Process) -> str:
        now = processes.same(process) or process
        if now.state != "D" and now.pid in self._refused:
            return f"pid {now.pid} ({now.name}) belongs to another user"
        return why_stays(now, "" if self._number is None else "; kill without a signal goes on to KILL")


def _alive(targets: Iterable[Target], among: Iterable[Process]) -> list[Process]:
    keys = {(target.pid, target.start_ticks) for target in targets}
    return [process for process in among if process.key in keys and process.alive]


def kill(scope: KillScope, number: signal.Signals | None, on_gpu: bool, post: Post) -> Reply[Outcome]:
    """Start a ``Kill`` in a thread; return the reply for its outcome, set through ``post``."""
    return in_thread(Kill(scope, number, on_gpu).run, post, "kill", NO_THREAD)


def interrupt_ranks(targets: Iterable[Target]) -> list[Target]:
    """Send INT to each living target; return those that received it."""
    return [target for target in targets if _interrupt(target)]


def interrupt_job(run: Path, roots: list[int], spared: Collection[int]) -> list[int]:
    """Send INT to all process groups of the run on this host; return them.

    ``roots`` are pids whose descendants all belong to the run; their own groups and ``spared`` pids are not touched.
    """
    found = dict.fromkeys(process.group for process in processes.of_run(run, roots, spared))
    groups = [group for group in found if group not in (os.getpgid(0), *roots)]
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGINT)
    return groups


def _interrupt(target: Target) -> bool:
    process = processes.read(target.pid)
    with contextlib.suppress(PermissionError):
        if process is not None and _alive([target], [process]):
            return processes.send_signal(process, signal.SIGINT)
    return False
