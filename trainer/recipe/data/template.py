"""Renders conversations by a chat template, with the characters that each assistant's turn generates.

The text is always the template's own; there is no fallback format. A turn generates its text without the header that
the generation prompt supplies, up to and including the token that ends it.

Unusable templates raise ``ConfigError``, records that a template rejects or of which it omits a part ``RefusedError``.
"""

import json
import re
from collections.abc import Callable, Iterator
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from ....protocol.errors import ConfigError
from ..config.schema import Data
from ..model.tokenizer import special_tokens, start_token
from .messages import ASSISTANT, NONE, TEMPLATES, USER, Conversation, Message, RefusedError, shipped

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
    message: int
    """Number of its message; -1: none."""
    generated: bool
    """Whether it is in a ``{% generation %}`` block."""


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

    def marked(self, messages: list[dict[str, Any]], ask: bool = False, **variables: Any) -> tuple[str, list[Piece]]:
        """Render a chat, and return its text and parts."""
        self._messages = {id(message): index for index, message in enumerate(messages)}
        self._opened = set()
        try:
            result = _parse(str(self._marked.render(messages=messages, add_generation_prompt=ask, **variables)))
        except Exception as error:  # as above
            raise RenderError(_line(error)) from None
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


def _parse(text: str) -> tuple[str, list[Piece]]:
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


_PROBE = [
    {"role": USER, "content": "Zeta question one"},
    {"role": ASSISTANT, "content": "Kappa answer two"},
    {"role": USER, "content": "Sigma question three"},
    {"role": ASSISTANT, "content": "Omega answer four"},
]


class Span(NamedTuple):
    """Characters that a turn generates."""

    start: int
    end: int
    message: int
    ended: bool
    """Whether its last characters are the token that ends the turn."""


class Chat(NamedTuple):
    """A rendered conversation."""

    text: str
    turns: list[Span]
    reasoning_lost: int
    """Number of assistant's messages whose reasoning the template omits."""


def choose(tokenizer: Any, data: Data) -> "ChatTemplate | None":
    """Return the chat template of a configuration; None where ``data.chat_template`` is none.

    It becomes the tokenizer's, so that it is saved with the model. If the tokenizer begins texts with BOS and the
    template does not write it, ``{{ bos_token }}`` is prepended: rendered chats are tokenized without special tokens.
    """
    name = data.chat_template
    if name == NONE:
        return None
    if name in shipped():
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    elif name:
        try:
            tokenizer.chat_template = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "is not text"
            raise ConfigError(
                f"data.chat_template: {name}: {why}; give {', '.join(shipped())}, none or a path"
            ) from None
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.chat_template: the tokenizer has no chat template, and the data are chats; give one of "
            f"{', '.join(shipped())} or the path of a Jinja file (plain works with any tokenizer)"
        )
    chosen = ChatTemplate(tokenizer, name or "the tokenizer's")
    if start_token(tokenizer) is None or chosen.begins(str(tokenizer.bos_token)):
        return chosen
    start, own = "{{ bos_token }}", tokenizer.chat_template
    if isinstance(own, dict):  # several by name, such as one for tools, which may write BOS
        tokenizer.chat_template = {key: text if "bos_token" in text else start + text for key, text in own.items()}
    else:
        tokenizer.chat_template = start + own
    return ChatTemplate(tokenizer, chosen.name)


class ChatTemplate:
    """A tokenizer's chat template, tested on a probe conversation to separate the assistant's output."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name = name
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, "documents": None}
        self._special = special_tokens(tokenizer)
        self._templates = {has_tools: self._compile(tokenizer, has_tools) for has_tools in (False, True)}
        self._variant = 0
        self.source: str = "\0".join(template.source for template in self._templates.values())
        """The template's text; of both, if there is another one for tools."""
        self._header = self._asked = ""
        self._by_prefix = False
        self._prove(tokenizer)

    def begins(self, token: str) -> bool:
        """Return whether a chat begins with this token."""
        return self._templates[False].plain(_PROBE, **self._variables, tools=None).startswith(token)

    def render(self, chat: Conversation) -> Chat:
        """Render a conversation."""
        template = self._templates[bool(chat.tools)]
        refusal: RefusedError | None = None
        # Most records need one attempt: the form of tool calls that worked last is tried first.
        has_calls = any(message.tool_calls for message in chat.messages)
        for offset in range(len(_VARIANTS) if has_calls else 1):
            variant = (self._variant + offset) % len(_VARIANTS)
            messages = [_for_template(message, *_VARIANTS[variant]) for message in chat.messages]
            try:
                result = self._render(template, messages, chat)
            except RefusedError as error:
                refusal = refusal or error
                continue
            if has_calls:
                self._variant = variant
            return result
        assert refusal is not None
        raise refusal

    def _compile(self, tokenizer: Any, has_tools: bool) -> Template:
        tools = [{"type": "function"}] if has_tools else None
        try:
            return Template(str(tokenizer.get_chat_template(tools=tools)))
        except RenderError as error:
            raise ConfigError(f"data.chat_template: {self.name} template is not valid Jinja: {error}") from None
        except ValueError as error:
            raise ConfigError(f"data.chat_template: {self.name} template: {str(error).splitlines()[0]}") from None

    def _prove(self, tokenizer: Any) -> None:
        """Find header, generation prompt and end of a turn in a probe conversation; else raise ``ConfigError``."""
        template = self._templates[False]
        where = f"data.chat_template: {self.name} template"
        fix = "give another one, or a path to one with {% generation %} marks around what the assistant generates"
        try:
            text = template.plain(_PROBE, **self._variables, tools=None)
            asked = self._tail(template, _PROBE[:1], None, True)
            self._asked = asked if asked != self._tail(template, _PROBE[:1], None, False) else ""
        except RenderError as error:
            raise ConfigError(f"{where} cannot render a chat of user and assistant: {error}") from None
        if text != tokenizer.apply_chat_template(_PROBE, tokenize=False):
            raise ConfigError(f"{where} renders another text than the tokenizer does; {fix}")
        _, turns = self._turns(template, _PROBE, None)
        if turns is None:
            self._by_prefix = True
            _, turns = self._turns(template, _PROBE, None)
        others = [[message["content"] for message in _PROBE if message is not own] for own in _PROBE]
        if turns is None or any(
            _PROBE[turn.message]["content"] not in text[turn.start : turn.end]
            or any(other in text[turn.start : turn.end] for other in others[turn.message])
            for turn in turns
        ):
            raise ConfigError(f"{where} does not let the assistant's turns be told from the others; {fix}")
        for turn in turns:
            content = _PROBE[turn.message]["content"]
            after = text[turn.start : turn.end].partition(content)[2].strip()
            if not turn.ended:
                raise ConfigError(
                    f"{where} ends the assistant's turn with "
                    + (f"{after!r}, which is no token of this tokenizer" if after else "no token")
                    + ", so the model would never learn to stop; give another template, such as plain, or one with "
                    "{{ eos_token }} behind the assistant's content"
                )

    def _render(self, template: Template, messages: list[dict[str, Any]], chat: Conversation) -> Chat:
        tools = chat.tools or None
        try:
            text, turns = self._turns(template, messages, tools)
        except RenderError as error:
            raise RefusedError(f"the chat template rejects it: {error}") from None
        if turns is None:
            raise RefusedError("the chat template does not let its assistant's turns be told from the others")
        if chat.tools or any(message.tool_calls for message in chat.messages):
            self._refuse_lost_calls(template, messages, chat)
        _refuse_lost(chat, text, messages)
        lost = sum(any(one not in text for one in _reasoning(message)) for message in chat.messages)
        return Chat(text, turns, lost)

    def _refuse_lost_calls(self, template: Template, messages: list[dict[str, Any]], chat: Conversation) -> None:
        """Refuse a record whose tool calls or tools the template omits.

        A function's name may occur in other text of the record, so unique names are rendered in its place.
        """
        places: dict[str, str] = {}

        def name(place: str) -> str:
            found = f"ftmon_{len(places):04d}_probe"
            places[found] = place
            return found

        probed = [_with_calls(message, number, name) for number, message in enumerate(messages, 1)]
        tools = [_with_name(tool, name) for tool in chat.tools] or None
        try:
            text, _ = self._turns(template, probed, tools)
        except RenderError as error:
            raise RefusedError(f"the chat template rejects it: {error}") from None
        for found, place in places.items():
            if found not in text:
                raise RefusedError(f"the chat template leaves out {place}")

    def _turns(self, template: Template, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[Span] | None]:
        """Return the text and the generated span of each assistant's message; None if the parts do not show them."""
        if self._by_prefix:
            return self._turns_by_prefix(template, messages, tools)
        text, pieces = template.marked(messages, **self._variables, tools=tools)
        result: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            own = [number for number, piece in enumerate(pieces) if piece.message == index]
            marked = [number for number in own if pieces[number].generated]
            if template.has_generation:
                own = marked
            if not own or own != list(range(own[0], own[-1] + 1)):
                return text, None
            start, end = pieces[own[0]].start, pieces[own[-1]].end
            if not template.has_generation:
                header = self._header_of(template, messages[:index], text[start:end], tools)
                if header is None:
                    return text, None
                start += len(header)
            result.append(self._ended(text, start, end, index))
        return text, result

    def _turns_by_prefix(
        self, template: Template, messages: list[dict[str, Any]], tools: Any
    ) -> tuple[str, list[Span] | None]:
        """As ``_turns``, for templates without a loop over messages: every prefix must render to a prefix."""
        variables = {**self._variables, "tools": tools}
        text = template.plain(messages, **variables)
        result: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = template.plain(messages[:index], True, **variables)
                after = template.plain(messages[: index + 1], **variables)
                if not text.startswith(after) or not after.startswith(before):
                    return text, None
                result.append(self._ended(text, len(before), len(after), index))
        return text, result

    def _header_of(self, template: Template, before: list[dict[str, Any]], text: str, tools: Any) -> str | None:
        """Return the start of a turn's text that the generation prompt supplies."""
        if text.startswith(self._asked):
            return self._asked
        if not self._header:
            self._header = self._short_header(template)
        if self._header and text.startswith(self._header):
            return self._header
        try:
            asked = self._tail(template, before, tools, True)
        except RenderError:
            return None
        return asked if text.startswith(asked) else None

    def _short_header(self, template: Template) -> str:
        """Return the common start of the probe's turns and a longer generation prompt (with ``<think>``)."""
        text, pieces = template.marked(_PROBE, **self._variables, tools=None)
        turns = [text[piece.start : piece.end] for piece in pieces if piece.message in (1, 3)]
        return commonprefix([*turns, self._asked])  # noqa: RUF071  # by characters

    def _tail(self, template: Template, messages: list[dict[str, Any]], tools: Any, ask: bool) -> str:
        """Return the template's text after the last message; with ``ask`` this is the generation prompt."""
        text, pieces = template.marked(messages, ask, **self._variables, tools=tools)
        last = pieces[-1] if pieces else None
        return text[last.start : last.end] if last is not None and last.message < 0 and len(pieces) > 1 else ""

    def _ended(self, text: str, start: int, end: int, index: int) -> Span:
        """Cut a turn after the token that ends it; later text is not generated."""
        end = max(start, len(text[:end].rstrip()))
        if any(text.endswith(token, start, end) for token in self._special):
            return Span(start, end, index, True)
        following = next((token for token in self._special if text.startswith(token, end)), None)
        return Span(start, end + len(following or ""), index, following is not None)


_VARIANTS = ((True, False), (False, False), (True, True), (False, True))
"""Forms of tool calls, of which templates expect different ones: with a null content, with arguments as text."""


def _for_template(message: Message, null_content: bool, text_arguments: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.content is None and not (message.tool_calls and null_content):
        result["content"] = ""
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [_call_for_template(call) if text_arguments else call for call in message.tool_calls]
    if message.name:
        result["name"] = message.name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    return result


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _reasoning(message: Message) -> list[str]:
    """Return the texts of an assistant's reasoning: the record's own field, and the beginning of the content."""
    before = (message.content or "").rpartition("</think>")[0] if message.role == ASSISTANT else ""
    return [message.reasoning.strip(), before.strip().removeprefix("<think>").strip()]


def _refuse_lost(chat: Conversation, text: str, given: list[dict[str, Any]]) -> None:
    """Refuse a record if the template omitted a part of it, or wrote a null as a word."""
    for number, (message, entry) in enumerate(zip(chat.messages, given, strict=True), 1):
        content = (message.content or "").rpartition("</think>")[2].strip()
        if content and content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise RefusedError(f"the chat template leaves out message {number} ({message.role})")
        for call in message.tool_calls:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                raise RefusedError(f"the chat template does not write the tool calls of message {number} as JSON")
        if entry["content"] is None and "None" in text and not _holds_none(chat):
            raise RefusedError(f"the chat template writes the null content of message {number} as the word None")


def _with_calls(message: dict[str, Any], number: int, name: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with functions and arguments renamed by ``name(place)``."""
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls", []):
        function = call["function"]
        probe = {"name": name(f"the tool calls of message {number}")}
        arguments: Any = {}
        if function["arguments"] and function["arguments"] != "{}":
            arguments = {"argument": name(f"the tool calls' arguments of message {number}")}
        text = isinstance(function["arguments"], str)
        calls.append({**call, "function": {**probe, "arguments": json.dumps(arguments) if text else arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _with_name(tool: dict[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """Return a tool's schema with the function renamed by ``name(place)``."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return tool
    renamed: dict[str, Any] = {**function, "name": name(f"the tool {function['name']}")}
    return {**tool, "function": renamed} if "function" in tool else renamed


def _holds_none(chat: Conversation) -> bool:
    own = " ".join(f"{message.content or ''} {message.reasoning} {message.tool_calls}" for message in chat.messages)
    return "None" in f"{own} {chat.tools}"
