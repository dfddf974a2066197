"""Lets other processes capture this rank's stacks while native code holds Python's lock.

faulthandler can write all stacks from within a signal handler, without the lock. Its handler is registered for a
real-time signal that no library uses. The signal is sent to the publisher's thread alone, so it interrupts no system
call of the script. A sender first checks that the process still catches the signal and that the file is still open
(``SelfDump``): by default such a signal ends the process.
"""

import faulthandler
import os
import signal
import threading
from pathlib import Path

from ....protocol.messages.telemetry import SelfDump
from .. import guard

_FIRST, _LAST = 9, 24
"""Offsets from SIGRTMIN. Some libraries use the lowest."""


class Dumper:
    """The handler of this process; for the publisher's thread."""

    def __init__(self, path: Path, training: int) -> None:
        self._path = path
        self._training = training
        self._descriptor = -1
        self._signal = 0
        self._given_up = False
        self.prepared: SelfDump | None = None
        """Signal and file for capturing the stacks from outside; None before registration, or if that failed."""

    def install(self, training: int) -> SelfDump | None:
        """Register the handler (see ``_install``) and keep the result."""
        self.prepared = self._install(training)
        return self.prepared

    def _install(self, training: int) -> SelfDump | None:
        """Register the handler (again if the script has replaced it); None if that fails."""
        self._training = training
        if self._given_up:
            return None
        try:
            if self._descriptor < 0:
                # Append: the hub reads the added bytes, and a restarted rank does not overwrite the file.
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if not self._signal:
                number = _free_signal()
                faulthandler.register(number, file=self._descriptor, all_threads=True, chain=False)
                self._signal = number
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            self._given_up = True
            guard.log_error("stacks cannot be had from outside", error)
            return None
        native = next((thread.native_id for thread in threading.enumerate() if thread.ident == training), None)
        return SelfDump(
            signal=self._signal,
            receiver=threading.get_native_id(),
            descriptor=self._descriptor,
            path=str(self._path),
            thread=f"0x{training:016x}",
            training=native or os.getpid(),
        )

    def lost(self, training: int) -> bool:
        """Return whether the result of ``install`` is out of date, so that it must be called and sent again.

        The script may have registered its own handler for the signal, or train in another thread.
        """
        if self._signal and signal.getsignal(self._signal) is not signal.SIG_DFL:
            # Not unregistered: that would restore the handler before faulthandler's, over the script's own.
            self._signal = 0
            return not self._given_up
        return training != self._training


def _free_signal() -> int:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in range(signal.SIGRTMIN + _FIRST, min(signal.SIGRTMIN + _LAST, signal.SIGRTMAX)):
        if signal.getsignal(number) is signal.SIG_DFL and number not in blocked and not _is_caught(number):
            return number
    raise OSError("every real-time signal is taken")


def _is_caught(number: int) -> bool:
    """Return whether native code has registered a handler for a signal, unknown to Python."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (number - 1) & 1:
            return True
    return False
