"""Replaces a function or method by one that calls it: the only way in which the probe changes another package."""

import functools
from collections.abc import Callable
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
