"""The common form of all chat formats, and the refusal of a record that does not match.

Functions raise ``RefusedError`` for a record that does not match; its text is the reason, without the place.
"""

import json
from typing import Any

import msgspec

from .decode import parse

ASSISTANT, USER, SYSTEM, TOOL = "assistant", "user", "system", "tool"


class RefusedError(Exception):
    """A record cannot be trained on; the text is the reason, without the record's place."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | None
    """Its text; None only in an assistant's message with tool calls."""
    reasoning: str = ""
    """The assistant's reasoning before its answer, if the record has it separately."""
    tool_calls: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    """OpenAI's form: ``{"type": "function", "function": {"name", "arguments"}}``, arguments as an object."""
    name: str = ""
    tool_call_id: str = ""
    learned: bool = True
    """False for ``weight: 0`` or ``train: false`` in the record."""


class Conversation(msgspec.Struct, frozen=True):
    """Messages, and the number of those that are the prompt."""

    messages: list[Message]
    prompt: int
    """Messages before the completion."""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    """JSON schemas of the tools that may be called."""


class Text(msgspec.Struct, frozen=True):
    """A plain text, learned whole."""

    text: str


def conversation(messages: list[Message], prompt: int | None = None, tools: Any = None) -> Conversation:
    """Return a conversation of checked messages.

    Without ``prompt`` all messages up to the last user message are the prompt.
    """
    if not messages:
        raise RefusedError("has no messages")
    for number, message in enumerate(messages, 1):
        if message.role == ASSISTANT:
            if not (message.content or "").strip() and not message.tool_calls and not message.reasoning:
                raise RefusedError(f"message {number}: the assistant's content is empty")
        elif message.content is None:
            raise RefusedError(f"message {number} ({message.role}) has no content")
    if all(message.role != ASSISTANT for message in messages):
        roles = ", ".join(sorted({message.role for message in messages}))
        raise RefusedError(f"has no assistant message (roles: {roles[:80]})")
    if prompt is None:
        prompt = max((index + 1 for index, message in enumerate(messages) if message.role == USER), default=0)
    return Conversation(messages, prompt, _schemas(tools))


def message_of(entry: Any, number: int, role: str | None = None) -> Message:
    """Convert one message in OpenAI's form.

    ``number`` is its place in the record, from 1; without a ``role`` it has its own.
    """
    if not isinstance(entry, dict):
        raise RefusedError(f"message {number} is {kind(entry)}, not an object with role and content")
    found = role if role is not None else entry.get("role")
    if not isinstance(found, str) or not found:
        raise RefusedError(f"message {number} has no role" if found is None else f"message {number}: role is no text")
    reasoning = next((entry[key] for key in ("reasoning_content", "reasoning", "thinking") if entry.get(key)), "")
    if not isinstance(reasoning, str):
        raise RefusedError(f"message {number}: its reasoning is {kind(reasoning)}, not text")
    return Message(
        found,
        content_of(entry.get("content"), f"message {number}"),
        reasoning,
        _calls(entry, number),
        str(entry.get("name") or ""),
        str(entry.get("tool_call_id") or ""),
        _is_learned(entry, number),
    )


def content_of(value: Any, where: str) -> str | None:
    """Return a content's text: a string, null, or OpenAI's list of text parts."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        texts: list[str] = []
        for part in value:
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                what = part.get("type", "object") if isinstance(part, dict) else kind(part)
                raise RefusedError(f"{where} holds a part of type {what}; only text is trained on")
            texts.append(text)
        return "".join(texts)
    what = "an empty list" if isinstance(value, list) else kind(value)
    raise RefusedError(f"{where}: content is {what}, not text")


def text_of(record: dict[str, Any], column: str) -> str:
    """Return a column's text."""
    value = record.get(column)
    if value is None:
        raise RefusedError(f"{column} is null" if column in record else f"has no {column}")
    if not isinstance(value, str):
        raise RefusedError(f"{column} is {kind(value)}, not text")
    if not value.strip():
        raise RefusedError(f"{column} is empty")
    return value


def kind(value: Any) -> str:
    """Return the name of a JSON value's kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    names = {dict: "an object", list: "a list", str: "text"}
    return names.get(type(value), type(value).__name__)


def refuse_surrogates(content: Conversation | Text) -> None:
    """Refuse text with half of a surrogate pair (in JSON an escape of D800 to DFFF alone): it cannot be encoded."""
    for text in [content.text] if isinstance(content, Text) else _texts(content):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise RefusedError(f"holds {half}, half of a surrogate pair, which is no character") from None


def _texts(chat: Conversation) -> list[str]:
    found: list[str | None] = [_json(chat.tools)] if chat.tools else []
    for message in chat.messages:
        found += [message.role, message.content, message.reasoning, message.name]
        found += [_json(message.tool_calls)] if message.tool_calls else []
    return [text for text in found if text]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _is_learned(entry: dict[str, Any], number: int) -> bool:
    """Return whether a message is trained on, by its ``weight`` (OpenAI's) and ``train``."""
    weight, train = entry.get("weight"), entry.get("train")
    if weight is not None and weight not in (0, 1):
        raise RefusedError(f"message {number}: weight is {_json(weight)[:40]}, not 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise RefusedError(f"message {number}: train is {_json(train)[:40]}, not true or false")
    return weight != 0 and train is not False


def _calls(entry: dict[str, Any], number: int) -> list[dict[str, Any]]:
    calls = entry.get("tool_calls")
    if calls is None and isinstance(entry.get("function_call"), dict):
        calls = [{"type": "function", "function": entry["function_call"]}]
    if not calls:
        return []
    if not isinstance(calls, list):
        raise RefusedError(f"message {number}: tool_calls is {kind(calls)}, not a list")
    return [_call(call, number) for call in calls]


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RefusedError(f"message {number}: a tool call has no function name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        # Templates expect different types; those that write JSON themselves would quote text twice.
        try:
            arguments = parse(arguments or "{}")
        except ValueError:
            raise RefusedError(f"message {number}: arguments of {function['name']} are not JSON") from None
    outer = {key: value for key, value in call.items() if key in ("id", "index") and value is not None}
    return {**outer, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def _schemas(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse(tools)
        except ValueError:
            raise RefusedError("tools is text that is not JSON") from None
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedError("tools is not a list of objects")
    return tools
