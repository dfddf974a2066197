"""Watches the ranks' processes on this host: alive, stopped or dead, and their exit status.

A thread waits on pidfds, so that a death is detected at once, while the process is still a zombie and
``/proc/PID/stat`` has its exit status (field 52). Five times a second it reads the processes' states.
"""

import contextlib
import os
import re
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...protocol.analysis.stalls.tracker import ProcessFact
from . import processes
from .hardware.host import KernelKills

_POLL_SECONDS = 0.2
_REPEAT_SECONDS = 1.0  # Seconds after which an unchanged fact is repeated, so that it counts as current
_PROFILERS = ("py-spy",)  # Names of programs that stop a process to read its stack, then continue it
_PROFILER_SECONDS = 20.0  # Maximum time for which a profiler stops a process, to read the symbols of all libraries
_TORCHRUN_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)\)?.*\(pid:\s*(\d+)\)")
_PID_EXITS = re.compile(r"[Pp]rocess (\d+) exits successfully")


@dataclass(slots=True, eq=False)
class _Watched:
    rank: int
    pid: int
    start_ticks: int
    descriptor: int = -1
    fact: ProcessFact | None = None
    reported_at: float = 0.0
    traced_since: float | None = None  # When first found stopped by a debugger or profiler, and not continued since


class Supervisor(threading.Thread):
    """Yields facts about watched processes. ``watch``, ``read_words`` and ``poll`` are called by the main loop.

    ``notify`` is called in this thread when a process stopped, continued or died; the main loop should then ``poll``.
    """

    def __init__(self, notify: Callable[[], object]) -> None:
        super().__init__(name="supervisor", daemon=True)
        self._notify = notify
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._facts: deque[ProcessFact] = deque()
        self._poller = select.poll()
        self._kills = KernelKills()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wakeup, select.POLLIN)
        self._ending = threading.Event()

    def watch(self, rank: int, pid: int, start_ticks: int) -> None:
        """Watch the process of ``rank``, replacing an earlier process of that rank."""
        with self._lock:
            old = self._watched.get(rank)
            if old is not None and (old.pid, old.start_ticks) == (pid, start_ticks):
                return
            if old is not None:
                self._forget(old)
            new = _Watched(rank, pid, start_ticks)
            with contextlib.suppress(OSError):
                new.descriptor = os.pidfd_open(pid)
                self._poller.register(new.descriptor, select.POLLIN)
            self._watched[rank] = new
        os.eventfd_write(self._wakeup, 1)

    def read_words(self, text: str) -> None:
        """Read an exit status from a launcher's log line, for processes reaped before it could be read."""
        if found := _TORCHRUN_EXIT.search(text):
            code, pid = int(found[1]), int(found[2])
        elif found := _PID_EXITS.search(text):
            code, pid = 0, int(found[1])
        else:
            return
        with self._lock:
            for watched in self._watched.values():
                fact = watched.fact
                if watched.pid != pid or (fact is not None and (fact.exit_code, fact.signal) != (None, None)):
                    continue
                now = processes.read(pid)
                if now is not None and now.alive and now.start_ticks == watched.start_ticks:
                    continue  # the line is about another host's process with the same pid
                exit_code, number = (code, None) if code >= 0 else (None, -code)
                watched.fact = ProcessFact(watched.rank, pid, watched.start_ticks, False, "", exit_code, number)
                self._facts.append(watched.fact)
                self._forget(watched)

    def poll(self) -> list[ProcessFact]:
        """Return the facts since the last call."""
        return [self._facts.popleft() for _ in range(len(self._facts))]

    def alive(self) -> list[tuple[int, int, int]]:
        """Return (rank, pid, start_ticks) of the watched processes not known dead."""
        with self._lock:
            return [(w.rank, w.pid, w.start_ticks) for w in self._watched.values() if w.fact is None or w.fact.alive]

    def pids(self) -> dict[int, int]:
        """Return the pids of the watched processes not known dead, by rank."""
        return {rank: pid for rank, pid, _ in self.alive()}

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        os.eventfd_write(self._wakeup, 1)
        if self.is_alive():
            self.join(timeout=2)

    def run(self) -> None:
        """Wait for deaths, and read states."""
        while not self._ending.is_set():
            ready: set[int] = set()
            with contextlib.suppress(InterruptedError):
                ready = {descriptor for descriptor, _ in self._poller.poll(_POLL_SECONDS * 1000)}
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            with self._lock:
                self._check(ready)

    def _check(self, ready: set[int]) -> None:
        """Read every process, those with a signalled pidfd first, because others found dead died later.

        All are read before the details of any, because details take time, in which a parent may end and reap others.
        """
        living = [watched for watched in self._watched.values() if watched.fact is None or watched.fact.alive]
        seen: list[tuple[float, _Watched, processes.Process | None]] = []
        for woke_us in (True, False):
            now = time.time()
            part = [watched for watched in living if (watched.descriptor in ready) == woke_us]
            seen += [(now, watched, processes.read(watched.pid)) for watched in part]
        for at, watched, process in seen:
            self._conclude(at, watched, process)

    def _conclude(self, at: float, watched: _Watched, process: processes.Process | None) -> None:
        now = time.monotonic()
        fact = self._fact(at, watched, process, now)
        before = watched.fact
        changed = before is None or before.alive != fact.alive or _stopped(before) != _stopped(fact)
        if changed or now - watched.reported_at >= _REPEAT_SECONDS:
            if fact.alive:
                self._kills.record(watched.pid, now)
            watched.fact = fact
            watched.reported_at = now
            self._facts.append(fact)
            if changed:
                self._notify()
        if not fact.alive:
            self._forget(watched)

    def _fact(self, at: float, watched: _Watched, process: processes.Process | None, now: float) -> ProcessFact:
        who = (watched.rank, watched.pid, watched.start_ticks)
        if process is not None and process.start_ticks == watched.start_ticks:
            if process.alive:
                state = "S" if _is_being_read(watched, process, now) else process.state
                return ProcessFact(*who, True, state, time=at)
            state, status = process.state, process.wait_status
        else:
            state, status = "", self._status_of_reaped(watched)
        exit_code, number = processes.exit_of(status) if status is not None else (None, None)
        kill = self._kills.find(watched.pid, now) if number == signal.SIGKILL else None
        return ProcessFact(*who, False, state, exit_code, number, kill, at)

    @staticmethod
    def _status_of_reaped(watched: _Watched) -> int | None:
        if (watched.pid, watched.start_ticks) in processes.killed:
            return signal.SIGKILL.value
        return processes.status_of_reaped(watched.descriptor) if watched.descriptor >= 0 else None

    def _forget(self, watched: _Watched) -> None:
        self._kills.forget(watched.pid)
        if watched.descriptor >= 0:
            with contextlib.suppress(KeyError, OSError):
                self._poller.unregister(watched.descriptor)
            os.close(watched.descriptor)
            watched.descriptor = -1


def _is_being_read(watched: _Watched, process: processes.Process, now: float) -> bool:
    """Return whether a profiler stops a process briefly to read its stack.

    The first time that a process is found traced counts as brief; a debugger still traces it at the next check.
    """
    if process.state != "t":
        watched.traced_since = None
        return False
    if watched.traced_since is None:
        watched.traced_since = now
        return True
    return now - watched.traced_since < _PROFILER_SECONDS and processes.tracer(process.pid) in _PROFILERS


def _stopped(fact: ProcessFact) -> bool:
    return fact.proc_state in ("T", "t")
