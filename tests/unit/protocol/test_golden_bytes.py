"""The wire format itself, committed: what an older or newer ftmon sends must keep its meaning.

``golden.json`` holds the header and every message of ``tests/support/messages.py`` as hex. Nothing here rewrites it: a
new field is added by hand, beside a note in ``docs/protocol.md``; the bytes that are there stay.
"""

import json
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol import wire
from ftmon.protocol.wire import Header, Message
from messages import EXAMPLES

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden.json").read_text())


def tag(message: Message) -> str:
    return str(message.__struct_config__.tag)


def test_there_is_an_example_of_every_message_type_with_every_field_off_its_default() -> None:
    assert [type(message) for message in EXAMPLES] == list(wire.MESSAGE_TYPES)
    for message in EXAMPLES:
        sent = msgspec.msgpack.decode(wire.encode_body(message))
        names = {"type", *message.__struct_encode_fields__}
        assert set(sent) == names, f"{tag(message)}: a field is left at its default"


@pytest.mark.parametrize("message", EXAMPLES, ids=tag)
def test_the_golden_bytes_of_a_message_still_mean_the_same(message: Message) -> None:
    assert wire.decode_body(bytes.fromhex(GOLDEN[tag(message)])) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=tag)
def test_a_message_is_still_sent_as_the_golden_bytes(message: Message) -> None:
    assert wire.encode_body(message).hex() == GOLDEN[tag(message)]


def test_the_header_is_still_the_golden_bytes() -> None:
    header = bytes.fromhex(GOLDEN["header"])
    assert wire.encode_header("rank-3-4321-987654", 17, 1_780_000_000.25) == header
    assert wire.decode_header(header) == Header((1, 0), "rank-3-4321-987654", 17, 1_780_000_000.25)
