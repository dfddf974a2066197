"""Instruments chat templates to report the message that each part of their text comes from.

Whether a token carries loss depends on its turn. Comparing texts does not show the turn if a template renders a message
differently when more messages follow (Qwen3 drops the reasoning of earlier turns). So marks are inserted into the
template's own syntax tree: at the beginning and end of every loop's body, if the loop variable is a message, and around
``{% generation %}`` blocks. Without its marks the text must equal that of the unchanged template.

Methods raise ``RenderError`` if the template refuses the messages, or is not valid Jinja.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

# Unicode noncharacters: no text contains them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_OPEN}([a-z]?)([0-9]+),([0-9]+){_CLOSE}")


class Piece(NamedTuple):
    """A part of a rendered text: characters ``start`` to ``end``."""

    start: int
    end: int
    message: int
    """Number of its message; -1: none."""
    generated: bool
    """Whether it is in a ``{% generation %}`` block."""


class Rendered(NamedTuple):
    """A rendered chat and its parts, which cover it in order."""

    text: str
    pieces: list[Piece]


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

    def marked(self, messages: list[dict[str, Any]], ask: bool = False, **variables: Any) -> Rendered:
        """Render a chat, and return its text and parts."""
        self._messages = {id(message): index for index, message in enumerate(messages)}
        self._opened = set()
        try:
            text = str(self._marked.render(messages=messages, add_generation_prompt=ask, **variables))
        except Exception as error:  # as above
            raise RenderError(_line(error)) from None
        result = _parse(text)
        if result.text != self.plain(messages, ask, **variables):
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


def _parse(text: str) -> Rendered:
    result: list[str] = []
    pieces: list[Piece] = []
    stack: list[tuple[int, int]] = []
    generated = 0
    length = position = 0
    for found in (*_MARK.finditer(text), None):
        end = found.start() if found is not None else len(text)
        if end > position:
            piece = text[position:end]
            message = stack[-1][1] if stack else -1
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
    return Rendered("".join(result), pieces)


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
                if isinstance(below, nodes.CallBlock) and _is_generation(below):
                    generation = True
                    changed += [_literal("g", 1, below), *below.body, _literal("g", 0, below)]
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


def _names(target: Any) -> Iterator[nodes.Name]:
    if isinstance(target, nodes.Name):
        yield target
    elif isinstance(target, nodes.Tuple):
        for item in target.items:
            yield from _names(item)


def _is_generation(block: nodes.CallBlock) -> bool:
    return getattr(getattr(block.call, "node", None), "name", "") == "_generation_support"


def _literal(kind: str, index: int, near: nodes.Node) -> nodes.Output:
    text = nodes.TemplateData(f"{_OPEN}{kind}0,{index}{_CLOSE}", lineno=near.lineno)
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
