"""History queries by name: what is asked, what is refused, and answers across versions."""

from collections.abc import Iterable

import msgspec
import pytest
from ftmon.protocol.errors import ProtocolError
from ftmon.protocol.messages.control import RunState
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.results import RESULTS, PeakMark, PhasePeaks, answer_query, bucket_of, decode_answer
from ftmon.tui.model.peaks import PeakRanking, rank_phases, ranking_sentences
from peaks import MEASURED, MIB

GIB = 2**30


def marks_of(points: Iterable[tuple[list[int], dict[str, int]]]) -> list[PeakMark]:
    return [
        PeakMark(0, step, phase, size * MIB, shape)
        for step, (shape, peaks) in enumerate(points, 2)
        for phase, size in peaks.items()
    ]


def measured(longest: int = 4096) -> list[PeakMark]:
    points = [([1, each.length], each._asdict()) for each in MEASURED if each.length <= longest]
    for _, peaks in points:
        del peaks["length"]
    return marks_of(points)


def judged(marks: list[PeakMark]) -> PeakRanking:
    ranking = rank_phases(marks)
    assert ranking is not None
    return ranking


def test_the_highest_phase_leads_with_the_next_one_and_since_when_among_batches_of_one_size():
    assert rank_phases([]) is None, "before the first step"
    ranking = judged(measured(512))
    assert (ranking.first.phase, ranking.first.bytes) == ("optimizer", 10753 * MIB)
    assert (ranking.next.phase, ranking.by) == ("backward", (10753 - 9545) * MIB)
    peaks = ((1, "optimizer", 10), (2, "backward", 9), (900, "backward", 11))
    ranking = judged([PeakMark(0, step, phase, size * GIB, [4, 128]) for step, phase, size in peaks])
    assert ranking.changes == ((1, "optimizer"), (900, "backward"))
    assert "the optimizer step led until step 900; backward since then" in ranking_sentences(ranking)


def test_a_flat_and_then_rising_curve_is_explained_by_the_length_at_which_the_lead_passes() -> None:
    ranking = judged(measured())
    crossing = ranking.crossing
    assert (crossing.below, crossing.above, crossing.ahead) == ("optimizer", "backward", False)
    assert (crossing.last_below.shape, crossing.first_above.shape) == ([1, 512], [1, 1024])
    assert 900 < crossing.size < 960  # 939: the line between the peaks measured at 512 and 1024 meets the flat one
    sentences = ranking_sentences(ranking)
    assert sentences[0].startswith("highest peak: 19.21 GiB in backward, step 6; next forward")
    assert sentences[1] == (
        "up to length 512 the optimizer step leads (flat at 10.50 GiB), from length 1,024 on backward "
        "(+2.8 MiB a token); they are equal near length 939"
    )


def test_where_one_phase_leads_at_every_length_or_several_change_hands_no_single_length_is_told():
    points = [([2, length], {"backward": 5_000 + length, "optimizer": 10_000}) for length in (512, 1024, 2048)]
    ranking = judged(marks_of(points))
    assert ranking.crossing.ahead
    assert ranking.crossing.size == pytest.approx(2 * 5_000)
    assert "would lead from about length 5,000 on" in ranking_sentences(ranking)[1]
    points = [([1, at], {"backward": size, "optimizer": 1000}) for at, size in ((100, 900), (200, 1100), (400, 900))]
    assert judged([PeakMark(0, 1, "optimizer", MIB, [1, 8]), *marks_of(points)]).crossing is None
    noise = [700, 690, 705, 688, 702, 691, 707]  # peaks that rise and fall as they like grow with nothing
    points = [([1, 100 * at], {"forward": size - 20, "optimizer": size}) for at, size in enumerate(noise, 1)]
    ranking = judged(marks_of(points * 2))
    assert (ranking.slopes, ranking.crossing) == ({"forward": 0.0, "optimizer": 0.0}, None)


def test_without_shapes_only_the_standing_is_told_and_a_size_of_the_first_step_alone_says_nothing():
    ranking = judged([PeakMark(0, 3, "forward", 2 * GIB), PeakMark(0, 3, "backward", GIB)])
    assert (ranking.crossing, ranking.slopes, len(ranking_sentences(ranking))) == (None, None, 1)
    first = [PeakMark(0, 1, phase, size * MIB, [1, 4096]) for phase, size in (("backward", 900), ("optimizer", 800))]
    later = [([1, at], {"backward": size, "optimizer": 1000}) for at, size in ((512, 950), (1024, 990))]
    assert judged([*first, *marks_of(later)]).crossing.ahead


def step(number: int, peak: int, shape: list[int], resident: int | None = None) -> Step:
    whole = None if resident is None else Span(0, 0, resident)
    record = PhaseRecord("backward", 0, 1, Span(0, 0, peak), Span(0, 0, 0), resident=whole)
    return Step(0, number, 0.0, 1, [record], batch_shape=shape)


def test_a_peak_sets_a_mark_only_when_it_rises_by_more_than_noise() -> None:
    peaks = PhasePeaks()
    assert len(peaks.see(step(1, 10 * GIB, [1, 8]))) == 1
    assert peaks.see(step(2, 10 * GIB + 15 * MIB, [1, 8])) == []
    assert len(peaks.see(step(3, 10 * GIB + 30 * MIB, [1, 8]))) == 1
    assert len(peaks.see(step(4, GIB, [1, 64]))) == 1, "another size has marks of its own"
    assert PhasePeaks().see(step(1, GIB, [1, 8], resident=3 * GIB))[0].bytes == 3 * GIB, "on a CPU the resident set"


@pytest.mark.parametrize("shape", [[], [0, 5], [-3, 4], [2**62, 2**62, 2**62]])
def test_shapes_that_make_no_sense_do_no_harm(shape: list[int]) -> None:
    assert isinstance(bucket_of(shape), int)
    assert len(PhasePeaks().see(step(1, GIB, shape))) == 1
    assert ranking_sentences(judged([PeakMark(0, 1, "forward", GIB, shape)]))


class Source:
    def seq_at(self, t: float) -> int:
        return int(t)


def test_queries_are_the_reader_s_methods_with_answers_of_their_types_without_messages_of_later_versions():
    public = {name for name, found in vars(Reader).items() if callable(found) and not name.startswith("_")}
    assert public - {"close", "part"} == set(RESULTS)  # a part is for commands at the file, not asked of a hub
    assert decode_answer("seq_at", answer_query(Source(), "seq_at", {"t": 7.0})) == 7
    known = Frame(1, 0.5, RunState(state="training", time=0.5))
    frames = [msgspec.to_builtins(known), {"seq": 2, "t": 0.6, "message": {"type": "hologram"}}]
    assert decode_answer("frames", msgspec.msgpack.encode(frames)) == [known]


@pytest.mark.parametrize(
    ("name", "args"),
    [("close", {}), ("_ask", {}), ("seq_at", {}), ("seq_at", {"t": 1.0, "x": 2}), ("seq_at", {"t": "y"})],
)
def test_what_is_no_query_is_refused(name: str, args: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        answer_query(Source(), name, args)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1])])
def test_an_answer_of_a_wrong_form_is_refused(data: bytes) -> None:
    for name in RESULTS:
        if name != "seq_at":
            with pytest.raises(ProtocolError):
                decode_answer(name, data)
