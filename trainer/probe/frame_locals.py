"""The local variables of running frames, without keeping what they hold alive."""

import inspect
import sys
from types import FrameType
from typing import Any

_UNSHARED = 3
"""References to the dictionary of a frame's variables without any by the script: the frame's, ours, the count's."""


def receiver_name(frame: FrameType) -> str:
    """Return the name of the first parameter of the frame's function (``self``); empty without parameters."""
    code = frame.f_code
    return code.co_varnames[0] if code.co_argcount else ""


def frame_locals(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a frame's variables.

    Up to Python 3.12 a function's frame keeps the dictionary that ``f_locals`` makes, and with it all that the function
    held at that moment, as batches and losses, until it returns. It is emptied here, unless the script has it from
    ``locals()``.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    kept = frame.f_locals
    found = dict(kept)
    if sys.getrefcount(kept) <= _UNSHARED:
        kept.clear()
    return found
