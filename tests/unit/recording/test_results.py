"""History queries by name: what is asked, what is refused, and answers across versions."""

import msgspec
import pytest
from ftmon.protocol.errors import ProtocolError
from ftmon.protocol.messages.control import RunState
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.results import RESULTS, answer_query, decode_answer


class Source:
    def seq_at(self, t: float) -> int:
        return int(t)


def test_every_query_is_a_public_method_of_the_reader() -> None:
    public = {name for name, found in vars(Reader).items() if callable(found) and not name.startswith("_")} - {"close"}
    assert public == set(RESULTS)


def test_an_answer_comes_back_as_the_type_of_the_query() -> None:
    assert decode_answer("seq_at", answer_query(Source(), "seq_at", {"t": 7.0})) == 7


@pytest.mark.parametrize(
    ("name", "args"),
    [("close", {}), ("_ask", {}), ("seq_at", {}), ("seq_at", {"t": 1.0, "x": 2}), ("seq_at", {"t": "y"})],
)
def test_what_is_no_query_is_refused(name: str, args: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        answer_query(Source(), name, args)


def test_a_message_type_added_later_is_left_out_of_an_answer() -> None:
    known = Frame(1, 0.5, RunState(state="training", time=0.5))
    frames = [msgspec.to_builtins(known), {"seq": 2, "t": 0.6, "message": {"type": "hologram"}}]
    assert decode_answer("frames", msgspec.msgpack.encode(frames)) == [known]


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1])])
def test_an_answer_of_a_wrong_form_is_refused(data: bytes) -> None:
    for name in RESULTS:
        if name != "seq_at":
            with pytest.raises(ProtocolError):
                decode_answer(name, data)
