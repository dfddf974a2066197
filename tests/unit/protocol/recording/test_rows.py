"""The table of jobs in a recording, and recordings of an earlier version that have none."""

import math
import sqlite3
from pathlib import Path

import pytest
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import PHASES, PhaseRecord, Signs, Span, Step, Update
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.rows import FIRST_PHASE_COLUMN, PHASE_WIDTH, REST_COLUMN, step_from_row, step_rows
from ftmon.protocol.recording.writer import Writer
from ftmon.tui.model.runs import job_rows
from ftmon.tui.source.load import describe, load
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Stream, write

spans = st.builds(Span, *(st.integers(-(2**40), 2**45) for _ in range(3)))
counts = st.integers(0, 2**40)
some, measured, floats = st.none() | counts, st.none() | spans, st.none() | st.floats()
numbers = [st.none() | st.floats(allow_nan=False)] * 4
updates = st.builds(Update, st.text(max_size=8), counts, counts, *numbers, st.booleans())
ours = st.sampled_from([*PHASES, "something new"]), st.integers(-(2**40), 2**40), counts, spans, spans, some
phases = st.builds(
    PhaseRecord, *ours, measured, measured, measured, st.integers(0, 1000), *[counts] * 5, some, st.booleans()
)
steps = st.builds(
    Step,
    *(st.integers(0, 5000), counts, st.floats(allow_nan=False), counts, st.lists(phases, max_size=6), some),
    *(st.integers(0, 1000), floats, floats, floats, floats, st.booleans()),
    *(st.lists(st.integers(0, 2**31), max_size=4), *[counts] * 8, st.lists(updates, max_size=3), counts),
    *(st.floats(0, 1e30), some, counts),
    st.none() | st.builds(Signs, unlabelled=counts, weights=st.sampled_from(["", "same", "nan"])),
    st.integers(1, 20),
)


def stored(row: tuple[object, ...]) -> tuple[object, ...]:
    """Do what SQLite does to a row: NaN becomes NULL."""
    return tuple(None if isinstance(value, float) and math.isnan(value) else value for value in row)


@given(steps)
@settings(max_examples=120, deadline=None)
def test_any_step_comes_back_exactly_from_its_columns_and_the_rows_of_other_phases(step: Step) -> None:
    row, extra = step_rows(17, 1.5, step)
    assert repr(step_from_row(stored(row))) == repr(step), "spelled out, as NaN equals NaN then"
    assert sum(row[14 + position * 8] is not None for position in range(4)) + len(extra) == len(step.phases)


@pytest.mark.parametrize("cuda", [True, False])
def test_an_ordinary_step_needs_no_extra_rows_and_little_detail(cuda: bool) -> None:
    for frame in Stream(ranks=2, steps=20, cuda=cuda).frames():
        if isinstance(frame.message, Step):
            row, extra = step_rows(frame.seq, frame.t, frame.message)
            assert extra == []
            assert len(row[REST_COLUMN]) < 200
            assert row[-2:] == (1, 1)
            assert step_from_row(row) == frame.message


def test_every_field_is_recorded_and_phases_that_ran_out_of_order_have_their_columns():
    # Whoever adds a field to Step or PhaseRecord records it too: in step_rows, step_from_row, and the strategies above.
    assert len(Step.__struct_fields__) == 28
    assert len(PhaseRecord.__struct_fields__) == 17
    span = Span(1, 2, 3)
    names = ("optimizer", "generate", "forward", "data", "backward")
    step = Step(0, 1, 5.0, 500, [PhaseRecord(name, 100 * i, 10 + i, span, span) for i, name in enumerate(names)])
    row, extra = step_rows(1, 5.0, step)
    columns = {name: position for position, name in enumerate(("data", "forward", "backward", "optimizer"))}
    hosts = {name: row[FIRST_PHASE_COLUMN + PHASE_WIDTH * position] for name, position in columns.items()}
    assert hosts == {"data": 13, "forward": 12, "backward": 14, "optimizer": 10}
    assert [each[5] for each in extra] == ["generate"]
    assert step_from_row(row) == step


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A recording as ftmon made it before it told jobs apart."""
    path = write(tmp_path / "recording.sqlite", list(Stream(ranks=2, steps=20).frames()))
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE jobs")
    connection.close()
    return path


def test_a_recording_without_a_table_of_jobs_opens_with_none_and_is_not_changed(earlier: Path) -> None:
    before = earlier.read_bytes()
    with Reader(earlier) as reader:
        info = reader.info()
        assert reader.jobs() == []
        model = load(reader, info.last_t, describe(info))
        assert (model.leading_step, dict(model.jobs)) == (20, {})
        assert job_rows(model.jobs, info.last_t) == []
        assert len([1 for frame in reader.frames(0, 10_000) if isinstance(frame.message, Step)]) == 40
        assert reader.marks()
    assert earlier.read_bytes() == before


def test_a_seek_gives_each_job_as_it_stood_then(tmp_path: Path) -> None:
    t = 1_780_000_000.0
    path = tmp_path / "recording.sqlite"
    writer = Writer(path)
    told = [
        Job(number=1, time=t, state="starting", started=t),
        Job(number=1, time=t + 4, state="training", started=t, steps=7),
        Job(number=1, time=t + 8, state="finished", started=t, ended=t + 8, steps=9),
        Job(number=2, time=t + 9, state="starting", started=t + 9),
    ]
    for seq, job in enumerate(told, writer.next_seq):
        writer.append(seq, job.time, job)
    writer.close()
    with Reader(path) as reader:
        for at, expected in ((5, told[1:2]), (8.5, told[2:3]), (10, told[2:4])):
            model = load(reader, t + at, describe(reader.info()))
            assert list(model.jobs.values()) == expected
