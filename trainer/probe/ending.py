"""How a rank ends: its last words are sent, and the end is held up for half a second at the most."""

import atexit
import os
import sys
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...protocol.telemetry import Failure, Goodbye
from . import guard

if TYPE_CHECKING:
    from .probe import Probe
    from .publisher import Publisher

FLUSH_SECONDS = 0.5
_TRACEBACK_LIMIT = 16_384


def install(probe: "Probe", publisher: "Publisher") -> None:
    """Be told of an exception that ends the script, of ``sys.exit``, and of the interpreter's end."""
    ending = _Ending(probe, publisher)
    ending.hook_exceptions()
    atexit.register(ending.finish)
    multiprocessing: Any = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # A process of multiprocessing (torch.multiprocessing.spawn) ends without running atexit.
        multiprocessing.util.Finalize(None, ending.finish, exitpriority=-100)


class _Ending:
    def __init__(self, probe: "Probe", publisher: "Publisher") -> None:
        self._probe = probe
        self._publisher = publisher
        self._exit_code: Any = None
        self._interrupted = False
        self._finished = False

    def hook_exceptions(self) -> None:
        previous, leave = sys.excepthook, sys.exit

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._note(error)
            previous(kind, error, trace)

        def exit(status: Any = None, /) -> Any:  # noqa: A001
            self._exit_code = status
            leave(status)

        sys.excepthook = excepthook
        exit.__doc__ = leave.__doc__
        sys.exit = exit

    def _note(self, error: BaseException) -> None:
        probe = self._probe
        try:
            if isinstance(error, KeyboardInterrupt):
                self._interrupted = True
                return
            if probe.failed:
                return
            probe.saw_error(error)
            probe.failed = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:]
            tracker = probe.tracker
            probe.hand_over(
                Failure(probe.about.rank, tracker.step + 1, tracker.phase, time.time(), probe.failed[:2000], text)
            )
        except Exception as inner:
            guard.log_error("reporting a failure", inner)

    def finish(self) -> None:
        """Send the goodbye and end the publisher."""
        probe = self._probe
        if self._finished or os.getpid() != probe.about.process.pid:
            return
        self._finished = True
        try:
            # A script's own excepthook may not call the one before it; the interpreter keeps the exception anyway.
            last = getattr(sys, "last_value", None)
            if last is not None:
                self._note(last)
            probe.hand_over(self._goodbye())
            self._publisher.finish(FLUSH_SECONDS)
            probe.enabled = False
        except Exception as error:
            guard.log_error("ending", error)

    def _goodbye(self) -> Goodbye:
        probe = self._probe
        code = self._exit_code
        if probe.failed:
            reason, text = "failed", probe.failed[:500]
        elif self._interrupted or (probe.stop_at is not None and probe.can_stop):
            reason, text = "stopped", "interrupted" if self._interrupted else "stopped as asked"
        elif code not in (None, 0):
            reason, text = "failed", f"sys.exit({code!r})"[:500]
        else:
            reason, text = "finished", ""
        dropped = self._publisher.dropped + probe.overflowed
        return Goodbye(probe.about.rank, time.time(), probe.tracker.step, reason, text, dropped)
