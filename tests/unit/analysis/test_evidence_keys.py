"""Every key of evidence that a detector may emit has words and a unit."""

import ast
import inspect
import sys
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
from ftmon.protocol.analysis import health, text
from ftmon.protocol.analysis.findings.finding import FindingKind
from ftmon.protocol.analysis.memory import facts as memory_facts
from ftmon.protocol.analysis.text import evidence_keys as table
from ftmon.protocol.analysis.text import health as health_text
from ftmon.protocol.analysis.text import monitor
from ftmon.protocol.analysis.text.evidence_keys import KEYS
from ftmon.protocol.messages.hosts import KernelKill

MAKERS = {text._EVIDENCE.get(kind, health_text.evidence) for kind in typing.get_args(FindingKind)}
"""What makes the evidence of every kind of finding."""


RETURNED = ("dict[str, Any]", "dict[str, int]", "list[dict[str, Any]]", "Added")
"""What functions return that make evidence, or parts of it."""


def literal_keys(module: ModuleType) -> Iterator[str]:
    """Yield the keys of the dictionaries that are made in a module's functions which return evidence."""
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(function, ast.Lambda) and not (
            isinstance(function, ast.FunctionDef)
            and function.returns is not None
            and ast.unparse(function.returns) in RETURNED
        ):
            continue
        for node in ast.walk(function):
            keys = node.keys if isinstance(node, ast.Dict) else []
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                keys = [node.slice]
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def fields(kind: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the fields of a struct, and of the structs in them."""
    for inner in typing.get_args(kind):
        yield from fields(inner, seen)
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct) or kind in seen:
        return
    seen.add(kind)
    for name, hint in typing.get_type_hints(kind).items():
        yield name
        yield from fields(hint, seen)


def structs(*modules: ModuleType) -> Iterator[type[msgspec.Struct]]:
    """Yield the facts that modules define or import."""
    for module in modules:
        for name, found in vars(module).items():
            if name.endswith("Facts") and isinstance(found, type) and issubclass(found, msgspec.Struct):
                yield found


def emitted() -> set[str]:
    modules = [sys.modules[maker.__module__] for maker in MAKERS if maker.__module__ != table.__name__]
    keys = {key for module in modules for key in literal_keys(module)}
    for kind in (*structs(health, health_text, memory_facts, monitor), KernelKill):
        keys |= set(fields(kind, set()))
    return keys


def test_every_key_of_every_kind_has_words() -> None:
    missing = emitted() - set(KEYS)
    assert not missing, f"give these words and a unit in {table.__name__}.KEYS: {sorted(missing)}"
