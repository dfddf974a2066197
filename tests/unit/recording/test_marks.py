"""Marks of the phases' peaks, and where explanations of memory are, as a recording keeps and gives them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ftmon.protocol.messages.memory import Cause, Composition
from ftmon.protocol.messages.telemetry import AllocatorEvents, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.results import PeakMark, PhasePeaks, answer_query, decode_answer
from ftmon.protocol.recording.writer import Writer
from ftmon.tui.model.rank import highest_bytes
from peaks import Explained
from streams import write

RANKS, STEPS = 2, 40


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    return list(Explained(RANKS, STEPS).frames())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, frames: list[Frame]) -> Path:
    return write(tmp_path_factory.mktemp("marks") / "recording.sqlite", frames)


@pytest.fixture
def reader(path: Path) -> Iterator[Reader]:
    with Reader(path) as opened:
        yield opened


def expected(frames: list[Frame]) -> list[PeakMark]:
    peaks = {rank: PhasePeaks() for rank in range(RANKS)}
    for frame in frames:
        if isinstance(frame.message, Step):
            peaks[frame.message.rank].see(frame.message)
    found = [mark for rank in range(RANKS) for mark in peaks[rank].marks]
    return sorted(found, key=lambda mark: (mark.rank, mark.step, mark.phase))


def test_the_marks_read_are_those_that_the_steps_set(reader: Reader, frames: list[Frame]) -> None:
    assert reader.marks() == expected(frames)


def test_a_phase_that_stays_where_it_is_sets_one_mark_for_each_size_of_batch(reader: Reader) -> None:
    optimizer = [mark for mark in reader.marks() if mark.rank == 0 and mark.phase == "optimizer"]
    assert len({mark.bytes for mark in optimizer}) == 1
    assert len(optimizer) <= STEPS
    assert len({mark.shape[-1] // 4 for mark in optimizer}) == len(optimizer)


def test_marks_go_on_where_an_earlier_writer_left_off(tmp_path: Path, frames: list[Frame]) -> None:
    path = tmp_path / "recording.sqlite"
    half = len(frames) // 2
    write(path, frames[:half])
    writer = Writer(path)
    first = writer.next_seq
    for frame in frames[half:]:
        writer.append(first + frame.seq, frame.t, frame.message)
    writer.close()
    with Reader(path) as reader:
        assert reader.marks() == expected(frames)


def test_the_state_at_a_time_has_the_last_composition_and_the_one_of_the_highest_peak(
    reader: Reader, frames: list[Frame]
) -> None:
    for t in (frames[len(frames) // 2].t, frames[-1].t):
        so_far = [f.message for f in frames if f.t <= t and isinstance(f.message, Composition) and f.message.rank == 1]
        found = [f.message for f in reader.state_at(t) if isinstance(f.message, Composition) and f.message.rank == 1]
        assert so_far[-1] in found
        assert max(map(highest_bytes, found)) == max(map(highest_bytes, so_far))
        assert len(found) <= 2


def test_the_state_at_the_end_has_the_cause_and_the_last_events(reader: Reader, frames: list[Frame]) -> None:
    state = [frame.message for frame in reader.state_at(frames[-1].t)]
    assert [message.phase for message in state if isinstance(message, Cause)] == ["optimizer"]
    assert {message.rank: message.step for message in state if isinstance(message, AllocatorEvents)} == {0: 40, 1: 40}


def test_samples_are_spread_over_the_recording_and_end_with_its_last(reader: Reader) -> None:
    steps = [
        frame.message.step for frame in reader.sampled("events", 0, 3) if isinstance(frame.message, AllocatorEvents)
    ]
    assert len(steps) == 3
    assert steps[-1] == 40
    assert steps[0] < 20
    assert reader.sampled("events", 7) == []


def test_both_questions_can_be_asked_of_a_hub(reader: Reader) -> None:
    assert decode_answer("marks", answer_query(reader, "marks", {})) == reader.marks()
    answer = answer_query(reader, "sampled", {"kind": "events", "rank": 0, "limit": 2})
    assert decode_answer("sampled", answer) == reader.sampled("events", 0, 2)


def test_marks_are_made_again_for_what_is_left_of_a_damaged_recording(tmp_path: Path, frames: list[Frame]) -> None:
    path = write(tmp_path / "recording.sqlite", Explained(RANKS, 400).frames())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.8)])
    with Reader(path) as reader:
        assert reader.info().missing
        assert len(reader.marks()) > 20
        assert any(isinstance(frame.message, Composition) for frame in reader.state_at(reader.info().last_t))
