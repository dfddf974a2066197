"""Renders conversations by a chat template, with the characters that each assistant's turn generates.

The text is always the template's own; there is no fallback format. A turn generates its text without the header that
the generation prompt supplies, up to and including the token that ends it.

Unusable templates raise ``ConfigError``, records that a template rejects or of which it omits a part ``RefusedError``.
"""

import json
import re
from collections.abc import Callable, Mapping
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from ....protocol.errors import ConfigError
from ..config.schema import Data
from ..model.tokenizer import special_tokens, start_token
from .messages import ASSISTANT, NONE, TEMPLATES, TOOL, USER, Conversation, Message, RefusedError, shipped
from .trace import Piece, RenderError, Template

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
    ended: bool  # Whether its last characters are the token that ends the turn


class Chat(NamedTuple):
    """A rendered conversation."""

    text: str
    turns: list[Span]  # Turns in order; one has several spans if another message is written inside it
    reasoning_lost: int  # Number of assistant's messages whose reasoning the template omits
    pieces: list[Piece]  # Parts of the text by message; only the assistant's turns if the template has no message loop


class _RejectedError(RefusedError):
    """The template raises an error for a record."""


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
    if data.chat_template_kwargs:
        _set_defaults(tokenizer, data.chat_template_kwargs, name or "the tokenizer's")
    chosen = ChatTemplate(tokenizer, name or "the tokenizer's")
    if start_token(tokenizer) is None or chosen.begins(str(tokenizer.bos_token)):
        return chosen
    start, own = "{{ bos_token }}", tokenizer.chat_template
    if isinstance(own, dict):  # several by name, such as one for tools, which may write BOS
        tokenizer.chat_template = {key: text if "bos_token" in text else start + text for key, text in own.items()}
    else:
        tokenizer.chat_template = start + own
    return ChatTemplate(tokenizer, chosen.name)


_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # Variables with values of their own


def _set_defaults(tokenizer: Any, values: Mapping[str, Any], name: str) -> None:
    """Write values of its own variables into a tokenizer's template; one that it does not read is a ``ConfigError``.

    In the template they also reach what renders the exported model, and a caller can still give other values.
    """
    own = tokenizer.chat_template
    # An output at the end: the newline behind a block is left out, and may be the template's first character.
    sets = "".join(f"{{% set {key} = {key} if {key} is defined else {value!r} %}}" for key, value in values.items())
    sets += "{{ '' }}"
    texts = own if isinstance(own, dict) else {"": own}
    if all(sets in text for text in texts.values()):
        return
    where = f"data.chat_template_kwargs.{{}}: {name} template"
    try:
        read = set[str]().union(*(Template(text).variables for text in texts.values()))
    except RenderError as error:
        raise ConfigError(f"data.chat_template: {name} template is not valid Jinja: {error}") from None
    read -= {*_GIVEN, *tokenizer.special_tokens_map}
    if unknown := next((key for key in values if key not in read), ""):
        raise ConfigError(
            f"{where.format(unknown)} reads no such variable; it reads {', '.join(sorted(read)) or 'none'}"
        )
    tokenizer.chat_template = {key: sets + text for key, text in texts.items()} if isinstance(own, dict) else sets + own


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
        self._ends: set[str] = set()
        self._by_prefix = self._ends_by_next = False
        self._reasoning = {has_tools: self._reasoning_fields(one) for has_tools, one in self._templates.items()}
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
            names = self._reasoning[bool(chat.tools)]
            messages = [_for_template(message, names, *_VARIANTS[variant]) for message in chat.messages]
            try:
                result = self._render(template, messages, chat)
            except RefusedError as error:
                # What a form that could be rendered lacks says more than what another form raised.
                refusal = error if refusal is None or isinstance(refusal, _RejectedError) else refusal
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
            asked = self._prompt(template, _PROBE[:1], None)
            self._asked = asked if asked != self._tail(template, _PROBE[:1], None, False) else ""
        except RenderError as error:
            lacks = "_token' is undefined" in str(error)
            more = "; the tokenizer has none: give another template (plain suits any tokenizer)" if lacks else ""
            raise ConfigError(f"{where} cannot render a chat of user and assistant: {error}{more}") from None
        if text != tokenizer.apply_chat_template(_PROBE, tokenize=False):
            raise ConfigError(f"{where} renders another text than the tokenizer does; {fix}")
        text, turns, _ = self._turns(template, _PROBE, None)
        if turns is None:
            self._by_prefix = True
            text, turns, _ = self._turns(template, _PROBE, None)
        if turns is not None and not all(turn.ended for turn in turns):
            self._ends_by_next = True
            longer, found, _ = self._turns(template, _PROBE, None)
            ended = found is not None and all(turn.ended for turn in found)
            if found is not None and ended and len(self._tokens_at_ends(longer, found)) == 1:
                text, turns = longer, found
            else:
                self._ends_by_next = False
        others = [[message["content"] for message in _PROBE if message is not own] for own in _PROBE]
        if turns is None or any(
            _PROBE[turn.message]["content"] not in text[turn.start : turn.end]
            or any(other in text[turn.start : turn.end] for other in others[turn.message])
            for turn in turns
        ):
            raise ConfigError(f"{where} does not let the assistant's turns be told from the others; {fix}")
        self._ends = self._tokens_at_ends(text, turns)
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

    def _tokens_at_ends(self, text: str, turns: list[Span]) -> set[str]:
        """Return the tokens that end turns."""
        return {
            next(token for token in self._special if text.endswith(token, 0, turn.end)) for turn in turns if turn.ended
        }

    def _reasoning_fields(self, template: Template) -> list[str]:
        """Return the fields in which the template reads an assistant's reasoning."""
        known = sorted(
            filter(_REASONING.fullmatch, template.names), key=lambda name: (name != "reasoning_content", name)
        )
        for name in known:
            try:
                probe = [_PROBE[0], {**_PROBE[1], name: "Theta reasoning"}]
                if "Theta reasoning" in template.plain(probe, **self._variables, tools=None):
                    return [name]
            except RenderError:
                continue
        return known or ["reasoning_content"]

    def _render(self, template: Template, messages: list[dict[str, Any]], chat: Conversation) -> Chat:
        tools = chat.tools or None
        try:
            text, turns, pieces = self._turns(template, messages, tools)
            if chat.tools or any(message.tool_calls for message in chat.messages):
                mixed = self._refuse_lost_calls(template, messages, chat)
            else:
                mixed = _may_mix(messages, text, turns or [])
            if turns is not None and not self._by_prefix:
                if mixed:
                    turns = self._own_text(template, messages, tools, text, turns)
                else:
                    turns = [self._with_stop(template, messages, tools, text, turn) for turn in turns]
        except RenderError as error:
            raise _RejectedError(f"the chat template rejects it: {error}") from None
        if turns is None:
            raise RefusedError("the chat template does not let its assistant's turns be told from the others")
        _refuse_lost(chat, text, messages)
        lost = sum(any(one not in text for one in _reasoning(message)) for message in chat.messages)
        return Chat(text, turns, lost, pieces)

    def _own_text(
        self, template: Template, messages: list[dict[str, Any]], tools: Any, text: str, turns: list[Span]
    ) -> list[Span] | None:
        """Return the turns without the text of other messages (Gemma 4 writes a tool's output into the calling turn).

        Contents may occur in several messages, so unique words are rendered in their place.
        """
        words = _words(messages)
        probed = [_with_content(message, word) for message, word in zip(messages, words, strict=True)]
        probed_text, probed_turns, _ = self._turns(template, probed, tools)
        if probed_turns is None or len(probed_turns) != len(turns):
            return None
        result: list[Span] = []
        for turn, other in zip(turns, probed_turns, strict=True):
            own, word = probed_text[other.start : other.end], words[turn.message]
            foreign = _others(own, words, turn.message)
            if not foreign:
                result.append(self._with_stop(template, messages, tools, text, turn))
                continue
            before = self._before(template, probed, tools, own, turn.message, foreign)
            after = own[own.rindex(word) :] if word in own[len(before) :] else ""
            spans = _placed(text, turn, before, after, word, _answer(messages[turn.message]))
            if not spans or any(words[number][1:] in before + after for number in foreign):
                number = min(foreign) + 1
                raise RefusedError(f"the chat template writes message {number} into message {turn.message + 1}")
            first = spans[0]
            ended = any(text.endswith(token, first.start, first.end) for token in self._special)
            result += [first._replace(ended=ended and not (after and turn.ended)), *spans[1:]]
        return result

    def _before(
        self, template: Template, messages: list[dict[str, Any]], tools: Any, own: str, index: int, foreign: set[int]
    ) -> str:
        """Return the start of a turn, ``own``, that comes before the text of the ``foreign`` messages in it.

        It is the common start with the turn without those messages.
        """
        kept = [message for number, message in enumerate(messages) if number not in foreign]
        place = index - sum(number < index for number in foreign)
        alone, turns, _ = self._turns(template, kept, tools)
        wanted = next((alone[one.start : one.end] for one in turns or [] if one.message == place), "")
        cut = self._shared(own, wanted)
        ends = [at + len(end) for end in self._ends if (at := own.find(end, 0, cut)) >= 0]
        if ends:  # what follows in the same message is no longer generated (Command R7B)
            cut = min(ends)
        elif cut < len(wanted):  # alone it ends in another way; here the token before the others ends it
            cut += len(self._token_at(own, cut))
        return own[:cut]

    def _with_stop(self, template: Template, messages: list[dict[str, Any]], tools: Any, text: str, turn: Span) -> Span:
        """Return a turn with the token that ends it where no tool's output follows, if the output begins with it."""
        token = self._token_at(text, turn.end)
        if not token or [message["role"] for message in messages[turn.message + 1 :]][:1] != [TOOL]:
            return turn
        try:
            alone, turns, _ = self._turns(template, messages[: turn.message + 1], tools)
        except RenderError:
            return turn
        ended = alone[turns[-1].start : turns[-1].end] == text[turn.start : turn.end] + token if turns else False
        return turn._replace(end=turn.end + len(token)) if ended else turn

    def _refuse_lost_calls(self, template: Template, messages: list[dict[str, Any]], chat: Conversation) -> bool:
        """Refuse a record whose tool calls or tools the template omits; return whether a turn may hold other messages.

        Names and contents may occur in other text of the record, so unique ones are rendered in their place.
        """
        words = _words(messages)
        places: dict[str, str] = {}

        def name(place: str) -> str:
            found = f"ftmon_{len(places):04d}_probe"
            places[found] = place
            return found

        replaced = [_with_content(message, word) for message, word in zip(messages, words, strict=True)]
        ids: dict[str, str] = {}
        probed = [_with_calls(message, number, name, ids) for number, message in enumerate(replaced, 1)]
        tools = [_with_name(tool, name) for tool in chat.tools] or None
        text, turns, _ = self._turns(template, probed, tools)
        for found, place in places.items():
            if found not in text:
                raise RefusedError(f"the chat template leaves out {place}")
        return turns is None or any(_others(text[turn.start : turn.end], words, turn.message) for turn in turns)

    def _turns(
        self, template: Template, messages: list[dict[str, Any]], tools: Any
    ) -> tuple[str, list[Span] | None, list[Piece]]:
        """Return the text, the span of each assistant's message (None if the parts do not show it), and the parts.

        If a turn ends with the token of the next role (GLM-4.5), that token is added behind the last one.
        """
        if self._by_prefix:
            text, turns = self._turns_by_prefix(template, messages, tools)
            pieces = [Piece(turn.start, turn.end, turn.message, True) for turn in turns or []]
        else:
            text, pieces = template.marked(messages, **self._variables, tools=tools)
            turns = self._turns_by_marks(template, messages, tools, text, pieces)
        if turns and self._ends_by_next and not turns[-1].ended and turns[-1].message == len(messages) - 1:
            last = turns[-1]
            following = self._next_role(template, messages, tools)
            text = text[: last.end] + following
            turns[-1:] = [last._replace(end=len(text), ended=bool(following))]
            pieces = [*pieces, Piece(last.end, len(text), last.message, True)]
        return text, turns, pieces

    def _turns_by_marks(
        self, template: Template, messages: list[dict[str, Any]], tools: Any, text: str, pieces: list[Piece]
    ) -> list[Span] | None:
        result: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            own = [number for number, piece in enumerate(pieces) if piece.message == index]
            marked = [number for number in own if pieces[number].generated]
            if template.has_generation:
                own = marked
            # Between its parts are at most later messages (a tool's output), which ``_own_text`` cuts out.
            if not own or any(
                number not in own and pieces[number].message <= index for number in range(own[0], own[-1] + 1)
            ):
                return None
            start, end = pieces[own[0]].start, pieces[own[-1]].end
            if not template.has_generation:
                header = self._header_of(template, messages[:index], text[start:end], tools)
                if header is None:
                    return None
                start += len(header)
            later = pieces[own[-1] + 1 :]
            other = next((piece.start for piece in later if piece.message not in (index, -1)), len(text))
            result.append(self._ended(text, Span(start, end, index, False), other))
        return result

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
                result.append(self._ended(text, Span(len(before), len(after), index, False), len(after)))
        return text, result

    def _next_role(self, template: Template, messages: list[dict[str, Any]], tools: Any) -> str:
        """Return the special token with which the message after an answer, or after tool calls, begins; empty: none."""
        role, calls = (TOOL, messages[-1]["tool_calls"]) if messages[-1].get("tool_calls") else (USER, [])
        message = {"role": role, "content": "Zeta", "tool_call_id": str(calls[0].get("id", "1")) if calls else ""}
        try:
            text, pieces = template.marked([*messages, message], **self._variables, tools=tools)
        except RenderError:
            return ""
        start = next((piece.start for piece in pieces if piece.message == len(messages)), len(text))
        return self._token_at(text, start)

    def _header_of(self, template: Template, before: list[dict[str, Any]], text: str, tools: Any) -> str | None:
        """Return the start of a turn's text that the generation prompt supplies."""
        if text.startswith(self._asked):
            return self._asked
        if not self._header:
            self._header = self._short_header(template)
        if self._header and text.startswith(self._header):
            return self._header
        known = next((one for one in (self._asked, self._header) if one and one in text), "")
        if not before and known:  # behind what comes before the first message, whatever that is (Kimi K2)
            return text[: text.index(known)] + known
        try:
            asked = self._prompt(template, before, tools)
        except RenderError:
            return None
        if text.startswith(asked):
            return asked
        # The prompt may supply more than the header (of gpt-oss a variant asks for the final channel).
        shared = text[: self._shared(text, self._asked)]
        return shared if any(token in shared for token in self._special) else None

    def _short_header(self, template: Template) -> str:
        """Return the common start of the probe's turns and a longer generation prompt (with ``<think>``)."""
        text, pieces = template.marked(_PROBE, **self._variables, tools=None)
        turns = [text[piece.start : piece.end] for piece in pieces if piece.message in (1, 3)]
        return commonprefix([*turns, self._asked])  # noqa: RUF071  # by characters

    def _prompt(self, template: Template, messages: list[dict[str, Any]], tools: Any) -> str:
        """Return the generation prompt behind the last message, outside or inside (Zephyr, Granite) the loop."""
        if asked := self._tail(template, messages, tools, True):
            return asked
        plain, text = (template.plain(messages, ask, **self._variables, tools=tools) for ask in (False, True))
        return text.removeprefix(plain) if text.startswith(plain) else ""

    def _tail(self, template: Template, messages: list[dict[str, Any]], tools: Any, ask: bool) -> str:
        """Return the template's text after the last message; with ``ask`` this is the generation prompt."""
        text, pieces = template.marked(messages, ask, **self._variables, tools=tools)
        last = pieces[-1] if pieces else None
        return text[last.start : last.end] if last is not None and last.message < 0 and len(pieces) > 1 else ""

    def _ended(self, text: str, turn: Span, other: int) -> Span:
        """Return a turn up to and including the token that ends it.

        The token is the turn's last, or the first one behind it (behind ``{% generation %}``) and before ``other``, the
        text of another message. Where a token follows that turns of the probe end with, a special token that ends the
        text itself (as of a call) does not end the turn.
        """
        start, end = turn.start, max(turn.start, len(text[: turn.end].rstrip()))
        last = next((token for token in self._special if text.endswith(token, start, end)), "")
        if last and (not self._ends or last in self._ends):
            return turn._replace(end=end, ended=True)
        behind = len(text) - len(text[end:].lstrip())
        if behind < other or self._ends_by_next:
            following = self._token_at(text, behind)
            begins = behind >= other and following == self._variables.get("bos_token")  # the next message
            if following and (following in self._ends if last else not begins):
                return turn._replace(end=behind + len(following), ended=True)
        return turn._replace(end=end, ended=bool(last))

    def _shared(self, text: str, other: str) -> int:
        """Return the length of the common start of two texts, which does not end inside a special token of ``text``."""
        length = len(commonprefix([text, other]))  # noqa: RUF071  # by characters
        for token in self._special:
            begin = text.rfind(token, max(0, length - len(token) + 1), length + len(token) - 1)
            length = begin if 0 <= begin < length else length
        return length

    def _token_at(self, text: str, start: int) -> str:
        return next((token for token in self._special if text.startswith(token, start)), "")


_REASONING = re.compile(r"[a-z_]*(?:reason|think|thought)[a-z_]*")
"""Matches names of a message's field with the reasoning: reasoning_content, reasoning, thinking ..."""

_VARIANTS = ((True, False), (False, False), (True, True), (False, True))
"""Forms of tool calls, of which templates expect different ones: with a null content, with arguments as text."""


def _for_template(message: Message, reasoning: list[str], null_content: bool, text_arguments: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.content is None and not (message.tool_calls and null_content):
        result["content"] = ""
    if message.reasoning:
        result |= dict.fromkeys(reasoning, message.reasoning)
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


def _words(messages: list[dict[str, Any]]) -> list[str]:
    """Return a word for each message, unique from its first character."""
    return [f"{chr(0x100 + number)}ftmon_{number:04d}_content" for number in range(len(messages))]


def _others(text: str, words: list[str], own: int) -> set[int]:
    """Return the messages whose words are in a text, but ``own``; JSON may write their first characters otherwise."""
    return {number for number, word in enumerate(words) if number != own and word[1:] in text}


def _may_mix(messages: list[dict[str, Any]], text: str, turns: list[Span]) -> bool:
    """Return whether a turn may hold the text of another message: it has a message's content, or there is a tool's."""
    contents = {number: str(message["content"] or "").strip() for number, message in enumerate(messages)}
    written = [(turn.message, text[turn.start : turn.end]) for turn in turns]
    return any(message["role"] == TOOL for message in messages) or any(
        content and number != own and content in one for own, one in written for number, content in contents.items()
    )


def _with_content(message: dict[str, Any], word: str) -> dict[str, Any]:
    """Return a message with a word in place of its content's text: in JSON if it may be a tool's output in JSON."""
    text = _answer(message)
    if not text:
        return message
    before, _, after = message["content"].rpartition(text)
    form: Any = {"{": {"value": word}, "[": [word]}.get(text[0], word) if message["role"] == TOOL else word
    return {**message, "content": before + (word if form == word else json.dumps(form, ensure_ascii=False)) + after}


def _answer(message: dict[str, Any]) -> str:
    return str(message["content"] or "").rpartition("</think>")[2].strip()


def _placed(text: str, turn: Span, before: str, after: str, word: str, content: str) -> list[Span]:
    """Return the parts of a turn that equal the texts ``before`` and ``after`` with ``content`` in place of ``word``.

    They are empty if the text is another one.
    """
    start = before.replace(word, content, 1)
    end = after.replace(word, content, 1)
    cut = turn.start + len(start)
    if not text.startswith(start, turn.start) or not text.endswith(end, cut, turn.end):
        return []
    spans = [Span(turn.start, cut, turn.message, False)]
    spans += [turn._replace(start=turn.end - len(end))] if end else []
    return [span for span in spans if span.start < span.end]


def _with_calls(
    message: dict[str, Any], number: int, name: Callable[[str], str], ids: dict[str, str]
) -> dict[str, Any]:
    """Return a message with functions and arguments renamed by ``name(place)``.

    An identifier that holds the function's name gets the new one, as some templates write no other (Kimi K2:
    ``functions.NAME:0``); ``ids`` collects the replaced ones for the answers to the calls.
    """
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls", []):
        function = call["function"]
        probe = {"name": name(f"the tool calls of message {number}")}
        arguments: Any = {}
        if function["arguments"] and function["arguments"] != "{}":
            arguments = {"argument": name(f"the tool calls' arguments of message {number}")}
        text = isinstance(function["arguments"], str)
        renamed = {**call, "function": {**probe, "arguments": json.dumps(arguments) if text else arguments}}
        identifier = str(call.get("id", ""))
        held = rf"(?<![0-9A-Za-z]){re.escape(function['name'])}(?![0-9A-Za-z])"
        if re.search(held, identifier):
            renamed["id"] = ids[identifier] = re.sub(held, probe["name"], identifier)
        calls.append(renamed)
    answered = message.get("tool_call_id", "")
    message = {**message, "tool_call_id": ids[answered]} if answered in ids else message
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
