"""Converters of the record formats, and the detection of a record's format. Imports no training packages.

Converters raise ``RefusedError`` for a record that does not match.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ....protocol.errors import UsageError
from ..config.schema import Data
from . import markers
from .decode import parse
from .messages import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Conversation,
    Message,
    RefusedError,
    Text,
    content_of,
    conversation,
    kind,
    message_of,
    refuse_surrogates,
    text_of,
)

Record = dict[str, Any]
Converted = Conversation | Text

_SENDERS = {
    **dict.fromkeys(("human", "user"), USER),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "bard", "bing"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), TOOL),
    "system": SYSTEM,
    "function_call": ASSISTANT,
}
"""Values of ShareGPT's ``from``, in the spellings of its data sets."""


def convert(record: Any, form: str, data: Data) -> Converted:
    """Convert a record of the format ``form``."""
    if not isinstance(record, dict):
        raise RefusedError(f"is {kind(record)}, not an object")
    content = _CONVERTERS[form](record, data)
    refuse_surrogates(content)
    return content


def detect(record: Record, data: Data) -> str:
    """Return the format of a data set whose first record is this one.

    Raises:
        UsageError: a column is missing; the text starts with the dotted path of the key that names it.
    """
    columns = list(record)
    needed = {
        "chat": {"messages_column": messages_column(columns, data)},
        "instruction": {
            "prompt_column": data.prompt_column,
            "response_column": response_column(columns, data),
        },
        "alpaca": {"": "instruction", " ": "output"},
        "text": {"text_column": data.text_column},
    }
    form = data.format
    if form != "auto":
        for key, column in needed.get({"sharegpt": "chat", "markers": "text"}.get(form, form), {}).items():
            if column not in columns:
                if not key.strip():
                    raise UsageError(f"data.format is {form}, but the data's columns are {_listed(columns)}")
                raise UsageError(f"data.{key} is {column}, but the data's columns are {_listed(columns)}")
        return form
    for name, keys in needed.items():
        if all(column in columns for column in keys.values()):
            if name == "chat":
                return _chat_or_sharegpt(record[keys["messages_column"]])
            if name == "text":
                text = record[data.text_column]
                return "markers" if isinstance(text, str) and markers.recognise(text) else "text"
            return name
    raise UsageError(
        f"data.format cannot be determined from the columns ({_listed(columns)}): name them in data.text_column, or "
        "data.prompt_column and data.response_column, or data.messages_column"
    )


def messages_column(columns: Iterable[str], data: Data) -> str:
    """Return the column of a chat's messages: the configured one, or ``conversations`` if only that exists."""
    return _either(columns, data.messages_column, "messages", ("conversations", "conversation"))


def response_column(columns: Iterable[str], data: Data) -> str:
    """Return the column of the response: the configured one, or ``completion`` if only that exists."""
    return _either(columns, data.response_column, "response", ("completion",))


def _either(columns: Iterable[str], configured: str, default: str, others: Iterable[str]) -> str:
    known = set(columns)
    if configured != default or configured in known:
        return configured
    return next((other for other in others if other in known), configured)


def _chat_or_sharegpt(messages: Any) -> str:
    first = messages[0] if isinstance(messages, list) and messages else None
    return "sharegpt" if isinstance(first, dict) and "from" in first and "role" not in first else "chat"


def _chat(record: Record, data: Data, read: Callable[[Any, int], Message] = message_of) -> Conversation:
    entries = _entries(record, messages_column(record, data))
    messages = [read(entry, number) for number, entry in enumerate(entries, 1)]
    return conversation(_with_system(record, messages), tools=record.get(data.tools_column))


def _with_system(record: Record, messages: list[Message]) -> list[Message]:
    """Put a record's ``system`` before its messages, if they have none of their own."""
    system = record.get("system")
    if not isinstance(system, str) or not system.strip() or (messages and messages[0].role == SYSTEM):
        return messages
    return [Message(SYSTEM, system), *messages]


def _shared(entry: Any, number: int) -> Message:
    if not isinstance(entry, dict):
        raise RefusedError(f"message {number} is {kind(entry)}, not an object with from and value")
    sender = entry.get("from")
    if not isinstance(sender, str) or sender.lower() not in _SENDERS:
        known = ", ".join(sorted(_SENDERS))
        raise RefusedError(f"message {number}: from is {json.dumps(sender)}, not one of {known}")
    content = content_of(entry.get("value"), f"message {number}")
    extra: Record = {}
    if sender.lower() == "function_call":
        try:
            call = parse(content or "")
        except ValueError:
            raise RefusedError(f"message {number}: its function call is not JSON") from None
        extra, content = {"tool_calls": call if isinstance(call, list) else [call]}, None
    weight = {key: entry[key] for key in ("weight", "train") if key in entry}
    return message_of({"content": content, **extra, **weight}, number, _SENDERS[sender.lower()])


def _instruction(record: Record, data: Data) -> Conversation:
    prompt, response = record.get(data.prompt_column), record.get(response_column(record, data))
    if isinstance(prompt, list) or isinstance(response, list):
        return _message_lists(record, data)
    messages = [
        Message(USER, text_of(record, data.prompt_column)),
        Message(ASSISTANT, text_of(record, response_column(record, data))),
    ]
    return conversation(_with_system(record, messages), tools=record.get(data.tools_column))


def _message_lists(record: Record, data: Data) -> Conversation:
    """Convert a prompt and a completion that are lists of messages."""
    before = _entries(record, data.prompt_column)
    after = _entries(record, response_column(record, data))
    messages = [message_of(entry, number) for number, entry in enumerate([*before, *after], 1)]
    messages = _with_system(record, messages)
    return conversation(messages, len(messages) - len(after), record.get(data.tools_column))


def _alpaca(record: Record, data: Data) -> Conversation:
    asked = text_of(record, "instruction")
    extra = record.get("input")
    if extra is not None and not isinstance(extra, str):
        raise RefusedError(f"input is {kind(extra)}, not text")
    if extra and extra.strip():
        asked = f"{asked}\n\n{extra}"
    messages = [Message(USER, asked), Message(ASSISTANT, text_of(record, "output"))]
    for earlier in reversed(record.get("history") or []):
        if not isinstance(earlier, list | tuple) or len(earlier) != 2 or not all(isinstance(x, str) for x in earlier):
            raise RefusedError("history is not a list of pairs of texts")
        messages[:0] = [Message(USER, earlier[0]), Message(ASSISTANT, earlier[1])]
    return conversation(_with_system(record, messages))


def _text(record: Record, data: Data) -> Text:
    return Text(text_of(record, data.text_column))


def _markers(record: Record, data: Data) -> Conversation:
    return conversation(markers.parse(text_of(record, data.text_column)))


def _entries(record: Record, column: str) -> list[Any]:
    entries = record.get(column)
    if isinstance(entries, str) and entries.lstrip().startswith("["):  # a CSV's cell
        try:
            entries = parse(entries)
        except ValueError:
            raise RefusedError(f"{column} is text that is not JSON") from None
    if entries is None:
        raise RefusedError(f"{column} is null" if column in record else f"has no {column}")
    if not isinstance(entries, list):
        raise RefusedError(f"{column} is {kind(entries)}, not a list of messages")
    if not entries:
        raise RefusedError(f"{column} is empty")
    return entries


def _listed(columns: list[str]) -> str:
    return ", ".join(map(str, columns))


_CONVERTERS: dict[str, Callable[[Record, Data], Converted]] = {
    "chat": _chat,
    "sharegpt": partial(_chat, read=_shared),
    "instruction": _instruction,
    "alpaca": _alpaca,
    "text": _text,
    "markers": _markers,
}
