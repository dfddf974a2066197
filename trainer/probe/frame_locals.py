"""The local variables of running frames, without keeping what they hold alive."""

import dis
import functools
import inspect
import sys
from types import CodeType, FrameType
from typing import Any

_UNSHARED = 3
"""References to the dictionary of a frame's variables without any by the script: the frame's, ours, the count's."""

_USERS = frozenset(("eval", "exec", "locals", "vars"))
"""Functions that give a script the dictionary of its variables, or keep variables of their own there."""


def receiver_name(frame: FrameType) -> str:
    """Return the name of the first parameter of the frame's function (``self``); empty without parameters."""
    code = frame.f_code
    return code.co_varnames[0] if code.co_argcount else ""


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
