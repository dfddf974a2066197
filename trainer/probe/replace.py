"""Replaces a function or method by one that calls it: the only way in which the probe changes another package."""

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
