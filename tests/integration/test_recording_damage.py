"""Recordings cut short, without their log, with a hole, or none at all: read what there is, say what is not."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ftmon.protocol.errors import RecordingError
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.schema import SCHEMA_VERSION
from ftmon.protocol.recording.writer import Writer
from streams import RUN, Stream, append, write


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    return list(Stream(ranks=4, steps=400).frames())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, frames: list[Frame]) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "recording.sqlite", frames, commit_every=100)


def one_line(error: BaseException, path: Path) -> str:
    text = str(error)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


def test_a_file_cut_short_at_any_byte_gives_what_is_left_or_one_line(path, frames, tmp_path):
    whole = path.read_bytes()
    torn = tmp_path / "torn.sqlite"
    read: list[int] = []
    by_seq = {frame.seq: frame for frame in frames}
    every = [frame.seq for frame in frames if isinstance(frame.message, Step)]
    cuts = [0, 1, 15, 16, 60, 99, 100, 101, 4096, 8191, 8192, 8193, 200_000, *range(12_345, len(whole), 59_981)]
    for cut in [*sorted(cuts), len(whole) - 1]:
        torn.write_bytes(whole[:cut])
        try:
            reader = Reader(torn)
        except RecordingError as error:
            one_line(error, torn)
            assert cut < 250_000, "enough of the file is there to read some of it"
            continue
        with reader:
            found = reader.frames(limit=10**6)
            assert all(frame == by_seq[frame.seq] for frame in found), "nothing that is not true is read"
            steps = [frame.seq for frame in found if isinstance(frame.message, Step)]
            assert steps == every[: len(steps)], "no hole before the end"
            assert len(steps) > 0.6 * len(every) or cut < len(whole) * 2 // 3
            info = reader.info()
            assert not info.complete
            assert info.missing.startswith("the file is cut short: ")
            assert "are there; it ends at 20" in info.missing or not found
            if found:
                reader.state_at(info.last_t)
                reader.series(0, info.first_t, info.last_t, 50)
                assert reader.memory(info.first_t, info.last_t + 1, 50) or not info.steps
            read.append(len(found))
    assert read == sorted(read), "a longer rest gives no less"
    assert read[-1] > 0.9 * len(frames)
    assert torn.read_bytes() == whole[:-1], "the file is never changed"


def test_a_hole_in_the_middle_is_passed_over(path, frames, tmp_path):
    holed = tmp_path / "holed.sqlite"
    shutil.copy(path, holed)
    size = path.stat().st_size // 8192
    with holed.open("r+b") as file:
        file.seek(size // 2 * 8192)
        file.write(bytes(3 * 8192))
    with Reader(holed) as reader:
        found = reader.frames(limit=10**6)
        by_seq = {frame.seq: frame for frame in frames}
        assert all(frame == by_seq[frame.seq] for frame in found)
        assert found[-1].seq == frames[-1].seq
        assert 0.5 * len(frames) < len(found) < len(frames)
        assert reader.info().missing.startswith("the file is damaged: only the parts that are whole were read")


def test_a_copy_without_its_log_says_that_it_was_not_closed(tmp_path, frames):
    writer = Writer(tmp_path / "live.sqlite", RUN)
    append(writer, frames, commit_every=100)
    writer._end_checkpointer()  # it moves pages into the file, also while that is copied
    lonely = Path(shutil.copy(tmp_path / "live.sqlite", tmp_path / "lonely.sqlite"))
    connection = sqlite3.connect(tmp_path / "live.sqlite")
    connection.execute("UPDATE meta SET value = '0' WHERE key = 'writer_pid'")
    connection.close()
    with Reader(lonely) as reader:
        info = reader.info()
        found = reader.frames(limit=10**6)
    assert (info.run_id, info.complete) in ((RUN.id, False), ("", False))
    assert found == frames[: len(found)]
    writer.close()


def test_a_log_that_is_cut_short_costs_only_its_end(tmp_path, frames):
    writer = Writer(tmp_path / "live.sqlite", RUN)
    writer._end_checkpointer()  # else the file may have what is cut off from the log
    append(writer, frames, commit_every=100)
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"live.sqlite{suffix}", tmp_path / f"copy.sqlite{suffix}")
    writer.close()
    log = tmp_path / "copy.sqlite-wal"
    os.truncate(log, log.stat().st_size - 12_345)
    with Reader(tmp_path / "copy.sqlite") as reader:
        found = reader.frames(limit=10**6)
    assert found == frames[: len(found)]
    assert len(found) > len(frames) // 2


@contextmanager
def as_nobody() -> Iterator[None]:
    """Drop root's right to read and write everything, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that everybody reaches (pytest's own is for its owner alone)."""
    path = Path(tempfile.mkdtemp(prefix="ftmon-test-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.mark.parametrize("closed", [True, False])
def test_a_read_only_folder_is_no_obstacle(public_dir, frames, closed):
    writer = Writer(public_dir / "live.sqlite", RUN)
    append(writer, frames[:300])
    writer.commit()
    if closed:
        writer.close()
    target = public_dir / "disk"
    target.mkdir()
    for suffix in ("",) if closed else ("", "-wal"):
        shutil.copy(public_dir / f"live.sqlite{suffix}", target / f"r.sqlite{suffix}")
    writer.close()
    for file in target.iterdir():
        file.chmod(0o444)
    target.chmod(0o555)
    try:
        with as_nobody(), Reader(target / "r.sqlite") as reader:
            assert reader.frames(limit=10**6) == frames[:300]
        assert not list(target.glob("*-shm"))
    finally:
        target.chmod(0o755)


def test_a_file_we_may_not_read_or_of_a_newer_schema_is_refused_with_the_remedy(public_dir, path, tmp_path):
    secret = Path(shutil.copy(path, public_dir / "secret.sqlite"))
    secret.chmod(0)
    with as_nobody(), pytest.raises(RecordingError) as error:
        Reader(secret)
    assert "Permission denied" in one_line(error.value, secret)
    newer = Path(shutil.copy(path, tmp_path / "newer.sqlite"))
    connection = sqlite3.connect(newer)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(RecordingError) as error:
        Reader(newer)
    assert f"this ftmon reads 1 to {SCHEMA_VERSION}: install a newer ftmon" in one_line(error.value, newer)
    with pytest.raises(RecordingError, match="install a newer ftmon"):
        Writer(newer)


def test_what_is_no_recording_is_refused_in_one_line(tmp_path):
    connection = sqlite3.connect(tmp_path / "other.sqlite")
    connection.execute("CREATE TABLE steps(seq)")
    connection.commit()
    connection.close()
    (tmp_path / "text.sqlite").write_text("step,loss\n1,2.0\n" * 100)
    (tmp_path / "empty.sqlite").touch()
    (tmp_path / "folder").mkdir()
    for name, words in {
        "none.sqlite": "no such recording; 'ftmon ls' lists",
        "text.sqlite": "is not an ftmon recording (not a SQLite file)",
        "other.sqlite": "is a SQLite file, but not an ftmon recording",
        "empty.sqlite": "is empty",
        "folder": "is a directory; name the recording.sqlite in it",
    }.items():
        with pytest.raises(RecordingError) as error:
            Reader(tmp_path / name)
        assert words in one_line(error.value, tmp_path / name)


def test_a_writer_continues_nothing_but_a_whole_recording(path, tmp_path):
    torn = Path(shutil.copy(path, tmp_path / "torn.sqlite"))
    os.truncate(torn, path.stat().st_size // 2)
    with pytest.raises(RecordingError, match="is cut short and cannot be continued; move it out of the way"):
        Writer(torn)
    (tmp_path / "text").write_text("no recording")
    with pytest.raises(RecordingError, match="is not an ftmon recording"):
        Writer(tmp_path / "text")
    assert (tmp_path / "text").read_text() == "no recording"


ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT"


def test_a_query_ends_at_ctrl_c(tmp_path):
    code = (
        "import sqlite3, sys\nfrom pathlib import Path\nfrom ftmon.protocol.recording.opening import Guard\n"
        "guard = Guard(Path('r'), seconds=60)\nconnection = guard.harden(sqlite3.connect(':memory:'))\n"
        "print('asks', flush=True)\n"
        f"try:\n    connection.execute('''{ENDLESS} count(*) FROM r''').fetchone()\n"
        "except sqlite3.Error as error:\n    guard.raise_limit(error)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    assert process.stdout.readline() == "asks\n"
    for _ in range(100):
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=0.3)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        process.kill()
        pytest.fail("ctrl-c did nothing")
    assert "KeyboardInterrupt" in errors
