"""What is known of out-of-memory errors, folded from frames, and the session of a console."""

import unicodedata
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Accepted, Console, RankState, Result
from ftmon.protocol.messages.telemetry import Heartbeat
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.tui.model.oom import MOST_LINES, ConsoleSession, is_complete
from ftmon.tui.model.run import HeldWatch, RunModel, first_to_show, held_cases, held_since, hold_words
from ftmon.tui.source.base import CommandRecord
from ftmon.tui.source.replay import ReplaySource
from hypothesis import given
from hypothesis import strategies as st
from oomscenes import messages, oom_of, out_of_memory

T = 1_780_000_000.0


def folded(*told: Message) -> RunModel:
    model = RunModel()
    for seq, message in enumerate(told, 1):
        model.apply(Frame(seq, T + seq, message))
    return model


def test_the_hubs_report_takes_the_place_of_the_ranks_bare_numbers() -> None:
    oom, *rest = messages(T)
    bare = folded(oom)
    case = bare.ooms.of_rank(1)
    assert case is not None
    assert (case.report, case.verdict.kind, case.ranks) == (None, "logits", [])
    assert case.remedies
    model = folded(oom, *rest)
    assert len(model.ooms) == 1
    found = model.ooms.of_rank(1)
    assert found is not None
    assert [moment.rank for moment in found.ranks] == [0, 1, 2, 3]


def test_a_rank_is_held_until_its_state_or_its_heartbeat_says_otherwise() -> None:
    model = folded(*messages(T))
    (case,) = held_cases(model)
    assert held_since(model, case) == T
    model.apply(Frame(100, T + 50, Heartbeat(1, 45, "forward", T, 1, T + 50, held_since=T + 1)))
    assert held_since(model, case) == T + 1
    model.apply(Frame(101, T + 60, Heartbeat(1, 45, "forward", T, 1, T + 60)))
    assert not held_cases(model)
    model.apply(Frame(102, T + 61, RankState(1, "gone", T + 61)))
    assert not held_cases(model)


def test_what_being_held_means_is_told_with_the_time_that_is_left() -> None:
    model = folded(*messages(T))
    model.tick(T + 600)
    case = held_cases(model)[0]
    words = " ".join(hold_words(model, case))
    assert "waits in the failing frame, for 10 m 00 s now" in words
    assert "ranks 0, 2 and 3 wait" in words
    assert "in about 20 m 00 s" in words


def test_each_hold_is_told_of_once() -> None:
    model, watch = folded(*messages(T)), HeldWatch()
    first = watch.fresh(model)
    assert first is not None
    assert first.oom.rank == 1
    assert watch.fresh(model) is None
    later = oom_of(1, T + 900)
    model.apply(Frame(200, T + 900, later))
    assert watch.fresh(model) is not None


def test_of_several_errors_the_first_of_the_last_ones_is_shown_unless_one_is_held() -> None:
    model = folded(*(oom_of(rank, T + rank, held=False) for rank in (3, 1, 2)))
    found = first_to_show(model)
    assert found is not None
    assert found.oom.rank == 1
    chosen = first_to_show(model, 2)
    assert chosen is not None
    assert chosen.oom.rank == 2


def test_a_replay_of_the_recording_shows_the_report(tmp_path: Path) -> None:
    source = ReplaySource(out_of_memory(tmp_path), at_end=True)
    source.start()
    try:
        eventually(lambda: source.model.ooms, "the report", each=source.pump, every=0.005)
        case = source.model.ooms.of_rank(1)
        assert case is not None
        assert case.report is not None
        assert source.folder == tmp_path
    finally:
        source.close()


def session_with(output: str, error: str = "", ok: bool = True, text: str = "") -> ConsoleSession:
    session = ConsoleSession(1)
    session.sent("a", "x", T)
    record = CommandRecord("a", Console("1"), T, Accepted("a", True))
    record.result = Result("a", ok, "console", text, {"output": output, "error": error, "place": "model.py:3 forward"})
    session.receive({"a": record})
    return session


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_nothing_a_rank_prints_reaches_the_terminal_as_a_control(text: str) -> None:
    session = session_with(text + "\x1b]0;title\x07\x1b[2J\x9b31m", text)
    for line in session.lines:
        assert not {unicodedata.category(character) for character in line.text} & {"Cc", "Cs", "Zl", "Zp"}


def test_a_session_shows_input_output_and_errors_in_order() -> None:
    session = session_with("1\n2\n", "NameError: x")
    assert [(line.kind, line.text) for line in session.lines] == [
        ("in", ">>> x"), ("out", "1"), ("out", "2"), ("error", "NameError: x"),
    ]  # fmt: skip
    assert session.place == "model.py:3 forward"
    assert not session.waiting_since
    assert session_with("").lines[-1].text == "(no output)"
    assert session_with("", ok=False, text="rank 1 does not answer").lines[-1].text == "rank 1 does not answer"


def test_a_refused_command_says_why_and_is_waited_for_no_more() -> None:
    session = ConsoleSession(1)
    session.sent("a", "x", T)
    assert session.waiting_since == T
    session.receive({"a": CommandRecord("a", Console("1"), T, Accepted("a", False, "read-only hub"))})
    assert session.lines[-1].text == "refused: read-only hub"
    assert not session.waiting_since


def test_long_output_is_bounded() -> None:
    session = session_with("\n".join(map(str, range(MOST_LINES + 100))))
    assert len(session.lines) == MOST_LINES
    assert session.lines[-1].text == str(MOST_LINES + 99)


def test_history_goes_back_and_forth_and_keeps_what_was_being_typed() -> None:
    session = ConsoleSession(1)
    for number, code in enumerate(["a", "b", "a"]):
        session.sent(str(number), code, T)
    assert session.history == ["b", "a"]
    assert [session.recall(-1, "draft") for _ in range(3)] == ["a", "b", "b"]
    assert [session.recall(1, "") for _ in range(2)] == ["a", "draft"]
    assert session.recall(1, "draft") == "draft"


@pytest.mark.parametrize(
    ("code", "complete"),
    [("x", True), ("f(", False), ("for i in x:", False), ("for i in x:\n    i\n", True), ("x = = 1", True), ("", True)],
)
def test_code_is_sent_when_python_would_run_it(code: str, complete: bool) -> None:
    assert is_complete(code) == complete
