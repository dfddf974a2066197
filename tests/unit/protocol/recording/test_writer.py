"""A step that fits no column is counted as lost once; the end is found after the clock was set back."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from streams import RUN, Stream, append

FRAMES = list(Stream(ranks=3, steps=150).frames())


def record(path: Path, frames: Sequence[Frame]) -> Writer:
    writer = Writer(path, RUN)
    append(writer, frames)
    writer.close()
    return writer


def test_a_step_that_fits_no_column_is_lost_once_and_the_others_are_not(tmp_path: Path) -> None:
    place = next(place for place, frame in enumerate(FRAMES) if isinstance(frame.message, Step)) + 3
    bad = msgspec.structs.replace(FRAMES[place].message, started=float("nan"))
    frames = list(FRAMES)
    frames[place] = msgspec.structs.replace(frames[place], message=bad)
    writer = record(tmp_path / "r.sqlite", frames)
    assert (writer.lost, writer.recorded) == (1, len(frames) - 1)
    with Reader(tmp_path / "r.sqlite") as reader:
        assert reader.frames(limit=10**6) == [frame for frame in frames if frame.message is not bad]


def test_the_end_is_found_by_its_time_after_the_clock_was_set_back(tmp_path: Path) -> None:
    half = len(FRAMES) // 2
    frames = [*FRAMES[:half], *(Frame(frame.seq, frame.t - 3600, frame.message) for frame in FRAMES[half:])]
    record(tmp_path / "r.sqlite", frames)
    with Reader(tmp_path / "r.sqlite") as reader:
        info = reader.info()
        assert (info.last_seq, info.steps) == (frames[-1].seq, 450)
        assert reader.seq_at(info.last_t) == info.last_seq
        assert frames[-1] in reader.state_at(info.last_t)
        assert reader.frames(limit=10**6, until_t=info.last_t) == frames
