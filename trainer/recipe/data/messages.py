"""The common form of all chat formats, and the refusal of a record that does not match.

Functions raise ``RefusedError`` for a record that does not match; its text is the reason, without the place.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.errors import UsageError
from ..config.schema import Data

BOM = b"\xef\xbb\xbf"
TEMPLATES = Path(__file__).parent / "templates"
NONE = "none"  # Value of ``data.chat_template`` that joins prompt and response without a template


def shipped() -> list[str]:
    """Return the names of the chat templates that ship with ftmon."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def utf8(content: bytes) -> str:
    """Return bytes as text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        wide = content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:2]  # as PowerShell's > writes
        encoding, name = ("UTF-16", "UTF-16") if wide else ("LATIN1", "Latin-1")
        raise ValueError(f"is not text in UTF-8; convert the file, as iconv -f {encoding} -t UTF-8 does from {name}")
    return text


def parse(text: str) -> Any:
    """Return the value of JSON text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"is not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError:  # Python's limit of 4,300 digits
        raise ValueError("is not JSON: a number has too many digits") from None


ASSISTANT, USER, SYSTEM, TOOL = "assistant", "user", "system", "tool"


class RefusedError(Exception):
    """A record cannot be trained on; the text is the reason, without the record's place."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | None  # Its text; None only in an assistant's message with tool calls
    reasoning: str = ""  # The assistant's reasoning before its answer, if the record has it separately
    tool_calls: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    """OpenAI's form: ``{"type": "function", "function": {"name", "arguments"}}``, arguments as an object."""
    name: str = ""
    tool_call_id: str = ""
    learned: bool = True  # False for ``weight: 0`` or ``train: false`` in the record


class Conversation(msgspec.Struct, frozen=True):
    """Messages, and the number of those that are the prompt."""

    messages: list[Message]
    prompt: int
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])


class Text(msgspec.Struct, frozen=True):
    """A plain text, learned whole."""

    text: str


def conversation(messages: list[Message], prompt: int | None = None, tools: Any = None) -> Conversation:
    """Return a conversation of checked messages; without ``prompt``, all up to the last user message are the prompt."""
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
    """Convert message ``number`` (from 1) in OpenAI's form; without ``role`` it has its own."""
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
    names = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


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
    if weight not in (None, 0, 1):
        raise RefusedError(f"message {number}: weight is {_json(weight)[:40]}, not 0 or 1")
    if not isinstance(train, bool | None):
        raise RefusedError(f"message {number}: train is {_json(train)[:40]}, not true or false")
    return weight != 0 and train is not False


def _calls(entry: dict[str, Any], number: int) -> list[dict[str, Any]]:
    calls = _parsed(entry.get("tool_calls"), f"message {number}: tool_calls")
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


def _parsed(value: Any, what: str) -> Any:
    """Return a list that may be JSON text as a whole, or in each of its parts, as tables hold it."""
    try:
        value = parse(value) if isinstance(value, str) and value.strip() else value
        return [parse(one) if isinstance(one, str) else one for one in value] if isinstance(value, list) else value
    except ValueError:
        raise RefusedError(f"{what} is text that is not JSON") from None


def _schemas(tools: Any) -> list[dict[str, Any]]:
    tools = _parsed(tools, "tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedError("tools is not a list of objects")
    return tools


_HASHES = re.compile(r"### ?(Human|User|Instruction|System|Assistant|Response|Bot) ?: ?", re.IGNORECASE)
_TURNS = re.compile(r"(?:\A|\n\n)(Human|User|Assistant): ?")
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)
_INST = re.compile(r"\[INST\](.*?)\[/INST\](.*?)(?=(?:<s>\s*)?\[INST\]|\Z)", re.DOTALL)
_SYSTEM = re.compile(r"\A\s*<<SYS>>(.*?)<</SYS>>(.*)\Z", re.DOTALL)

_ROLES = {
    **dict.fromkeys(("human", "user", "instruction"), USER),
    **dict.fromkeys(("assistant", "response", "bot"), ASSISTANT),
    "system": SYSTEM,
}


def recognise(text: str) -> bool:
    """Return whether a text is a chat with markers: it starts with one, and an assistant answers."""
    start = text.lstrip()
    if start.startswith(("[INST]", "<s>[INST]", "<s> [INST]")):
        return "[/INST]" in text
    if start.startswith("<|im_start|>"):
        return "<|im_start|>assistant" in text
    for pattern in (_HASHES, _TURNS):
        found = pattern.match(start)
        if found is not None:
            return any(_ROLES[other.group(1).lower()] == ASSISTANT for other in pattern.finditer(start))
    return False


def parse_markers(text: str) -> list[Message]:
    """Split a text at its markers."""
    text = text.strip()
    if "[INST]" in text and "[/INST]" in text:
        return _llama2(text)
    if "<|im_start|>" in text:
        rest = _CHATML.sub("", text).strip()
        if rest:
            raise RefusedError(f"has text outside its <|im_start|> markers: {rest[:40]!r}")
        return [Message(found.group(1), found.group(2)) for found in _CHATML.finditer(text)]
    for pattern in (_HASHES, _TURNS):
        if pattern.match(text):
            return _split(text, pattern)
    raise RefusedError("has no markers such as ### Human: and ### Assistant:")


def _split(text: str, pattern: re.Pattern[str]) -> list[Message]:
    marks = list(pattern.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        Message(_ROLES[mark.group(1).lower()], text[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    ]


def _llama2(text: str) -> list[Message]:
    before = text[: text.index("[INST]")].replace("<s>", "").strip()
    if before:
        raise RefusedError(f"has text before its first [INST]: {before[:40]!r}")
    messages: list[Message] = []
    for found in _INST.finditer(text):
        asked, answer = found.group(1), found.group(2)
        system = _SYSTEM.match(asked)
        if system is not None:
            messages.append(Message(SYSTEM, system.group(1).strip()))
            asked = system.group(2)
        messages.append(Message(USER, asked.strip()))
        answer = answer.strip().removesuffix("<s>").strip().removesuffix("</s>").strip()
        if answer:
            messages.append(Message(ASSISTANT, answer))
    return messages


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

    A missing column is a ``UsageError``, whose text starts with the dotted path of the key that names it.
    """
    columns = list(record)
    needed = {
        "chat": {"messages_column": messages_column(columns, data)},
        "instruction": {"prompt_column": data.prompt_column, "response_column": response_column(columns, data)},
        "alpaca": {"": "instruction", " ": "output"},
        "text": {"text_column": data.text_column},
    }
    form, listed = data.format, ", ".join(map(str, columns))
    if form != "auto":
        for key, column in needed.get({"sharegpt": "chat", "markers": "text"}.get(form, form), {}).items():
            if column not in columns:
                if not key.strip():
                    raise UsageError(f"data.format is {form}, but the data's columns are {listed}")
                raise UsageError(f"data.{key} is {column}, but the data's columns are {listed}")
        return form
    for name, keys in needed.items():
        if all(column in columns for column in keys.values()):
            if name == "chat":
                return _chat_or_sharegpt(record[keys["messages_column"]])
            if name == "text":
                text = record[data.text_column]
                return "markers" if isinstance(text, str) and recognise(text) else "text"
            return name
    two = f", as in: data.prompt_column={columns[0]} data.response_column={columns[1]}" if len(columns) == 2 else ""
    raise UsageError(
        f"data.format cannot be determined from the columns ({listed}): name them in data.text_column, or "
        f"data.prompt_column and data.response_column, or data.messages_column{two}"
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
    before, after = (_entries(record, one) for one in (data.prompt_column, response_column(record, data)))
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


_CONVERTERS: dict[str, Callable[[Record, Data], Converted]] = {
    "chat": _chat,
    "sharegpt": partial(_chat, read=_shared),
    "instruction": _instruction,
    "alpaca": _alpaca,
    "text": lambda record, data: Text(text_of(record, data.text_column)),
    "markers": lambda record, data: conversation(parse_markers(text_of(record, data.text_column))),
}


class Source:
    """Records of one file or data set, with their places."""

    weight = 1.0  # Number of uses of each record in an epoch
    blank: Sequence[str] = ()

    def __init__(self, rows: Any, name: str, digest: str, places: Sequence[object] = ()) -> None:
        self._rows = rows  # Sequence of records; a ``RefusedError`` in it stands for one
        self._name = name
        self.digest = digest
        self._places = places

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if it is not one."""
        record = self._rows[index]
        if isinstance(record, RefusedError):
            raise record
        return record

    def place(self, index: int) -> str:
        """Return the place of a record: ``train.csv:12``."""
        return f"{self._name}:{self._places[index]}"


def delimited(path: Path, most: int | None = None) -> Source:
    """Read a CSV or TSV file with a header, and at most ``most`` rows; a row that is not text is refused when used."""
    csv.field_size_limit(1 << 30)
    records: list[Any] = []
    lines: list[int] = []
    content = path.read_bytes()
    # Invalid bytes become lone surrogates, so that the other rows can be used.
    text = content.removeprefix(BOM).decode(errors="surrogateescape")
    rows = _rows(text, "\t" if path.suffix == ".tsv" else ",")
    _, header = next(rows, (1, []))
    if not header:
        raise ValueError("has no header line")
    if problem := _problem(header):
        raise ValueError(f"line 1 {problem}")
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise ValueError(f"its header names {json.dumps(twice)} twice")
    for line, row in rows:
        if row:
            lines.append(line)
            problem = _problem(row)
            if len(row) != len(header):
                problem = problem or f"has {len(row)} fields, and the header {len(header)}"
            records.append(RefusedError(problem) if problem else dict(zip(header, row, strict=True)))
        if len(records) == most:
            break
    return Source(records, path.name, hashlib.blake2b(content).hexdigest(), lines)


def _rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the fields of each row; raise ``ValueError`` if a field's quote is not closed."""
    ended = False

    def lines() -> Iterator[str]:
        nonlocal ended
        yield from io.StringIO(text, newline="")
        ended = True

    reader, first = csv.reader(lines(), delimiter=delimiter), 1
    try:
        for row in reader:
            if ended:  # the row was not complete with the last line; all from its first line on is one field
                raise ValueError(f"line {first} has a quote that is not closed")
            yield first, row
            first = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None


def _problem(row: list[str]) -> str:
    """Return the reason why a row is not text; empty if it is."""
    try:
        utf8("".join(row).encode(errors="surrogateescape"))
    except ValueError as error:
        return str(error)
    return ""


def is_json_list(path: Path) -> bool:
    """Return whether a JSON file is one list; otherwise it has one record per line."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BOM).lstrip()[:1] == b"["


def json_list(path: Path) -> Source:
    """Read a JSON file that is one list of records."""
    content = path.read_bytes()
    records = parse(utf8(content.removeprefix(BOM)))
    if not records:
        raise ValueError("holds no records")
    numbers = [f"record {number}" for number in range(1, len(records) + 1)]
    return Source(records, path.name, hashlib.blake2b(content).hexdigest(), numbers)


def first_record(path: Path, text_column: str) -> dict[str, Any]:
    """Return the first record of a file that is not Parquet; ``ValueError`` and ``OSError`` have the reason if not."""
    if path.suffix in (".csv", ".tsv"):
        rows = delimited(path, most=1)
        if not len(rows):
            raise ValueError("has a header and no rows")
        try:
            return rows.record(0)
        except RefusedError as refusal:
            raise ValueError(f"{rows.place(0)} {refusal}") from None
    if path.suffix == ".json" and is_json_list(path):
        where, record = "its first record", json_list(path).record(0)
    else:
        with path.open("rb") as file:
            number, line = next(((number, line) for number, line in enumerate(file, 1) if line.strip()), (1, b""))
        where, as_lines = f"line {number}", ""
        try:
            text = utf8(line.removeprefix(BOM if number == 1 else b"").rstrip(b"\r\n"))
            if path.suffix == ".txt":
                return {text_column: text}
            as_lines = "; one record a line is read"
            record = parse(text)
        except ValueError as error:
            raise ValueError(f"{where} {error}{as_lines}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object")
    return record
