"""What hooks call must never harm the script: a method that fails switches its probe off, and the training goes on."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from .probe import Probe

P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    method: "Callable[Concatenate[Probe, P], R]",
) -> "Callable[Concatenate[Probe, P], R | None]":
    """Make a method of the probe harmless: nothing when it is off, and off once it has failed."""

    @functools.wraps(method)
    def safe(self: "Probe", *args: P.args, **kwargs: P.kwargs) -> R | None:
        if not self.enabled:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.disable(error)
            return None

    return safe
