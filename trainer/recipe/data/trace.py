"""Renders a chat template with marks that report which message each part of the text comes from.

A template that cannot be rendered raises ``RenderError``.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from .messages import ASSISTANT

# Marks in a template's syntax tree report the message that each part of the text comes from: at the beginning and end
# of every loop's body, if the loop variable is a message, and around ``{% generation %}`` blocks. Comparing texts would
# not show the turn where a message renders differently when more follow (Qwen3 drops the reasoning of earlier turns).

# Unicode noncharacters: no text contains them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_OPEN}([a-z]?)([0-9]+),([0-9]+){_CLOSE}")


class Piece(NamedTuple):
    """Characters ``start`` to ``end`` of a rendered text; they cover it in order."""

    start: int
    end: int
    message: int  # Number of its message; -1: none
    generated: bool  # Whether it is in a ``{% generation %}`` block


class RenderError(Exception):
    """The template raises an error for these messages; the text is its first line."""


class Template:
    """A chat template, unchanged and with marks."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._plain: Any = _compile_jinja_template(source)
            environment: Any = self._plain.environment
            tree = environment.parse(source)
            self.names = _names_in(tree)
            self.variables = meta.find_undeclared_variables(tree) - set(environment.globals)
            self.has_generation = _insert_marks(tree)
            self._messages: dict[int, int] = {}
            marks = {"__open": self._open, "__close": self._close, "__end": self._end}
            self._marked: Any = environment.from_string(tree, globals=marks)
            self._opened: set[int] = set()
        except TemplateError as error:
            raise RenderError(f"line {getattr(error, 'lineno', '?')}: {_line(error)}") from None

    def plain(self, messages: list[dict[str, Any]], ask: bool = False, **variables: Any) -> str:
        """Render a chat with the unchanged template; ``ask`` adds the generation prompt."""
        try:
            return str(self._plain.render(messages=messages, add_generation_prompt=ask, **variables))
        except Exception as error:  # a template is a program: whatever it raises
            raise RenderError(_line(error)) from None

    def marked(self, messages: list[dict[str, Any]], ask: bool = False, **variables: Any) -> tuple[str, list[Piece]]:
        """Render a chat, and return its text and parts."""
        self._messages = {id(message): index for index, message in enumerate(messages)}
        self._opened = set()
        try:
            text = str(self._marked.render(messages=messages, add_generation_prompt=ask, **variables))
        except Exception as error:  # as above
            raise RenderError(_line(error)) from None
        result = _parse(text, {index for index, message in enumerate(messages) if message.get("role") == ASSISTANT})
        if result[0] != self.plain(messages, ask, **variables):
            raise RenderError("renders another text when it is traced")
        return result

    def _open(self, loop: int, value: Any) -> str:
        index = self._messages.get(id(value))
        if index is None:
            return ""
        self._opened.add(loop)
        return f"{_OPEN}o{loop},{index}{_CLOSE}"

    def _close(self, loop: int, value: Any) -> str:
        return f"{_OPEN}c{loop},0{_CLOSE}" if id(value) in self._messages else ""

    def _end(self, loop: int) -> str:
        return f"{_OPEN}c{loop},0{_CLOSE}" if loop in self._opened else ""


def _parse(text: str, assistants: set[int]) -> tuple[str, list[Piece]]:
    """Return a text without its marks, and its pieces; one inside several messages is not the assistant's."""
    result: list[str] = []
    pieces: list[Piece] = []
    stack: list[tuple[int, int]] = []
    generated = 0
    length = position = 0
    for found in (*_MARK.finditer(text), None):
        end = found.start() if found is not None else len(text)
        if end > position:
            piece = text[position:end]
            inside = [index for _, index in reversed(stack)]
            message = next((index for index in inside if index not in assistants), inside[0] if inside else -1)
            previous = pieces[-1] if pieces else None
            if previous is not None and (previous.message, previous.generated) == (message, generated > 0):
                pieces[-1] = previous._replace(end=length + len(piece))
            else:
                pieces.append(Piece(length, length + len(piece), message, generated > 0))
            result.append(piece)
            length += len(piece)
        if found is None:
            break
        position = found.end()
        what, number, index = found.group(1), int(found.group(2)), int(found.group(3))
        if what == "g":
            generated += 1 if index else -1
            continue
        # A body left by 'continue' or 'break' has no end mark: the next mark of the same loop ends it.
        depth = next((depth for depth, (loop, _) in enumerate(stack) if loop == number), None)
        if depth is not None:
            del stack[depth:]
        if what == "o":
            stack.append((number, index))
    return "".join(result), pieces


def _insert_marks(tree: Any) -> bool:
    """Insert marks into a template's syntax tree; return whether it has ``{% generation %}`` blocks."""
    numbers = iter(range(1, 1 << 30))
    generation = False

    def visit(node: Any) -> None:
        nonlocal generation
        for name in node.fields:
            value = getattr(node, name)
            if isinstance(value, nodes.Node):
                visit(value)
            if not isinstance(value, list):
                continue
            changed: list[Any] = []
            for below in value:
                if not isinstance(below, nodes.Node):
                    changed.append(below)
                    continue
                visit(below)
                called = getattr(getattr(getattr(below, "call", None), "node", None), "name", "")
                if isinstance(below, nodes.CallBlock) and called == "_generation_support":
                    generation = True
                    changed += [_generation_mark(1, below), *below.body, _generation_mark(0, below)]
                elif isinstance(below, nodes.For):
                    number = next(numbers)
                    names = [target.name for target in _names(below.target)]
                    below.body[:0] = [_call("__open", number, below, name) for name in names]
                    below.body += [_call("__close", number, below, name) for name in names]
                    changed += [below, _call("__end", number, below)]
                else:
                    changed.append(below)
            setattr(node, name, changed)

    visit(tree)
    tree.set_environment(tree.environment)
    return generation


def _names_in(tree: Any) -> set[str]:
    """Return all attributes and texts of a template: among them are the names of the fields that it reads."""
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return texts | {node.attr for node in tree.find_all(nodes.Getattr)}


def _names(target: Any) -> Iterator[nodes.Name]:
    if isinstance(target, nodes.Name):
        yield target
    elif isinstance(target, nodes.Tuple):
        for item in target.items:
            yield from _names(item)


def _generation_mark(index: int, near: nodes.Node) -> nodes.Output:
    text = nodes.TemplateData(f"{_OPEN}g0,{index}{_CLOSE}", lineno=near.lineno)
    return nodes.Output([text], lineno=near.lineno)


def _call(function: str, number: int, near: nodes.Node, variable: str = "") -> nodes.Output:
    line = near.lineno
    arguments: list[nodes.Expr] = [nodes.Const(number, lineno=line)]
    if variable:
        arguments.append(nodes.Name(variable, "load", lineno=line))
    call = nodes.Call(nodes.Name(function, "load", lineno=line), arguments, [], None, None, lineno=line)
    return nodes.Output([call], lineno=line)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
