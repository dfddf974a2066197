"""Protects the training: the probe's switch, and its own log of errors. Standard library only."""

import dis
import functools
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from types import CodeType, FrameType, ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nothing(*_: object) -> None:
    """Do nothing: stands for a function, or a weak reference, that is not there yet."""


class Guard:
    """The probe's switch, its cost, and the training thread: only that thread moves phases."""

    __slots__ = ("enabled", "inside", "spent_ns", "thread")

    def __init__(self) -> None:
        self.enabled = True
        self.thread = get_ident()
        self.inside = False  # Whether a guarded method is under way on the training thread
        self.spent_ns = 0  # Time of guarded methods so far: what the probe costs the training thread

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


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """Wrap a method that hooks call: it does nothing while the probe is off, and an exception disables the probe.

    Its object has the switch as ``guard``, which counts the time of the outermost such method.
    """

    @functools.wraps(method)
    def safe(self: Any, *args: P.args, **kwargs: P.kwargs) -> R | None:
        guard = self.guard
        if not guard.enabled:
            return None
        if guard.inside:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                guard.disable(error)
                return None
        guard.inside, start = True, perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            guard.disable(error)
            return None
        finally:
            guard.inside = False
            guard.spent_ns += perf_counter_ns() - start

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


@contextmanager
def logged(what: str) -> Generator[None]:
    """Log an exception of a ``with`` block, or of a function that this decorates, instead of raising it."""
    try:
        yield
    except Exception as error:
        log_error(what, error)


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], *, below: bool = False) -> None:
    """Replace ``owner.name`` of a module or class by ``make(original)``, once, keeping its name and signature.

    One that this version of the library lacks is logged, so that the other hooks are installed.

    ``below``: another hook replaces it too, and runs around this one. Direct assignments remain where this does not
    fit: functions of ``torch._C``, ``resource`` and ``os`` are built in, and some have no signature to keep; a second
    name of a replaced function already gets the same object; and a step capture undoes its replacements.
    """
    original = getattr(owner, name, None)
    if original is None:
        log(f"{owner.__name__} has no {name}: not hooked")
        return
    if hasattr(original, "_ftmon"):
        return
    wrapped: Any = functools.wraps(original)(make(original))
    if not below:
        wrapped._ftmon = True
    setattr(owner, name, wrapped)


def is_replaced(function: Any) -> bool:
    """Return whether a function was made by ``replace``."""
    return hasattr(function, "_ftmon")


def replace_in_package(
    module: ModuleType, name: str, make: Callable[[Any], Callable[..., Any]], packages: tuple[str, ...]
) -> None:
    """Replace a function in its module, if it is there, and in those of its packages that have imported it by name."""
    original = getattr(module, name, None)
    if original is None or is_replaced(original):
        return
    replace(module, name, make)
    for place, other in list(sys.modules.items()):
        if place.startswith(packages) and getattr(other, name, None) is original:
            setattr(other, name, getattr(module, name))


_UNSHARED = 3
"""References to the dictionary of a frame's variables without any by the script: the frame's, ours, the count's."""

_USERS = frozenset(("eval", "exec", "locals", "vars"))
"""Functions that give a script the dictionary of its variables, or keep variables of their own there."""


def frame_locals(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a frame's variables; up to Python 3.12, none of a function that may have called ``locals``.

    There a function's frame keeps the dictionary that ``f_locals`` makes, and with it all that the function held at
    that moment, as batches and losses, until it returns. It is emptied here, unless something else has it. Reading it
    would change what the script has from ``locals()``, and there is no other way to a frame's variables.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if _may_use_dictionary(frame.f_code):
        return {}
    kept = frame.f_locals
    found = dict(kept)
    if sys.getrefcount(kept) <= _UNSHARED:
        kept.clear()
    return found


@functools.lru_cache(maxsize=256)
def _may_use_dictionary(code: CodeType) -> bool:
    return not _USERS.isdisjoint(code.co_names) and any(
        each.opname == "LOAD_GLOBAL" and each.argval in _USERS for each in dis.get_instructions(code)
    )
