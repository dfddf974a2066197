"""A batch of steps gives the same rows as single steps; a step that fits no column is counted as lost once."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from streams import RUN, Stream

FRAMES = list(Stream(ranks=3, steps=150).frames())


def record(path: Path, frames: Sequence[Frame], *, together: bool) -> Writer:
    writer = Writer(path, RUN)
    for frame in frames:
        writer.append(frame.seq, frame.t, frame.message)
        if not together:
            writer.commit()
    writer.close()
    return writer


def rows_of(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with sqlite3.connect(path) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in names if name != "meta"}


def test_a_batch_of_steps_gives_the_same_rows_as_single_steps(tmp_path: Path) -> None:
    record(tmp_path / "one.sqlite", FRAMES, together=False)
    record(tmp_path / "all.sqlite", FRAMES, together=True)
    found = rows_of(tmp_path / "one.sqlite")
    assert len(found["steps"]) == 450
    assert all(found[table] for table in ("rollups", "curves", "marks"))
    assert rows_of(tmp_path / "all.sqlite") == found


def test_a_step_that_fits_no_column_is_lost_once_and_the_others_are_not(tmp_path: Path) -> None:
    place = next(place for place, frame in enumerate(FRAMES) if isinstance(frame.message, Step)) + 3
    bad = msgspec.structs.replace(FRAMES[place].message, started=float("nan"))
    frames = list(FRAMES)
    frames[place] = msgspec.structs.replace(frames[place], message=bad)
    writer = record(tmp_path / "r.sqlite", frames, together=True)
    assert (writer.lost, writer.recorded) == (1, len(frames) - 1)
    with Reader(tmp_path / "r.sqlite") as reader:
        assert reader.frames(limit=10**6) == [frame for frame in frames if frame.message is not bad]


def test_the_end_is_found_by_its_time_after_the_clock_was_set_back(tmp_path: Path) -> None:
    half = len(FRAMES) // 2
    frames = [*FRAMES[:half], *(Frame(frame.seq, frame.t - 3600, frame.message) for frame in FRAMES[half:])]
    record(tmp_path / "r.sqlite", frames, together=True)
    with Reader(tmp_path / "r.sqlite") as reader:
        info = reader.info()
        assert info.last_seq == frames[-1].seq
        assert reader.seq_at(info.last_t) == info.last_seq
        assert frames[-1] in reader.state_at(info.last_t)
        assert reader.frames(limit=10**6, until_t=info.last_t) == frames
