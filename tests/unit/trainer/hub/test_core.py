"""A recording that cannot be continued is moved aside whole, and a new one is begun."""

import shutil
from pathlib import Path

from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.schema import SCHEMA_VERSION
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.hub.core import open_recording
from streams import Stream, append

FRAMES = list(Stream(ranks=2, steps=200).frames())
PAGE = 8192


def record(writer: Writer) -> None:
    append(writer, FRAMES)
    writer.commit()


def recorded(run: RunDir, folder: Path) -> None:
    """Put the recording of a hub that was killed, with its write-ahead log, into the run's directory."""
    writer = Writer(folder / "live.sqlite", run.read_run())
    record(writer)
    for suffix in ("", "-wal"):
        shutil.copy(f"{folder}/live.sqlite{suffix}", f"{run.recording}{suffix}")
    writer.close()


def test_the_write_ahead_log_goes_with_the_recording(run: RunDir, tmp_path: Path) -> None:
    recorded(run, tmp_path)
    log = Path(f"{run.recording}-wal").read_bytes()
    assert log
    with run.recording.open("r+b") as file:
        file.seek(60)
        file.write((SCHEMA_VERSION + 1).to_bytes(4, "big"))
    writer, damage = open_recording(run, run.read_run())
    writer.close()
    aside = run.path / damage.moved_to
    assert Path(f"{aside}-wal").read_bytes() == log


def test_a_damaged_recording_is_replaced_by_one_that_records(run: RunDir, tmp_path: Path) -> None:
    recorded(run, tmp_path)
    with Reader(run.recording) as reader:
        assert reader.frames(limit=10**6) == FRAMES
    Writer(run.recording).close()  # the log becomes part of the file
    size = run.recording.stat().st_size
    with run.recording.open("r+b") as file:
        file.seek(PAGE)
        file.write(b"\xff" * (size - PAGE))
    writer, damage = open_recording(run, run.read_run())
    assert (run.path / damage.moved_to).stat().st_size == size
    record(writer)
    assert (writer.error, writer.lost) == ("", 0)
    writer.close()
