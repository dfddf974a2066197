"""``ftmon.Callback``: a ``TrainerCallback`` for a ``Trainer`` in a script that is started without ``ftmon run``.

The class is created on first access, so that importing ftmon does not import transformers.
"""

import functools
from typing import TYPE_CHECKING, Any

from ..hooks.callback import callback_class
from .watch import watch

if TYPE_CHECKING:
    from transformers import TrainerCallback as Callback
else:

    def __getattr__(name: str) -> Any:
        """Return ``Callback``, created on first access."""
        if name == "Callback":
            return _watching_class()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Callback"]


@functools.cache
def _watching_class() -> Any:
    class Callback(callback_class()):
        """Reports a ``Trainer`` to ftmon."""

        def __init__(self, start: bool = True) -> None:
            super().__init__(_watch if start else None)

    return Callback


def _watch(args: Any) -> None:
    watch(None, name=str(getattr(args, "run_name", None) or ""))  # empty: after the script
