"""The envelope: versions, unknown things, loss counting, and bytes from anybody."""

import contextlib
import json

import msgspec
import pytest
from ftmon.protocol.errors import ProtocolError, VersionError
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import RunState
from ftmon.protocol.messages.telemetry import Evaluation
from ftmon.protocol.messages.wire import RESTART_LEAP, Header, LossCounter, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import EXAMPLES
from places import DATA

# The wire format itself, committed: ``golden.json`` holds the header and every message of ``messages.jsonl``
# as hex. Nothing here rewrites it: a new field is added by hand, beside a note in ``docs/protocol.md``.
GOLDEN: dict[str, str] = json.loads((DATA / "golden.json").read_text())


def tag(message: Message) -> str:
    return str(message.__struct_config__.tag)


def test_every_message_type_has_an_example_off_its_defaults_and_the_header_is_still_the_golden_bytes():
    assert [type(message) for message in EXAMPLES] == list(wire.MESSAGE_TYPES)
    for message in EXAMPLES:
        sent = msgspec.msgpack.decode(wire.encode_body(message))
        names = {"type", *message.__struct_encode_fields__}
        assert set(sent) == names, f"{tag(message)}: a field is left at its default"
    header = bytes.fromhex(GOLDEN["header"])
    assert wire.encode_header("rank-3-4321-987654", 17, 1_780_000_000.25) == header
    assert wire.decode_header(header) == Header((1, 0), "rank-3-4321-987654", 17, 1_780_000_000.25)


@pytest.mark.parametrize("message", EXAMPLES, ids=tag)
def test_a_message_is_still_sent_and_read_as_the_golden_bytes(message: Message) -> None:
    assert wire.encode_body(message).hex() == GOLDEN[tag(message)]
    assert wire.decode_body(bytes.fromhex(GOLDEN[tag(message)])) == message


encode = msgspec.msgpack.encode


def test_fields_of_a_newer_minor_version_are_ignored_and_a_length_of_gigabytes_refused_untaken():
    sent = {"type": "run_state", "state": "training", "time": 1.0, "mood": "good", "nested": {"a": [1]}}
    assert wire.decode_body(encode(sent)) == RunState(state="training", time=1.0)
    header = {"v": [1, 99], "src": "hub", "seq": 1, "t": 2.0, "zone": "eu"}
    assert wire.decode_header(encode(header)).src == "hub"
    assert wire.decode_body(encode({"type": "hologram", "rank": 1})) is None
    for kind in (b"\xdf", b"\xdd", b"\xdb", b"\xc6"):
        with pytest.raises(ProtocolError):
            wire.decode_body(kind + b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "body",
    [{"type": "step", "rank": "three"}, {"type": "step"}, {"type": "run_state", "state": "dancing", "time": 1.0},
     {"rank": 1}, [], 7, None],
)  # fmt: skip
def test_a_message_of_a_wrong_form_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_body(encode(body))


def test_another_major_version_and_what_is_no_header_are_refused_in_words() -> None:
    header = encode({"v": [2, 3], "src": "rank-0-77-1", "seq": 1, "t": 0.0})
    with pytest.raises(VersionError) as refused:
        wire.decode_header(header)
    assert str(refused.value) == (
        "rank-0-77-1 speaks ftmon protocol 2.3, this side speaks 1.0: install the same ftmon version on both sides"
    )
    for frame in (b"", b"\x80", b"\xc1", encode({"v": [1], "src": "x", "seq": 1, "t": 0.0})):
        with pytest.raises(ProtocolError, match="not an ftmon header"):
            wire.decode_header(frame)


def test_losses_are_exactly_the_gaps_of_each_sender() -> None:
    counter = LossCounter()
    assert [counter.see("a", seq) for seq in (5, 6, 9, 10)] == [0, 0, 2, 0]
    assert counter.see("b", 100) == 0
    assert counter.see("b", 102) == 1
    assert counter.lost == {"a": 2, "b": 1}
    counter = LossCounter()  # a duplicate and a sender that began anew lose nothing
    assert [counter.see("a", seq) for seq in (7, 7, 1, 2, 4)] == [0, 0, 0, 0, 1]
    counter = LossCounter()  # nor does the leap of a hub that took over
    counter.see("hub", 1000)
    # Between the last number recorded and the leap lie heartbeats that were published and are in no recording.
    assert counter.see("hub", 900 + RESTART_LEAP) == 0
    assert counter.see("hub", 902 + RESTART_LEAP) == 1
    assert counter.lost == {"hub": 1}


@given(st.binary(max_size=300))
@settings(max_examples=150)
def test_random_bytes_are_refused_and_never_crash(data: bytes) -> None:
    for decode in (wire.decode_header, wire.decode_body):
        with contextlib.suppress(ProtocolError):
            decode(data)


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=120)
def test_a_message_cut_short_or_with_a_byte_changed_never_crashes(message: wire.Message, data: st.DataObject) -> None:
    body = bytearray(wire.encode_body(message))
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        del body[at:]
    else:
        body[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        wire.decode_body(bytes(body))


_values = st.recursive(
    st.sampled_from([None, False, True]) | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.sampled_from(sorted(wire.KNOWN_TAGS)), st.dictionaries(st.text(max_size=12), _values, max_size=6))
@settings(max_examples=80)
def test_known_types_with_any_fields_never_crash(tag: str, fields: dict[str, object]) -> None:
    with contextlib.suppress(ProtocolError):
        wire.decode_body(encode({**fields, "type": tag}))


def test_a_string_that_is_no_text_is_refused_and_bytes_that_are_no_utf_8_are_sent_with_question_marks():
    # msgspec raises Python's own UnicodeDecodeError for it, which is no MsgspecError.
    body = encode({"type": "stacks", "rank": 0, "time": 0.0, "text": "????"}).replace(b"????", b"\xff\xfe\x80\x80")
    with pytest.raises(ProtocolError, match="damaged ftmon message of type 'stacks'"):
        wire.decode_body(body)
    with pytest.raises(ProtocolError):
        wire.decode_header(encode({"v": [1, 0], "src": "??", "seq": 1, "t": 0.0}).replace(b"??", b"\xff\xff"))
    sent = Evaluation(0, 1, 1.0, "caf\udce9", 1.0, None, 8, metrics={"\udcff": 2.0})
    received = wire.decode_body(wire.encode_body(sent))
    assert received == msgspec.structs.replace(sent, name="caf?", metrics={"?": 2.0})


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81\xa4args", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_deep_nesting_is_refused(opening: bytes, depth: int) -> None:
    for frame in (opening * depth, opening * depth + b"\xc0", b"\x82\xa4type\xa7command\xa4args" + opening * depth):
        for decode in (wire.decode_header, wire.decode_body):
            with pytest.raises(ProtocolError):
                decode(frame)
