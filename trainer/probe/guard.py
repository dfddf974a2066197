"""Protects the training: the probe's switch, and its own log of errors. Standard library only."""

import functools
import os
import threading
import time
import traceback
from collections.abc import Callable
from threading import get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nothing(*_: object) -> None:
    """Do nothing: stands for a function, or a weak reference, that is not there yet."""


class Guard:
    """The probe's switch, and the training thread: only that thread moves phases."""

    __slots__ = ("enabled", "thread")

    def __init__(self) -> None:
        self.enabled = True
        self.thread = get_ident()
        """The training thread, as ``threading.get_ident`` names it."""

    def is_training_thread(self) -> bool:
        """Return whether the caller is the thread that trains."""
        return self.thread == get_ident()

    def adopt_thread(self) -> None:
        """Make the caller's thread the training thread."""
        self.thread = get_ident()

    def thread_lives(self) -> bool:
        """Return whether the training thread has not ended."""
        return any(thread.ident == self.thread for thread in threading.enumerate())

    def disable(self, error: BaseException) -> None:
        """Switch the probe off after an error of its own."""
        self.enabled = False
        log_error("the probe has switched itself off", error)


class Guarded(Protocol):
    """An object with methods that hooks call."""

    guard: Guard


G = TypeVar("G", bound=Guarded)


def guarded(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R | None]:
    """Wrap a method that hooks call: it does nothing while the probe is off, and an exception disables the probe."""

    @functools.wraps(method)
    def safe(self: G, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if not self.guard.enabled:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.guard.disable(error)
            return None

    return safe


def log(text: str) -> None:
    """Append one line to the run's ``logs/probe.log``; without a run, or when that fails, the line is lost."""
    run = os.environ.get("FTMON_PLACE") or os.environ.get("FTMON_RUN")  # place.folder(), which may be what failed
    if not run:
        return
    try:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(os.path.join(run, "logs", "probe.log"), "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{stamp} pid {os.getpid()} rank {os.environ.get('RANK', '-')}: {text}\n")
    except Exception:
        return


def log_error(what: str, error: BaseException) -> None:
    """Append one line about an exception: the failed operation, the error, and its innermost frames."""
    places = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
    log(f"{what}: {type(error).__name__}: {error} ({' < '.join(reversed(places))})".replace("\n", " "))
