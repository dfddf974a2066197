"""YAML as nodes with their lines, and overrides of the command line applied to them.

PyYAML's ``compose`` keeps positions and builds no Python objects. A scalar is interpreted later, by the type of its
field (YAML 1.1 would read ``1e-5`` as text and ``no`` as a boolean).

What is not YAML, or not of the expected form, raises ``ConfigError``.
"""

from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from ....protocol.errors import ConfigError, UsageError

_SHOWN = 80
"""Characters of a wrong value or key in an error."""

COMMAND_LINE = "command line"
"""Place of a value given as ``key.sub=value``, for errors."""


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
    """Parse YAML text.

    ``source`` is its name in errors, ``fix`` advice in them.
    """
    try:
        loader = yaml.SafeLoader(text)
        loader.name = source
        return loader.get_single_node()
    except yaml.YAMLError as error:
        mark = error.problem_mark or error.context_mark if isinstance(error, yaml.MarkedYAMLError) else None
        at = _line(source, mark.line) if mark is not None else source
        raise ConfigError(f"{at}: not valid YAML: {_problem(error)}{fix}") from None
    except RecursionError:
        raise ConfigError(f"{source}: is nested too deeply{fix}") from None


def _problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return str(error.problem or error.context)
    return str(error).splitlines()[0]


def shown(text: str) -> str:
    """Return text for an error, shortened if it is long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def place(node: Node) -> str:
    """Return the place of a node: ``train.yaml:12``, or ``command line``."""
    mark = node.start_mark
    return _line(mark.name, mark.line) if mark is not None else COMMAND_LINE


def scalar(text: str, source: str, line: int) -> ScalarNode:
    """Make a scalar node that was not written as YAML."""
    mark = yaml.Mark(source, 0, line, 0, None, 0)
    return ScalarNode("tag:yaml.org,2002:str", text, mark, mark)


def override(tree: Node | None, assignment: str) -> Node:
    """Apply ``key.sub=value`` to a tree, and return the tree.

    Raises:
        UsageError: it is not an assignment.
        ConfigError: its value is not YAML.
    """
    key, equals, value = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UsageError(
            f"{COMMAND_LINE}: {shown(assignment)!r} is not of the form key.sub=value, such as zero.stage=3"
        )
    fix = f" in {shown(assignment)}; a text with such characters needs quotes of its own, as in key='\"text\"'"
    node = parse(value, COMMAND_LINE, fix) or scalar("", COMMAND_LINE, 0)
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
    word = scalar(key, COMMAND_LINE, 0)
    return MappingNode("tag:yaml.org,2002:map", [(word, value)], word.start_mark, word.end_mark)


def _put(tree: MappingNode, key: str, value: Node) -> None:
    for index, (found, old) in enumerate(tree.value):
        if isinstance(found, ScalarNode) and found.value == key:
            if isinstance(old, MappingNode) and isinstance(value, MappingNode):
                for below, node in pairs(value):
                    _put(old, below.value, node)
            else:
                tree.value[index] = (scalar(key, COMMAND_LINE, 0), value)
            return
    tree.value.append((scalar(key, COMMAND_LINE, 0), value))
