"""The wire format itself, committed: what an older or newer ftmon sends must keep its meaning.

``golden.json`` holds the header and every message of ``tests/support/messages.py`` as hex. Nothing here rewrites it: a
new field is added by hand, beside a note in ``docs/protocol.md``. ``golden_old.json`` holds the bytes that the code of
2026-11-21 sent (commit c144ba7); these never change, and decode with the defaults of the fields added since.
"""

import json
from typing import Any

import msgspec
import pytest
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.wire import Header, Message
from messages import EXAMPLES
from places import DATA

GOLDEN: dict[str, str] = json.loads((DATA / "golden.json").read_text())
OLD: dict[str, str] = json.loads((DATA / "golden_old.json").read_text())


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


@pytest.mark.parametrize("name", [name for name in OLD if name != "header"])
def test_a_message_sent_by_an_older_ftmon_keeps_all_its_fields(name: str) -> None:
    old = msgspec.msgpack.decode(bytes.fromhex(OLD[name]))
    message = wire.decode_body(bytes.fromhex(OLD[name]))
    assert message is not None
    assert tag(message) == name
    assert_kept(old, msgspec.msgpack.decode(wire.encode_body(message)))


def assert_kept(old: Any, new: Any) -> None:
    """Compare every value of an old message with today's; new fields with defaults may be there beside them."""
    if isinstance(old, dict):
        assert set(old) <= set(new)
        for key, value in old.items():
            assert_kept(value, new[key])
    elif isinstance(old, list):
        assert len(old) <= len(new)
        for one, other in zip(old, new, strict=False):
            assert_kept(one, other)
    else:
        assert old == new


def test_the_header_sent_by_an_older_ftmon_is_the_same() -> None:
    assert OLD["header"] == GOLDEN["header"]
