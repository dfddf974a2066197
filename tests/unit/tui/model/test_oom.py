"""What is known of out-of-memory errors, folded from frames, and the session of a console."""

import unicodedata
from pathlib import Path

import models
import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Accepted, Alert, Console, RankState, Result
from ftmon.protocol.messages.memory import Cause, Composition, PhaseComposition
from ftmon.protocol.messages.telemetry import Heartbeat, StackGroup
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.model.oom import (
    MOST_LINES,
    CommandRecord,
    ConsoleSession,
    cause_of_alert,
    evidence_groups,
    group_parts,
    is_complete,
    other_evidence,
    shown_bytes,
    verdict_of,
)
from ftmon.tui.model.rank import RankMemory, phase_rates
from ftmon.tui.model.run import HeldWatch, RunModel, first_to_show, held_cases, held_since, hold_words
from ftmon.tui.model.waterfall import next_phase, rank_bars, unanalysed, waterfall
from ftmon.tui.source.load import adopt, describe, load, read_overview
from ftmon.tui.source.replay import ReplaySource
from hypothesis import given
from hypothesis import strategies as st
from oomscenes import messages, oom_of, out_of_memory
from peaks import MIB, Explained, explained

GIB = 2**30


def folded(**options: object) -> RunModel:
    return models.folded(Explained(**options).frames())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> RunModel:
    return folded(ranks=2)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_waterfall_s_parts_add_up_to_its_peak_each_beginning_where_the_last_ends(model: RunModel, phase: str) -> None:
    rank = model.ranks[0]
    fall = waterfall(rank, rank.memory.latest, phase, model.device_of(rank))
    assert fall.phase == phase
    at = 0
    for part in fall.parts:
        assert part.begin == at
        at += part.bytes
    assert at == fall.peak


def test_rows_keep_their_place_and_a_peak_has_no_parts_before_one_was_analysed(model):
    rank = model.ranks[0]
    sample = model.device_of(rank)
    falls = [waterfall(rank, rank.memory.latest, phase, sample) for phase in ("", "forward", "optimizer")]
    [names] = {tuple(part.name for part in fall.parts) for fall in falls}
    assert "unattributed" in names
    fall = falls[0]
    assert None not in (fall.unused, fall.context, fall.others, fall.unexplained)
    assert fall.extent + fall.since + (fall.unexplained or 0) == fall.used
    assert fall.others == 640 * MIB
    bars = rank_bars(model.ranks.values(), "")
    assert [bar.rank for bar in bars] == [0, 1]
    assert all(sum(size for name, size in bar.parts if name != "unused") == bar.peak for bar in bars)
    rank = folded(taken_apart=False).ranks[0]
    assert rank.memory.latest is None
    fall = unanalysed(rank, "", None)
    assert (fall.taken_apart, fall.parts[0].bytes) == (False, fall.peak)
    rank = folded(cuda=False).ranks[0]
    fall = waterfall(rank, rank.memory.latest, "", None)
    assert (fall.measure, fall.unused, fall.used) == ("glibc", None, None)
    model = folded(ranks=1)
    rank = model.ranks[0]
    rank.state = "finished"
    fall = waterfall(rank, rank.memory.latest, "", model.device_of(rank))
    assert (fall.used, fall.context, fall.others, fall.ended) == (None, None, None, True)


def test_a_part_of_a_later_version_is_counted_and_rates_are_over_the_phase_s_own_time(model):
    parts = {"parameters": GIB, "holograms": GIB}
    composition = Composition(0, 1, 1.0, "cuda", [PhaseComposition("forward", 2 * GIB, parts)])
    fall = waterfall(model.ranks[0], composition, "", None)
    assert sum(part.bytes for part in fall.parts) == fall.peak
    assert "holograms" in [part.label for part in fall.parts]
    last = model.ranks[0].allocator.last
    assert last is not None
    rates = {row.phase.name: row for row in phase_rates(last)}
    assert list(rates) == ["data", "forward", "backward", "optimizer"]
    assert rates["optimizer"].allocations_per_second == pytest.approx(410 / (0.31 * 0.18), rel=0.01)


def test_phases_go_in_the_order_they_run_and_the_latest_and_highest_compositions_are_kept():
    names = ["optimizer", "backward", "forward"]
    assert next_phase(names, "forward", 1) == "backward"
    assert next_phase(names, "optimizer", 1) == "forward"
    assert next_phase(names, "forward", -1) == "optimizer"
    memory = RankMemory()
    for step, size in ((8, 5), (2, 9), (4, 7)):
        memory.on_composition(Composition(0, step, 0.0, "cuda", [PhaseComposition("forward", size, {})]))
    assert (memory.latest.step, memory.highest.step) == (8, 2)


def test_retries_are_noted_with_their_step_unless_steps_before_it_are_missing(model: RunModel) -> None:
    apart = RunModel()
    for frame in Explained(1, 48).frames():
        if getattr(frame.message, "step", 48) in (5, 48):
            apart.apply(frame)
    found = [(each.ranks[0].allocator.retries, list(each.ranks[0].allocator.retry_steps)) for each in (model, apart)]
    assert found == [(3, [(30, 1), (41, 2)]), (3, [])]


def test_a_late_join_shows_what_one_who_was_there_sees(tmp_path: Path) -> None:
    whole = folded(ranks=2, steps=420)
    with Reader(explained(tmp_path / "r.sqlite", 2, steps=420)) as reader:
        info = reader.info()
        late = load(reader, info.last_t, describe(info))
        adopt(late, read_overview(reader, info))
    assert len(late.ranks[1].steps) < 420
    for number, rank in whole.ranks.items():
        seen = late.ranks[number]
        for name in ("latest", "highest", "causes"):
            assert getattr(seen.memory, name) == getattr(rank.memory, name)
        assert seen.allocator.last == rank.allocator.last
        assert [each.step for each in seen.allocator.samples] == [each.step for each in rank.allocator.samples]
        now, then = seen.memory.ranking, rank.memory.ranking
        assert (now.standing, now.crossing) == (then.standing, then.crossing)


STACKS = [{"bytes": 900, "count": 2, "frames": ["/home/u/train.py:3 main", "/x/torch/optim/adamw.py:5 step"]}]


def spike(**evidence: object) -> Alert:
    return Alert(1, "spike", "warning", 1.0, "t", rank=0, phase="optimizer", evidence=dict(evidence))


def test_the_hub_s_verdict_and_the_cause_are_read_from_an_alert() -> None:
    found = verdict_of(spike(cause_pattern="foreach_temporaries", remedy="fused=True", saves_bytes=900, stacks=STACKS))
    assert (found.pattern, found.remedy, found.saves_bytes) == ("foreach temporaries", "fused=True", 900)
    assert verdict_of(spike(transient_bytes=1)) is None
    told = spike(transient_bytes=1, cause_where="x", remedy="y", stacks=STACKS, armed_us=3)
    assert other_evidence(told) == {"transient_bytes": 1}, "and not told again as evidence"
    cause = Cause(0, 5, "optimizer", 1.0, "spike", 700, [])
    assert shown_bytes(cause, StackGroup(1000, 1, [], kept_bytes=300)) == 700, "what came and went"
    assert cause_of_alert(spike(), {0: {"optimizer": cause}}) is cause
    assert cause_of_alert(spike(), {1: {"optimizer": cause}}) is None
    assert cause_of_alert(spike(cause_rank=1), {1: {"optimizer": cause}}) is cause


T = 1_780_000_000.0


def oom_model_folded(*told: Message) -> RunModel:
    return models.model_of(*told, t=T, every=1.0)


def test_the_hubs_report_takes_the_place_of_bare_numbers_and_each_hold_is_told_of_once():
    oom, *rest = messages(T)
    case = oom_model_folded(oom).ooms.of_rank(1)
    assert (case.report, case.verdict.kind, case.ranks) == (None, "logits", [])
    assert case.remedies
    model = oom_model_folded(oom, *rest)
    assert len(model.ooms) == 1
    assert [moment.rank for moment in model.ooms.of_rank(1).ranks] == [0, 1, 2, 3]
    model, watch = oom_model_folded(*messages(T)), HeldWatch()
    assert watch.fresh(model).oom.rank == 1
    assert watch.fresh(model) is None
    model.apply(Frame(200, T + 900, oom_of(1, T + 900)))
    assert watch.fresh(model) is not None


def test_a_rank_is_held_until_its_state_or_its_heartbeat_says_otherwise() -> None:
    model = oom_model_folded(*messages(T))
    (case,) = held_cases(model)
    assert held_since(model, case) == T
    model.tick(T + 600)
    words = " ".join(hold_words(model, case))
    for part in ("waits in the failing frame, for 10 m 00 s now", "ranks 0, 2 and 3 wait", "in about 20 m 00 s"):
        assert part in words
    model.apply(Frame(100, T + 50, Heartbeat(1, 45, "forward", T, 1, T + 50, held_since=T + 1)))
    assert held_since(model, case) == T + 1
    model.apply(Frame(101, T + 60, Heartbeat(1, 45, "forward", T, 1, T + 60)))
    assert not held_cases(model)
    model.apply(Frame(102, T + 61, RankState(1, "gone", T + 61)))
    assert not held_cases(model)


def test_of_several_errors_the_first_of_the_last_ones_is_shown_and_a_group_names_its_calls():
    model = oom_model_folded(*(oom_of(rank, T + rank, held=False) for rank in (3, 1, 2)))
    assert [first_to_show(model, rank).oom.rank for rank in (None, 2)] == [1, 2]
    assert group_parts(evidence_groups(spike(stacks=STACKS))[0]) == ("step  adamw.py:5", "main  train.py:3")
    assert group_parts(StackGroup(1, 1, [])) == ("allocated by native code", "")
    assert [evidence_groups(spike(stacks=each)) for each in ("no", [1], [{"bytes": "x"}], None)] == [[]] * 4
    assert group_parts(StackGroup(1, 1, ["evil\x1b[2J:1 \x07f"]))[0] == "\ufffdf  evil:1"


def test_a_replay_of_the_recording_shows_the_report_and_marks_after_the_moment_are_left_out(tmp_path):
    source = ReplaySource(out_of_memory(tmp_path), at_end=True)
    source.start()
    try:
        eventually(lambda: source.model.ooms, "the report", each=source.pump, every=0.005)
        assert source.model.ooms.of_rank(1).report is not None
        assert source.folder == tmp_path
    finally:
        source.close()
    with Reader(explained(tmp_path / "r.sqlite", 1, steps=300)) as reader:
        info = reader.info()
        overview = read_overview(reader, info)
        early = load(reader, reader.step_time(40) or 0.0, describe(info), overview)
    assert {mark.step <= 40 for mark in early.ranks[0].memory.marks} == {True}


def session_with(output: str, error: str = "", ok: bool = True, text: str = "") -> ConsoleSession:
    session = ConsoleSession(1)
    session.sent("a", "x", T)
    record = CommandRecord("a", Console("1"), T, Accepted("a", True))
    record.result = Result("a", ok, "console", text, {"output": output, "error": error, "place": "model.py:3 forward"})
    session.receive({"a": record})
    return session


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_nothing_a_rank_prints_reaches_the_terminal_as_a_control(text: str) -> None:
    for line in session_with(text + "\x1b]0;title\x07\x1b[2J\x9b31m", text).lines:
        assert not {unicodedata.category(character) for character in line.text} & {"Cc", "Cs", "Zl", "Zp"}


def test_a_session_shows_input_output_and_errors_in_order() -> None:
    session = session_with("1\n2\n", "NameError: x")
    expected = [("in", ">>> x"), ("out", "1"), ("out", "2"), ("error", "NameError: x")]
    assert [(line.kind, line.text) for line in session.lines] == expected
    assert session.place == "model.py:3 forward"
    assert not session.waiting_since
    assert session_with("").lines[-1].text == "(no output)"
    assert session_with("", ok=False, text="rank 1 does not answer").lines[-1].text == "rank 1 does not answer"
    lines = session_with("\n".join(map(str, range(MOST_LINES + 100)))).lines
    assert (len(lines), lines[-1].text) == (MOST_LINES, str(MOST_LINES + 99))


def test_a_refused_command_says_why_and_history_keeps_what_was_being_typed():
    session = ConsoleSession(1)
    session.sent("a", "x", T)
    assert session.waiting_since == T
    session.receive({"a": CommandRecord("a", Console("1"), T, Accepted("a", False, "read-only hub"))})
    assert session.lines[-1].text == "refused: read-only hub"
    assert not session.waiting_since
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
