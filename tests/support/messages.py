"""One example of every message with every field off its default, in the order of ``wire.MESSAGE_TYPES``."""

import msgspec
from ftmon.protocol.messages.wire import Message
from places import DATA

EXAMPLES = tuple(msgspec.json.Decoder(Message).decode_lines((DATA / "messages.jsonl").read_bytes()))
