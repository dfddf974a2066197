"""The table of jobs in a recording, and recordings of an earlier version that have none."""

import sqlite3
from pathlib import Path

import pytest
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from ftmon.tui.model.runs import job_rows
from ftmon.tui.source.load import describe, load
from streams import Stream, write


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A recording as ftmon made it before it told jobs apart."""
    path = write(tmp_path / "recording.sqlite", list(Stream(ranks=2, steps=20).frames()))
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE jobs")
    connection.close()
    return path


def tables(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    connection.close()
    return found


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
    assert "jobs" not in tables(earlier)


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
