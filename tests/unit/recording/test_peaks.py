import random
from pathlib import Path

from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.curves import peak_seq
from ftmon.protocol.recording.reader import Reader
from streams import Stream, write


def highest(frames: list[Frame], rank: int) -> int | None:
    best: tuple[int, int] | None = None
    for frame in frames:
        if isinstance(frame.message, Step) and frame.message.rank == rank:
            peak = max(phase.peak_span.peak for phase in frame.message.phases)
            if best is None or peak > best[0]:
                best = (peak, frame.seq)
    return best and best[1]


def test_the_step_of_the_highest_peak_is_found_at_any_place_of_the_stream(tmp_path: Path) -> None:
    frames = list(Stream(ranks=3, steps=400).frames())
    write(tmp_path / "run.sqlite", frames)
    chosen = random.Random(7)
    with Reader(tmp_path / "run.sqlite") as reader:
        for _ in range(60):
            seq, rank = chosen.randrange(len(frames) + 1), chosen.randrange(3)
            assert peak_seq(reader._connection, rank, seq) == highest(frames[:seq], rank)


def test_the_state_at_a_time_has_the_step_of_each_ranks_highest_peak(tmp_path: Path) -> None:
    frames = list(Stream(ranks=2, steps=200, cuda=False).frames())
    write(tmp_path / "run.sqlite", frames)
    with Reader(tmp_path / "run.sqlite") as reader:
        state = {frame.seq for frame in reader.state_at(frames[-1].t)}
    assert {highest(frames, 0), highest(frames, 1)} <= state
