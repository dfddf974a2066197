"""Holds a rank at an out-of-memory error: the failing thread waits, and runs the console's code meanwhile.

The wait releases the interpreter's lock, so the publisher goes on: heartbeats, commands, logs. The waiting
thread itself runs a console's code, so that CUDA's device and stream are those of the failure.
"""

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from ....protocol.run.run_options import RunOptions
from ....protocol.text import duration
from .. import guard
from .console import Console

Answer = Callable[[bool, str, dict[str, Any]], None]


_RELEASED = "console: the rank was released"


class _Job(NamedTuple):
    code: str
    answer: Answer


class Hold:
    """The rank's hold. ``wait`` is for the failing thread, the rest for the publisher."""

    def __init__(self, options: RunOptions) -> None:
        self.wanted = options.on_oom == "hold"
        self.console_allowed = self.wanted and options.allow_console
        self.seconds = max(0.0, options.hold_timeout)
        """The hold ends by itself after this long; 0: never."""
        self.since = 0.0
        """Time at which the hold began, seconds since the epoch; 0: the rank is not held."""
        self._thread = 0
        self._busy = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._answers: deque[tuple[Answer, bool, str, dict[str, Any]]] = deque()
        self._entering = threading.Lock()
        self._lock = threading.Lock()
        self._leaving = False

    @property
    def here(self) -> bool:
        """Whether the calling thread is the held one, so that its allocations are the console's."""
        return bool(self.since) and self._thread == threading.get_ident()

    def wait(self, frames: list[FrameType], requested: int, device: Any) -> None:
        """Wait in the failing frame until released, interrupted or timed out; one thread at a time."""
        if not self.wanted or not self._entering.acquire(blocking=False):
            return
        try:
            console = Console(frames, requested, device) if self.console_allowed else None
            self._jobs = queue.SimpleQueue()
            self._thread = threading.get_ident()
            self._leaving = False
            self.since = time.time()
            self._serve(console)
        except KeyboardInterrupt:
            if not self._leaving:
                raise
        finally:
            self.since, self._thread, self._busy = 0.0, 0, False
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    self._answers.append((job.answer, False, _RELEASED, {}))
            frames.clear()
            self._entering.release()

    def _serve(self, console: Console | None) -> None:
        deadline = time.monotonic() + self.seconds if self.seconds else None
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, deadline - time.monotonic()) if deadline else None)
            except queue.Empty:
                guard.log(f"held for {duration(self.seconds)} (--hold-timeout): released")
                return
            if job is None or console is None:
                return
            with self._lock:
                if self._leaving:
                    self._answers.append((job.answer, False, _RELEASED, {}))
                    return
                self._busy = True
            try:
                output, failed = console.run(job.code)
            except KeyboardInterrupt:
                output, failed = "", "interrupted"
            with self._lock:
                self._busy = False
            self._answers.append((job.answer, True, "", {"output": output, "error": failed, "place": console.place}))

    def run(self, code: str, answer: Answer) -> str:
        """Run ``code`` in the held thread; return the refusal, or an empty string."""
        if not self.console_allowed:
            return "console: this run was not started with --on-oom hold --allow-console"
        if not self.since:
            return "console: this rank is not held"
        if self._busy or not self._jobs.empty():
            return "console: what was asked before is still running; 'ftmon release' interrupts it"
        self._jobs.put(_Job(code, answer))
        return ""

    def release(self) -> bool:
        """Release the rank, interrupting running code of a console; return False if it is not held."""
        if not self.since:
            return False
        with self._lock:
            self._leaving = True
            if self._busy:
                kind = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), kind)
        self._jobs.put(None)
        return True

    def tick(self) -> None:
        """Deliver the pending answers."""
        while self._answers:
            answer, ok, text, data = self._answers.popleft()
            answer(ok, text, data)
