"""Ends a rank: sends its last messages, which delays the end a little (``Publisher.finish``).

Also reports a SIGTERM that the script handles, at the moment when it comes: the script acts on it later.
"""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ....protocol.messages.telemetry import Failure, Goodbye
from .. import guard
from ..link.publisher import Publisher
from ..loop.training import Training
from ..phases.tracker import StopRequest

_TRACEBACK_LIMIT = 16_384
_OWN = "_ftmon_handler"  # Attribute of a reporting handler: the script's own


def install(training: Training, stop: StopRequest, publisher: Publisher) -> None:
    """Hook into exceptions that end the script, ``sys.exit``, and the interpreter's exit."""
    ending = _Ending(training, stop, publisher)
    ending.hook_exceptions()
    _report_sigterm(training.asked_to_stop)
    atexit.register(ending.finish)
    multiprocessing: Any = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # A process of multiprocessing (torch.multiprocessing.spawn) ends without running atexit.
        multiprocessing.util.Finalize(None, ending.finish, exitpriority=-100)


def _report_sigterm(asked: Callable[[], None]) -> None:
    """Call ``asked`` before the handler of SIGTERM that the script has, or sets later.

    ``signal.signal`` and ``signal.getsignal`` still return the script's own handlers.
    """
    set_handler, get_handler = signal.signal, signal.getsignal

    def reporting(handler: Any) -> Any:
        if not callable(handler):
            return handler  # SIG_DFL: the process ends at once

        def caught(number: int, frame: FrameType | None) -> Any:
            asked()
            return handler(number, frame)

        setattr(caught, _OWN, handler)
        return caught

    def set_reporting(signalnum: Any, handler: Any) -> Any:
        return _own(set_handler(signalnum, reporting(handler) if signalnum == signal.SIGTERM else handler))

    def get_own(signalnum: Any) -> Any:
        return _own(get_handler(signalnum))

    guard.replace(signal, "signal", lambda _: set_reporting)
    guard.replace(signal, "getsignal", lambda _: get_own)
    known = get_handler(signal.SIGTERM)
    if callable(known) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, known)


def _own(handler: Any) -> Any:
    return getattr(handler, _OWN, handler)


def _is_interactive() -> bool:
    """Return whether an exception ends a cell or an input, not the process: in a notebook or at a prompt."""
    return hasattr(sys, "ps1")


class _Ending:
    def __init__(self, training: Training, stop: StopRequest, publisher: Publisher) -> None:
        self._rank, self._training = training.rank, training
        self._stop, self._publisher = stop, publisher
        self._exit_code: Any = None
        self._exit_word = "sys.exit"
        self._exit_failure: Failure | None = None  # The exception being handled when the script exited with an error
        self._exit_steps = 0
        """The finished steps at that exit: if there are more at the end, the script has caught it and trained on."""
        self._failed = ""
        self._interrupted = self._finished = False

    def hook_exceptions(self) -> None:
        previous, leave = sys.excepthook, sys.exit

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not _is_interactive():
                self._note(error)
            previous(kind, error, trace)

        def exit(status: Any = None, /) -> Any:  # noqa: A001
            self._note_exit(status)
            leave(status)

        leave_at_once = os._exit

        def leave_now(status: int) -> NoReturn:
            # atexit does not run: without this the steps of the last 0.1 s would be lost.
            if os.getpid() == self._rank.process.pid:
                self._note_exit(status)
                self._exit_word = "os._exit"
                self.finish()
            leave_at_once(status)

        leave_now.__doc__ = leave_at_once.__doc__
        os._exit = leave_now
        sys.excepthook = excepthook
        exit.__doc__ = leave.__doc__
        sys.exit = exit

    def _note_exit(self, status: Any) -> None:
        """Keep the exit status, and the text of the exception being handled, without its frames."""
        self._exit_code, self._exit_failure, self._exit_steps = status, None, self._training.outbox.steps_done
        error = sys.exc_info()[1]
        if status in (None, 0) or not isinstance(error, Exception) or self._failed:
            return
        with guard.logged("reporting a failure"):
            self._training.saw_error(error)
            self._exit_failure = self._describe(error)

    @guard.logged("reporting a failure")
    def _note(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._interrupted = True
        elif not self._failed:
            self._training.saw_error(error)
            self._report(self._describe(error))

    def _describe(self, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:]
        tracker, error_text = self._training.tracker, f"{type(error).__name__}: {error}"
        return Failure(self._rank.rank, tracker.step + 1, tracker.now().phase, time.time(), error_text[:2000], text)

    def _report(self, failure: Failure) -> None:
        self._failed = failure.error
        self._training.outbox.hand_over(failure)

    def finish(self) -> None:
        if self._finished or os.getpid() != self._rank.process.pid:
            return
        self._finished = True
        if self._training.outbox.steps_done > self._exit_steps:
            self._exit_code = self._exit_failure = None
        with guard.logged("ending"):
            # A script's own excepthook may not call ours, but the interpreter keeps the exception in sys.last_value.
            # In a process of multiprocessing no excepthook is called; the exception is still being handled.
            last, leaving = None if _is_interactive() else getattr(sys, "last_value", None), sys.exc_info()[1]
            if last is not None:
                self._note(last)
            elif self._exit_failure is not None and not self._failed:
                self._report(self._exit_failure)
            elif isinstance(leaving, Exception) and self._exit_word == "sys.exit":
                self._note(leaving)
            self._training.hand_over_closing()
            self._training.outbox.hand_over(self._goodbye())
            self._publisher.finish()
            self._rank.guard.enabled = False

    def _goodbye(self) -> Goodbye:
        code = self._exit_code
        if self._failed:
            reason, text = "failed", self._failed[:500]
        elif self._interrupted or (self._stop.after is not None and self._stop.supported):
            reason, text = "stopped", "interrupted" if self._interrupted else "stopped as asked"
        elif code not in (None, 0):
            reason, text = "failed", f"{self._exit_word}({code!r})"[:500]
        else:
            reason, text = "finished", ""
        dropped = self._publisher.dropped + self._training.outbox.overflowed
        tracker = self._training.tracker
        notes = tracker.notes
        pending = 0 if notes.discarded else max(0, notes.micro_steps - notes.applied - notes.unfetched)
        if pending >= tracker.micro_steps:
            pending = 0  # gradients for something else than an accumulation
        return Goodbye(self._rank.rank, time.time(), tracker.step, reason, text, dropped, pending)
