"""Handles SIGTERM, sent by batch systems before a time limit and by ``kill``: save a checkpoint and end.

Before the first step is done there is nothing to save: the rank says so and ends.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

_LEAST_SECONDS = 5.0
_STEPS = 4  # A training thread without a step in the time of so many usual ones is stuck; the signal ends the process
_SIG_DFL = 0
_POLL_SECONDS = 0.5
_said = threading.Lock()


def say_early() -> None:
    """Report, once, that the run ends before its first step, and what is lost: nothing."""
    if not _said.acquire(blocking=False):
        return
    kept = f"; {Termination.kept} stays as it is" if Termination.kept else ""
    text = f"before the first step: no step is done, and nothing is lost{kept}"
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"stopped {text}\n")
        sys.stdout.flush()
    if (monitor := _monitor()) is not None:
        monitor.probe().stopping()
        with monitor.activity("stop", text):
            pass


def _monitor() -> Any:
    """Return the module of reports, or None before the rank has imported it: with it comes torch, and the probe."""
    return sys.modules.get(f"{__package__}.monitor")


class StoppedEarlyError(BaseException):
    """A request to end before the first step is done; no ``Exception``, which libraries catch while they load."""


class Termination:
    """Records a SIGTERM while the training thread makes progress; otherwise the signal ends the process.

    From ``start_up`` until the first step is done, SIGTERM and ``ftmon stop`` raise ``StoppedEarlyError`` in the main
    thread, and end the process where it runs no Python (in a collective, or in a compiler).

    A rank that waits for a dead one runs no Python, and its launcher's SIGTERM must end it. So a thread, woken by the
    interpreter for every signal, checks that steps go on. A second SIGTERM ends the process at once.
    """

    kept: ClassVar[str] = ""  # The checkpoint that the run resumes from
    _of_start_up: ClassVar["Termination | None"] = None

    def __init__(self, *, starts: bool = False) -> None:
        self.requested = False
        self._starts = starts
        self._raised = False
        self._pid = os.getpid()
        self._steps = 0
        self._usual_s = 0.0
        self._last = time.monotonic()
        self._acknowledged = False
        self._busy = False
        self._active = threading.current_thread() is threading.main_thread()
        if not self._active:
            return
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGTERM, self._note)
        # A worker that receives SIGTERM before ``_leave_child`` would write into this process's pipe, and survive.
        os.register_at_fork(
            before=lambda: self._block(signal.SIG_BLOCK),
            after_in_parent=lambda: self._block(signal.SIG_UNBLOCK),
            after_in_child=self._leave_child,
        )
        threading.Thread(target=self._watch, name="ftmon-sigterm", daemon=True).start()

    @classmethod
    def start_up(cls) -> None:
        """Handle SIGTERM from now on, before the first step."""
        cls._of_start_up = cls(starts=True)
        threading.Thread(target=cls._of_start_up._poll, name="ftmon-stop", daemon=True).start()

    @classmethod
    def of_steps(cls) -> "Termination":
        """Return what handles SIGTERM while steps are made."""
        found, cls._of_start_up = cls._of_start_up or cls(), None
        found._last = time.monotonic()
        return found

    def step(self) -> None:
        """Record the end of a step."""
        self._starts = False
        now = time.monotonic()
        self._usual_s, self._last = now - self._last, now
        self._steps += 1

    @contextmanager
    def busy(self) -> Generator[None]:
        """Count a ``with`` block as progress: evaluations and checkpoints are slower than steps."""
        self._busy = True
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._steps += 1
            self._busy = False

    def acknowledge(self) -> None:
        """Record that the run is ending on the signal, so that it has time for its remaining work."""
        self._acknowledged = True

    def close(self) -> None:
        """Restore the former handling of SIGTERM."""
        if self._active and os.getpid() == self._pid:
            self._active = False
            signal.set_wakeup_fd(self._wakeup_before)
            signal.signal(signal.SIGTERM, self._handler_before)
            os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.requested = True
        if self._starts and not self._raised:
            self._raised = True
            raise StoppedEarlyError

    def _poll(self) -> None:
        """Take a request of ``ftmon stop`` for a SIGTERM, which interrupts also what waits."""
        while self._starts and self._active:
            monitor = _monitor()
            if monitor is not None and hasattr(monitor, "probe") and monitor.probe().stop_is_asked():
                os.kill(self._pid, signal.SIGTERM)
                return
            time.sleep(_POLL_SECONDS)

    def _block(self, how: int) -> None:
        if self._active:
            signal.pthread_sigmask(how, [signal.SIGTERM])

    def _leave_child(self) -> None:
        """Restore the default action of SIGTERM in a forked process, such as a data loader's worker."""
        if self._active:
            self._active = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def _watch(self) -> None:
        asked = 0
        while self._active:
            try:
                received = os.read(self._reader, 64)
            except OSError:
                return
            if not received:
                os.close(self._reader)
                return
            asked += received.count(signal.SIGTERM)
            if asked > 1:
                _die()
            if asked and signal.SIGTERM in received:
                threading.Thread(target=self._die_when_stuck, name="ftmon-stuck", daemon=True).start()

    def _die_when_stuck(self) -> None:
        while self._active and not self._acknowledged:
            before = self._steps
            time.sleep(max(_LEAST_SECONDS, _STEPS * self._usual_s))
            stuck = self._steps == before and not self._busy
            if stuck and self._active and not self._acknowledged:
                if self._starts:
                    say_early()
                _die()


def _die() -> None:
    """End this process by SIGTERM, from any thread; Python changes handlers in the main thread only."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(_SIG_DFL))
    os.kill(os.getpid(), signal.SIGTERM)
