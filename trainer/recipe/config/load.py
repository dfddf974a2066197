"""Converts YAML to typed settings; errors name the place, the dotted path and the allowed values.

A wrong key, type or value raises ``ConfigError``.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ....protocol.errors import ConfigError, UsageError
from .schema import CHOSEN, COMMAS, MOST_WHOLE, OFF, Config

# YAML as nodes with their lines: PyYAML's ``compose`` keeps positions and builds no Python objects. A scalar is
# interpreted later, by the type of its field (YAML 1.1 would read ``1e-5`` as text and ``no`` as a boolean).

S = TypeVar("S", bound=msgspec.Struct)

_SHOWN = 80  # characters of a wrong value or key in an error

COMMAND_LINE = "command line"  # Place of a value given as ``key.sub=value``, for errors


def read(path: str) -> Node | None:
    """Read a YAML file; None for an empty one."""
    try:
        return parse(Path(path).read_text("utf-8"), path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; 'ftmon train --print-config > {path}' writes one") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, not a configuration file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse(text: str, source: str, fix: str = "") -> Node | None:
    """Parse YAML text; ``source`` is its name in errors, ``fix`` advice in them."""
    try:
        loader = yaml.SafeLoader(text)
        loader.name = source
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = _line(source, mark.line) if mark is not None else source
        raise ConfigError(f"{at}: not valid YAML: {error.problem or error.context}{fix}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {str(error).splitlines()[0]}{fix}") from None
    except RecursionError:
        raise ConfigError(f"{source}: is nested too deeply{fix}") from None


def shown(text: str) -> str:
    """Return text for an error, shortened if it is long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def place(node: Node) -> str:
    """Return the place of a node: ``train.yaml:12``, or ``command line``."""
    mark = node.start_mark
    return _line(mark.name, mark.line) if mark is not None else COMMAND_LINE


def scalar(text: str) -> ScalarNode:
    """Make a scalar node of the command line, where it was not written as YAML."""
    mark = yaml.Mark(COMMAND_LINE, 0, 0, 0, None, 0)
    return ScalarNode("tag:yaml.org,2002:str", text, mark, mark)


def override(tree: Node | None, assignment: str) -> Node:
    """Apply ``key.sub=value`` to a tree, and return the tree; another text is a ``UsageError``."""
    key, equals, value = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UsageError(
            f"{COMMAND_LINE}: {shown(assignment)!r} is not of the form key.sub=value, such as zero.stage=3"
        )
    fix = f" in {shown(assignment)}; a text with such characters needs quotes of its own, as in key='\"text\"'"
    node = parse(value, COMMAND_LINE, fix) or scalar("")
    for part in reversed(parts[1:]):
        node = _mapping(part, node)
    if tree is None:
        return _mapping(parts[0], node)
    if not isinstance(tree, MappingNode):
        raise ConfigError(f"{place(tree)}: the file must hold sections such as 'zero:', not {describe(tree)}")
    _put(tree, parts[0], node)
    return tree


def pairs(node: MappingNode) -> list[tuple[ScalarNode, Node]]:
    """List a mapping's keys and values."""
    seen: dict[str, str] = {}
    result: list[tuple[ScalarNode, Node]] = []
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise ConfigError(f"{place(key)}: a key must be a word, not {describe(key)}")
        if key.value in seen:
            raise ConfigError(f"{place(key)}: {shown(key.value)} is given twice, first at {seen[key.value]}")
        seen[key.value] = place(key)
        result.append((key, value))
    return result


def describe(node: Node) -> str:
    """Return a node's text as written, or its kind, for an error message."""
    if isinstance(node, ScalarNode):
        if node.style is None:
            return shown(node.value) or "nothing"
        return repr(shown(node.value))
    return "a section" if isinstance(node, MappingNode) else "a list"


def _line(source: str, line: int) -> str:
    return source if source == COMMAND_LINE else f"{source}:{line + 1}"


def _mapping(key: str, value: Node) -> MappingNode:
    word = scalar(key)
    return MappingNode("tag:yaml.org,2002:map", [(word, value)], word.start_mark, word.end_mark)


def _put(tree: MappingNode, key: str, value: Node) -> None:
    for index, (found, old) in enumerate(tree.value):
        if isinstance(found, ScalarNode) and found.value == key:
            if isinstance(old, MappingNode) and isinstance(value, MappingNode):
                for below, node in pairs(value):
                    _put(old, below.value, node)
            else:
                tree.value[index] = (scalar(key), value)
            return
    tree.value.append((scalar(key), value))


_NULLS = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
MOST_CHARACTERS = 4096  # Longest text value: as long as a path can be

_LONGEST_KEY = 200  # Longer keys get no suggestion

_LONGEST_INTEGER = 20  # Characters of a whole number in a free-form value; longer ones are read as floats

_DEPTH = 16  # Nesting limit of a free-form value; an alias to itself never ends


class Places(dict[str, str]):
    """Place of each given dotted path of a file, ``train.yaml:12`` or ``command line``."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.chosen: set[str] = set()  # Paths that are ``auto``, and whose value is to be chosen

    def error(self, path: str, text: str) -> ConfigError:
        """Return an error with ``text`` about a dotted path, with the place of its value."""
        at = path
        while at and at not in self:
            at = at.rpartition(".")[0]
        return ConfigError(f"{self[at] if at else self.source}: {path} {text}")


@dataclass
class Loaded:
    """A configuration, and the place of each of its values."""

    config: Config
    source: str
    places: Places = field(default_factory=lambda: Places("the configuration"))
    chosen: frozenset[str] = frozenset()
    """Dotted paths of settings that are ``auto`` and chosen by dry runs; ``config`` has their defaults."""

    def error(self, path: str, text: str) -> ConfigError:
        """Return an error with ``text`` about a dotted path, with the place of its value."""
        return self.places.error(path, text)


def load(path: str | None, overrides: Sequence[str] = (), base: str = "") -> Loaded:
    """Read a configuration file and apply overrides, each ``key.sub=value`` (else a ``UsageError``).

    Without a file, ``path`` may be the first of the overrides. ``base`` is YAML text to start from without a file (the
    demo's own configuration).
    """
    if path is not None and is_assignment(path):
        path, overrides = None, [path, *overrides]
    tree = read(path) if path is not None else parse(base, "the demo's configuration")
    for assignment in overrides:
        tree = override(tree, assignment)
    return decode(tree, path or COMMAND_LINE)


def is_assignment(path: str) -> bool:
    """Return whether a configuration was given as ``key.sub=value`` in place of a file."""
    return "=" in path and not os.path.exists(path)  # pathlib's raises for a name that is too long


_FILES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


def of_model_and_data(model: str, data: str) -> list[str]:
    """Return the assignments with which a model is trained on data, a file or a data set, and all else is chosen."""
    where = "path" if Path(data).suffix in _FILES or Path(data).expanduser().is_file() else "name"
    sections = [section for section in msgspec.structs.fields(Config) if section.name != "deepspeed"]
    auto = [
        f"{section.name}.{found.name}=auto"
        for section in sections
        for found in inspect.type_info(section.type).fields  # type: ignore[union-attr]
        if isinstance(found.type, inspect.Metadata) and CHOSEN in (found.type.extra or {})
    ]
    return [f"model.name={json.dumps(model)}", f"data.{where}={json.dumps(data)}", *auto]


def decode(tree: Node | None, source: str) -> Loaded:
    """Convert a node tree to the configuration."""
    places = Places(source)
    if tree is None or _is_null(tree):
        return Loaded(Config(), source, places)
    if not isinstance(tree, MappingNode):
        raise ConfigError(f"{place(tree)}: the file must hold sections such as 'zero:', not {describe(tree)}")
    return Loaded(convert(tree, Config, places), source, places, frozenset(places.chosen))


_type_info = cache(inspect.type_info)  # Each takes 4 ms, and a prediction of changes reads many configurations


def convert(tree: MappingNode, kind: type[S], places: Places) -> S:
    """Convert a mapping to a struct, and note the place of each path; what does not fit is a ``ConfigError``."""
    info = _type_info(kind)
    assert isinstance(info, inspect.StructType)
    return msgspec.convert(_struct(tree, info, "", places), kind)


def _struct(node: Node, info: inspect.StructType, path: str, places: Places) -> dict[str, Any]:
    if path in OFF and isinstance(node, ScalarNode) and node.style is None and node.value.lower() in _FALSE:
        return OFF[path]
    if not isinstance(node, MappingNode):
        keys = ", ".join(found.name for found in info.fields[:3])
        raise _wrong(node, path, f"must be a section with keys such as {keys}")
    fields = {found.name: found for found in info.fields}
    result: dict[str, Any] = {}
    for key, value in pairs(node):
        below = f"{path}.{key.value}" if path else key.value
        if key.value not in fields:
            raise ConfigError(f"{place(key)}: unknown key {shown(below)}{_suggest(key.value, path, fields)}")
        places[below] = place(key)
        if _is_chosen(value, fields[key.value].type):
            places.chosen.add(below)
        elif not _is_null(value):
            result[key.value] = _value(value, fields[key.value].type, below, places)
    for name in (found.name for found in info.fields if found.required and found.name not in result):
        raise ConfigError(f"{place(node)}: {path} needs {name}")
    return result


def _is_chosen(node: Node, info: inspect.Type) -> bool:
    extra = info.extra if isinstance(info, inspect.Metadata) else None
    return CHOSEN in (extra or {}) and isinstance(node, ScalarNode) and node.value == "auto"


def _value(node: Node, info: inspect.Type, path: str, places: Places, others: str = "") -> Any:
    match info:
        case inspect.Metadata(type=inspect.LiteralType(values=values), extra=aliases):
            return _choice(node, values, path, aliases or {})
        case inspect.Metadata(extra=extra) if COMMAS in (extra or {}) and isinstance(node, ScalarNode):
            return [word.strip() for word in _text(node, path).split(",") if word.strip()]
        case inspect.Metadata(type=inner):
            return _value(node, inner, path, places, others)
        case inspect.StructType():
            return _struct(node, info, path, places)
        case inspect.LiteralType(values=values):
            return _choice(node, values, path)
        case inspect.BoolType():
            return _boolean(node, path)
        case inspect.UnionType(types=(inspect.BoolType(), inspect.LiteralType(values=(word,)))):
            return word if isinstance(node, ScalarNode) and node.value == word else _boolean(node, path, f"{word}, ")
        case inspect.UnionType(types=(number, inspect.LiteralType(values=(word,)))):
            is_word = isinstance(node, ScalarNode) and node.value == word
            return word if is_word else _value(node, number, path, places, f"{word}, or ")
        case inspect.UnionType(types=(inner, inspect.NoneType())):
            return _value(node, inner, path, places)
        case inspect.UnionType(types=(inspect.ListType() as items, inspect.StrType() as text)):
            return _value(node, items if isinstance(node, SequenceNode) else text, path, places)
        case inspect.UnionType():
            if not isinstance(node, ScalarNode):
                raise _wrong(node, path, "must be a number or a word")
            value = plain_scalar(node, path)
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise _wrong(node, path, "must be a whole number of at most 64 bits")
            return value
        case inspect.IntType():
            return _number(node, info, path, _integer, f"{others}a whole number")
        case inspect.FloatType():
            return _number(node, info, path, _real, f"{others}a number")
        case inspect.StrType():
            if not isinstance(node, ScalarNode):
                raise _wrong(node, path, "must be text")
            return _text(node, path)
        case inspect.ListType(item_type=item):
            if not isinstance(node, SequenceNode):
                raise _wrong(node, path, "must be a list such as [a, b]")
            places.update((f"{path}[{index}]", place(below)) for index, below in enumerate(node.value))
            return [_value(below, item, f"{path}[{index}]", places) for index, below in enumerate(node.value)]
        case inspect.DictType(value_type=item):
            if not isinstance(node, MappingNode):
                raise _wrong(node, path, "must be a section of keys and values")
            if isinstance(item, inspect.AnyType):
                return _free(node, path, places, _DEPTH)
            places.update((f"{path}.{key.value}", place(key)) for key, _ in pairs(node))
            return {key.value: _value(below, item, f"{path}.{key.value}", places) for key, below in pairs(node)}
        case _:
            raise AssertionError(f"{path}: no rule for {info}")


def _text(node: ScalarNode, path: str) -> str:
    text: str = node.value
    if len(text) > MOST_CHARACTERS or "\0" in text:
        raise _wrong(node, path, f"must be text of at most {MOST_CHARACTERS:,} characters without a NUL")
    return text


def _choice(node: Node, values: Iterable[Any], path: str, aliases: Mapping[str, Any] | None = None) -> Any:
    """Return the chosen value; ``aliases`` maps true and false of a setting that was once a boolean."""
    allowed = list(values)
    if isinstance(node, ScalarNode):
        if aliases and "true" in aliases and node.style is None and node.value.lower() in (*_TRUE, *_FALSE):
            return aliases["true" if node.value.lower() in _TRUE else "false"]
        for value in allowed:
            if node.value == str(value):
                return value
    text = [str(value) for value in allowed]
    listed = f"{', '.join(text[:-1])} or {text[-1]}"
    close = difflib.get_close_matches(describe(node), text, 1)
    raise _wrong(node, path, f"must be {listed}", f"; did you mean {close[0]}?" if close else "")


def _boolean(node: Node, path: str, others: str = "") -> bool:
    if isinstance(node, ScalarNode) and node.style is None:
        if node.value.lower() in _TRUE:
            return True
        if node.value.lower() in _FALSE:
            return False
    raise _wrong(node, path, f"must be {others}true or false")


def _integer(text: str) -> int | None:
    return int(text.replace("_", "")) if _INTEGER.fullmatch(text) and len(text) <= MOST_CHARACTERS else None


def _real(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(node: Node, info: inspect.IntType | inspect.FloatType, path: str, read: Any, name: str) -> Any:
    limits: list[str] = []
    value: Any = read(node.value) if isinstance(node, ScalarNode) and node.style is None else None
    fits = value is not None
    for bound, words, holds in (
        (info.gt, "above", lambda value, bound: value > bound),
        (info.ge, "of at least", lambda value, bound: value >= bound),
        (info.lt, "below", lambda value, bound: value < bound),
        (info.le, "at most", lambda value, bound: value <= bound),
    ):
        if bound is None:
            continue
        beyond = value is not None and not holds(value, bound)
        fits = fits and not beyond
        if bound != MOST_WHOLE or beyond:
            limits.append(f"{words} {_bound(bound)}")
    if not fits:
        rule = (
            f"from {_bound(info.ge)} to {_bound(info.le)}"
            if len(limits) == 2 and info.ge is not None and info.le is not None
            else " and ".join(limits)
        )
        raise _wrong(node, path, f"must be {name} {rule}".rstrip())
    return value


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _free(node: Node, path: str, places: dict[str, str], depth: int) -> Any:
    """Convert a value without a declared type, by the rules of YAML 1.2's core schema for scalars."""
    if depth == 0:
        raise ConfigError(f"{place(node)}: {path} is nested too deeply")
    if isinstance(node, MappingNode):
        result: dict[str, Any] = {}
        for key, value in pairs(node):
            below = f"{path}.{shown(key.value)}"
            places[below] = place(key)
            result[key.value] = _free(value, below, places, depth - 1)
        return result
    if isinstance(node, SequenceNode):
        return [_free(below, path, places, depth - 1) for below in node.value]
    assert isinstance(node, ScalarNode)
    return plain_scalar(node, path)


def plain_scalar(node: ScalarNode, path: str) -> str | int | float | bool | None:
    """Convert a scalar by the rules of YAML 1.2's core schema."""
    text = _text(node, path)
    if node.style is not None:
        return text
    if _is_null(node):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    integer = _integer(text) if len(text) < _LONGEST_INTEGER else None
    if integer is not None:
        return integer
    real = _real(text)
    return real if real is not None else text


def _suggest(key: str, path: str, fields: dict[str, inspect.Field]) -> str:
    """Suggest a known key for an unknown one: a sibling, or a key of that name in another section."""
    if len(key) > _LONGEST_KEY:
        return ""
    close = difflib.get_close_matches(key, fields, 1)
    if close:
        return f"; did you mean {path + '.' if path else ''}{close[0]}?"
    places = _all_keys()
    elsewhere = [full for full in places if full.rpartition(".")[2] == key]
    if not elsewhere:
        near = difflib.get_close_matches(key, [full.rpartition(".")[2] for full in places], 1, 0.8)
        elsewhere = [full for full in places if near and full.rpartition(".")[2] == near[0]]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {path or 'the configuration'} has {', '.join(fields)}"


def _all_keys() -> list[str]:
    sections = msgspec.structs.fields(Config)
    structs = [section for section in sections if section.name != "deepspeed"]
    return [f"{section.name}.{found.name}" for section in structs for found in msgspec.structs.fields(section.type)]


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.style is None and node.value in _NULLS


def _wrong(node: Node, path: str, rule: str, hint: str = "") -> ConfigError:
    return ConfigError(f"{place(node)}: {path} {rule}, not {describe(node)}{hint}")
