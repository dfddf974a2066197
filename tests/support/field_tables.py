"""The field tables of docs/protocol.md: name, type and default are the message types', the meaning is the document's.

``python tests/support/field_tables.py`` writes them anew. A field that the document does not have yet is given its
comment or docstring as meaning, to be edited there.
"""

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from ftmon.protocol.host import machine, process
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import control, hosts, memory, telemetry, wire
from ftmon.protocol.recording import results
from ftmon.protocol.run import end, notices, rundir, start
from ftmon.protocol.snapshot import columns

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"

_MODULES = (telemetry, machine, memory, hosts, control, columns)
_MODULES += (rundir, start, notices, end, process, sockets, results)
_ELSEWHERE = ("Frame", "LauncherMessage", "Notice", "OnRanks", "PeakMark", "Span")
"""Structs without a table: bases, those that the text describes, and those that stay in a process."""
PARTS: tuple[type[msgspec.Struct], ...] = tuple(
    struct
    for module in _MODULES
    for name, struct in vars(module).items()
    if isinstance(struct, type) and issubclass(struct, msgspec.Struct) and struct.__module__ == module.__name__
    if struct.__struct_fields__ and struct not in wire.MESSAGE_TYPES and name not in _ELSEWHERE and name[0] != "_"
)
"""What messages, files and answers consist of."""

_HEAD = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
_CELLS = re.compile(r"(?<!\\)\|")
_NAMES: Mapping[object, str] = {int: "int", float: "float", str: "str", bool: "bool", bytes: "bin", type(None): "nil"}


def heading(struct: type[msgspec.Struct]) -> str:
    """Return the heading under which a struct's table stands."""
    if issubclass(struct, control.Verb):
        return f"Arguments of `{control.name_of(struct)}`"
    tag = struct.__struct_config__.tag
    return f"`{tag}` ({struct.__name__})" if tag else struct.__name__


def rewritten(document: str) -> str:
    """Return the document with all its field tables written anew.

    Raises:
        ValueError: a struct has no heading or no table, or a field no meaning.
    """
    for struct in (*wire.MESSAGE_TYPES, *PARTS):
        place = rf"^#+ {re.escape(heading(struct))}\n(?:(?!#).*\n)*?(\| field \|.*\n(?:\|.*\n)*)"
        found = re.search(place, document, re.M)
        if found is None:
            raise ValueError(f"docs/protocol.md has no heading {heading(struct)!r} with a table")
        document = document[: found.start(1)] + _table(struct, found[1]) + document[found.end(1) :]
    return document


def _table(struct: type[msgspec.Struct], before: str) -> str:
    meanings = {cells[0].strip("`"): cells[-1] for cells in map(_cells, before.splitlines()[2:])}
    docs = _docstrings(struct)
    rows: list[str] = []
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        meaning = meanings.get(field.encode_name) or docs.get(field.name, "")
        if not meaning:
            raise ValueError(f"{struct.__name__}.{field.name}: has no meaning in docs/protocol.md, and no docstring")
        cells = (f"`{field.encode_name}`", type_text(hints[field.name]), _default(field), meaning)
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in _CELLS.split(row)[1:-1]]


def type_text(kind: Any) -> str:
    """Write a type as the document does: ``[int]``, ``map str → float``, ``Span \\| nil``, ``` `a` \\| `b` ```."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _NAMES:
        return _NAMES[kind]
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{each}`" if each else '""' for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(dict.fromkeys(type_text(each) for each in arguments))
    if origin in (list, tuple) and len({*arguments} - {...}) == 1:
        return f"[{type_text(arguments[0])}]"
    if origin is tuple:
        return f"[{', '.join(map(type_text, arguments))}]"
    if origin is dict:
        return f"map {type_text(arguments[0])} → {type_text(arguments[1])}"
    if kind is Any:
        return "any"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return str(kind.__struct_config__.tag or kind.__name__)
    return str(kind.__name__)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    found = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if isinstance(found, msgspec.Struct):
        found = msgspec.to_builtins(found)
    if found is None:
        return "nil"
    if isinstance(found, bool):
        return str(found).lower()
    if isinstance(found, str | bytes):
        return f'"{found if isinstance(found, str) else found.decode()}"'
    return str(list(found)) if isinstance(found, list | tuple) else str(found)


def _docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comments beside a struct's fields, and the docstrings below them."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            source = textwrap.dedent(inspect.getsource(base))
            (tree,) = ast.parse(source).body
            assert isinstance(tree, ast.ClassDef)
            for field, text in zip(tree.body, [*tree.body[1:], None], strict=True):
                if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                    continue
                words = source.splitlines()[field.lineno - 1].partition("  # ")[2].replace("`", "``")
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    words = " ".join(str(text.value.value).split())
                if words:
                    words = words.replace("``", "`").replace("|", "\\|")
                    found[field.target.id] = words[:1].lower() + words[1:].rstrip(".")
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text()))
