"""Finds a script's names for its engines and optimizers."""

import dis
import functools
import inspect
from collections.abc import Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from ..frame_locals import frame_locals, receiver_name
from ..rank.model import own_class, own_model
from .rounds import LIBRARIES

_GENERAL = ("optimizer", "_optimizer")
"""Names too general to identify an optimizer."""
_MOST_ITEMS = 1000
"""Largest collection that is searched."""
_Named = list[tuple[str, Any]]


def name_of(updater: Any, frame: FrameType | None) -> str:
    """Return the script's name for an engine (its model's class) or an optimizer.

    That is its variable or attribute; else its key in a dictionary or its place in a list; else the object with it as
    an attribute; else the variable of a loop over several.

    Args:
        updater: the engine or optimizer.
        frame: the frame of its update; its variables and those of its callers are searched.
    """
    module = getattr(updater, "module", None)
    if isinstance(module, torch.nn.Module):
        return own_class(own_model(module)).__name__
    found: list[_Named] = []
    turns: _Named = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARIES):
            variables = frame_locals(frame)
            receiver = variables.pop(receiver_name(frame), None)
            for name in _rest_parameters(code):
                variables.pop(name, None)
            turns += [(name, variables.pop(name)) for name in _loop_variables(code) if name in variables]
            found.append([*variables.items(), *_attributes(receiver)])
        frame = frame.f_back
    names = (find(updater, named) for find in (_direct, _in_collection, _in_object) for named in found)
    return next(filter(None, names), "") or _direct(updater, turns) or type(updater).__name__


def _direct(updater: Any, named: _Named) -> str:
    """Return the name of an optimizer's variable or attribute; empty if there is none."""
    return next((name for name, value in named if name not in _GENERAL and _is(value, updater)), "")


def _in_collection(updater: Any, named: _Named) -> str:
    """Return the key of an optimizer in a dictionary, or its place in a list; empty if there is none."""
    for name, value in named:
        kind = type(value)
        if not issubclass(kind, dict | list | tuple) or len(value) > _MOST_ITEMS:
            continue
        items = list(dict.items(value)) if issubclass(kind, dict) else list(enumerate(value))
        for key in [key for key, each in items if each is updater]:
            return key if isinstance(key, str) else f"{name}[{key}]" if isinstance(key, int) else name
    return ""


def _in_object(updater: Any, named: _Named) -> str:
    """Return the name of an object with the optimizer as an attribute; empty if there is none."""
    for name, value in named:
        for attribute, each in _attributes(value):
            if each is updater:
                return name if attribute in _GENERAL else f"{name}.{attribute}"
    return ""


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the attributes of an object itself, without running code of its class."""
    if issubclass(type(value), type | ModuleType):
        return ()
    try:
        return list(object.__getattribute__(value, "__dict__").items())
    except AttributeError:
        return ()


def _is(value: Any, updater: Any) -> bool:
    """Return whether a value is an optimizer, or a framework's wrapper of it (Lightning's, accelerate's)."""
    if value is updater:
        return True
    if not any(kind.__name__.endswith("Optimizer") for kind in type(value).__mro__):
        return False
    return any(name in _GENERAL and each is updater for name, each in _attributes(value))


def _rest_parameters(code: CodeType) -> tuple[str, ...]:
    """Return the names of ``*args`` and ``**kwargs``."""
    first = code.co_argcount + code.co_kwonlyargcount
    count = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[first : first + count]


@functools.lru_cache(maxsize=256)
def _loop_variables(code: CodeType) -> list[str]:
    """Return the variables that the ``for`` loops of a function assign."""
    found: dict[str, None] = {}
    is_head = False
    for instruction in dis.get_instructions(code):
        kind, names = instruction.opname, instruction.argval
        if kind == "FOR_ITER":
            is_head = True
        elif is_head and kind.startswith(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")):
            # Newer Pythons have one instruction that stores two variables, or stores one and loads the next.
            found.update(dict.fromkeys([names] if isinstance(names, str) else names[: 1 if "LOAD" in kind else 2]))
            is_head = "LOAD" not in kind
        elif is_head and not kind.startswith("UNPACK"):
            is_head = False
    return list(found)
