"""Replaces a function or method by one that calls it, once, keeping its name and signature.

The hooks on PyTorch, DeepSpeed, accelerate and transformers use it. Direct assignments remain where it does not fit:
the functions of ``torch._C``, ``resource`` and ``os`` are built in, and some have no signature to keep
(``device/cuda.py``, ``device/rusage.py``, ``start/ending.py``); a second name of a function that is replaced already
gets the same object (``memory/history.py``, ``hooks/collectives.py``); and a step capture undoes its replacements, made
anew for each step (``memory/composition/step_capture.py``).
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], *, below: bool = False) -> None:
    """Replace ``owner.name`` by ``make(original)``, once, keeping its name and signature.

    Args:
        owner: a module or class.
        name: of the function or method.
        make: makes the new function of the one before.
        below: another hook replaces it too, and runs around this one.
    """
    original = getattr(owner, name)
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
