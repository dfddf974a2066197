"""Renders conversations by a chat template, with the characters that each assistant's turn generates.

The text is always the template's own; there is no fallback format. A turn generates its text without the header that
the generation prompt supplies, up to and including the token that ends it.

Unusable templates raise ``ConfigError``, records that a template rejects or of which it omits a part ``RefusedError``.
"""

import json
from collections.abc import Callable
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from ....protocol.errors import ConfigError
from ..config.schema import Data
from ..model.tokenizer import special_tokens, start_token
from .instrument import RenderError, Template
from .messages import ASSISTANT, USER, Conversation, Message, RefusedError
from .shipped import NONE, TEMPLATES, shipped

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
    """Span of every assistant's message."""
    reasoning_lost: int
    """Number of assistant's messages whose reasoning the template omits."""


def choose(tokenizer: Any, data: Data) -> "ChatTemplate | None":
    """Return the chat template of a configuration; None where ``data.chat_template`` is none.

    It becomes the tokenizer's, so that it is saved with the model. If the tokenizer begins texts with BOS and the
    template does not write it, ``{{ bos_token }}`` is prepended: rendered chats are tokenized without special tokens.

    Raises:
        ConfigError: there is none, or it cannot be used for training.
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
            messages = [_for_template(message, _VARIANTS[variant]) for message in chat.messages]
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
        """Find the header, the generation prompt and the end of a turn in a probe conversation.

        Raises:
            ConfigError: turns cannot be separated, or nothing ends them.
        """
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


class _Variant(NamedTuple):
    """Form of tool calls in a template's input; templates expect different ones."""

    null_content: bool
    text_arguments: bool


_VARIANTS = [_Variant(*flags) for flags in ((True, False), (False, False), (True, True), (False, True))]


def _for_template(message: Message, variant: _Variant) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.content is None and not (message.tool_calls and variant.null_content):
        result["content"] = ""
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [_call_for_template(call, variant) for call in message.tool_calls]
    if message.name:
        result["name"] = message.name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    return result


def _call_for_template(call: dict[str, Any], variant: _Variant) -> dict[str, Any]:
    function = call["function"]
    if not variant.text_arguments or isinstance(function["arguments"], str):
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
