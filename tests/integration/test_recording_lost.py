"""A disk that is full, or a recording that is removed, under the hub: it goes on, counts, says so, and resumes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Hello, LogLine, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording import writer as writer_module
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from hub_client import App, exit_of, fake_ranks, hub_gone, started
from streams import RUN, Stream, append

SUPPORT = Path(__file__).parents[1] / "support"

# In a mount namespace of its own: a file system of 32 MiB, filled by somebody else, then freed.
REAL_FULL_DISK = f"""
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
from streams import RUN, Stream
from ftmon.protocol.recording import writer as module
from ftmon.protocol.recording.reader import Reader
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", sys.argv[1]], check=True)
disk = Path(sys.argv[1])
module.RETRY_S = 0.0
writer = module.Writer(disk / "r.sqlite", RUN)
frames = list(Stream(ranks=4, steps=300).frames())
errors = []
for count, frame in enumerate(frames, 1):
    if count == 300:  # for twice as many then as before: a log begun anew has room for what it held already
        with (disk / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass
    if count == 900:
        (disk / "filler").unlink()
    writer.append(frame.seq, frame.t, frame.message)
    if count % 50 == 0:
        writer.commit()
        errors.append((count, writer.error))
writer.close()
with Reader(disk / "r.sqlite") as reader:
    same = reader.frames(limit=10**6) == frames
    print(json.dumps([errors, same, reader.info().missing, writer.error, writer.lost, writer.recorded, len(frames)]))
"""


FULL_AT_THE_END = """
import subprocess, sys
from pathlib import Path
from ftmon.protocol.run import rundir
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
run = rundir.create("full", ["true"], "run")
with (disk / "filler").open("wb", buffering=0) as filler:
    try:
        while filler.write(bytes(512)):
            pass
    except OSError:
        pass
try:
    (disk / "another").write_bytes(b"x")
except OSError:
    pass
run.write_exit(rundir.ExitFile(3, 1.0, "failed", "exit code 3"))
print(run.read_exit())
"""


def on_a_small_disk(script: str, disk: Path) -> str:
    """Return the output of a script that mounts a file system of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: a small file system cannot be mounted")
    disk.mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", script, str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_that_was_full_for_a_while_costs_nothing(tmp_path):
    found = json.loads(on_a_small_disk(REAL_FULL_DISK, tmp_path / "disk"))
    errors, same, missing, error, lost, recorded, count = found
    told = [words for _, words in errors if words]
    assert told
    assert all("the disk is full; free space there and recording resumes by itself" in words for words in told)
    assert all(300 <= number <= 950 for number, words in errors if words)
    assert (same, missing, error, lost, recorded) == (True, "", "", 0, count)


def limit_pages(writer: Writer, pages: int) -> None:
    """Make SQLite refuse to let the file grow (SQLITE_FULL), as on a full disk."""
    writer._connection.execute(f"PRAGMA max_page_count={pages}")


@pytest.fixture
def frames() -> list[Frame]:
    return list(Stream(ranks=4, steps=400, spike_every=20).frames())


def test_how_a_job_ended_is_written_though_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "disk" / "home"))
    assert "exit_code=3" in on_a_small_disk(FULL_AT_THE_END, tmp_path / "disk")


def test_beyond_the_limit_bulk_is_let_go_and_counted_and_alerts_are_kept(tmp_path, frames, monkeypatch):
    monkeypatch.setattr(writer_module, "RETRY_S", 0.0)
    monkeypatch.setattr(writer_module, "PENDING_LIMIT", 300)
    writer = Writer(tmp_path / "r.sqlite", RUN)
    for count, frame in enumerate(frames, 1):
        writer.append(frame.seq, frame.t, frame.message)
        if count == 600:
            limit_pages(writer, 1)
        if count == 1500:
            assert "the disk is full" in writer.error
            assert writer.lost > 300
            limit_pages(writer, 2**30)
        if count % 50 == 0:
            writer.commit()
    writer.close()
    assert writer.error == ""
    assert writer.recorded + writer.lost == len(frames)
    with Reader(tmp_path / "r.sqlite") as reader:
        found = reader.frames(limit=10**6)
        kept = {frame.seq for frame in found}
        gone = [frame for frame in frames if frame.seq not in kept]
        assert len(gone) == writer.lost
        assert all(
            isinstance(frame.message, Step | LogLine) or frame.message.__class__.__name__ == "DeviceSample"
            for frame in gone
        )
        seen = {f.seq for f in found if isinstance(f.message, Alert)}
        assert seen == {f.seq for f in frames if isinstance(f.message, Alert)}
        info = reader.info()
        assert not info.complete
        assert f"{writer.lost} messages between " in info.missing
        assert "the disk is full" in info.missing
        for frame in frames[::97]:
            reader.state_at(frame.t)


def test_a_refusing_disk_is_left_alone_for_a_while(tmp_path, frames, monkeypatch):
    monkeypatch.setattr(writer_module, "RETRY_S", 3600.0)
    writer = Writer(tmp_path / "r.sqlite", RUN)
    limit_pages(writer, 1)
    append(writer, frames[:200])
    writer.commit()
    assert writer.error
    limit_pages(writer, 2**30)
    for _ in range(100):
        writer.commit()
    assert writer.error, "not tried again at once"
    writer.close()
    assert (writer.error, writer.recorded) == ("", 200)


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path, frames, monkeypatch):
    monkeypatch.setattr(writer_module, "RETRY_S", 0.0)
    writer = Writer(tmp_path / "later" / "r.sqlite", RUN)
    assert "unable to open database file; recording resumes by itself" in writer.error
    append(writer, frames[:100])
    writer.commit()
    (tmp_path / "later").mkdir()
    append(writer, frames[100:200])
    writer.commit()
    assert writer.error == ""
    writer.close()
    with Reader(tmp_path / "later" / "r.sqlite") as reader:
        assert reader.frames(limit=1000) == frames[:200]


def test_what_no_column_can_hold_is_counted_and_the_rest_is_recorded(tmp_path, frames):
    writer = Writer(tmp_path / "r.sqlite", RUN)
    nonsense = [
        LogLine(rank=2**63, time=0.0, stream="out", text="a rank beyond 64 bits"),
        LogLine(rank=0, time=0.0, stream="out", text="\udcff is no text"),
        Step(rank=2**64 - 1, step=2**64 - 1, started=0.0, host_us=1, phases=[]),
        Step(rank=0, step=1, started=float("nan"), host_us=1, phases=[]),
    ]
    good = frames[:100]
    append(writer, good[:50])
    for number, message in enumerate(nonsense):
        writer.append(good[49].seq, good[49].t + number, message)
    append(writer, good[50:])
    writer.close()
    assert (writer.error, writer.recorded, writer.lost) == ("", 100, 4)
    with Reader(tmp_path / "r.sqlite") as reader:
        assert reader.frames(limit=1000) == good


def test_a_writer_that_had_to_open_its_file_again_pools_nothing_twice(tmp_path, frames):
    writer = Writer(tmp_path / "r.sqlite", RUN)
    for count, frame in enumerate(frames, 1):
        writer.append(frame.seq, frame.t, frame.message)
        if count % 333 == 0:
            writer.commit()
            writer._end_checkpointer()
            writer._connection.close()
            writer._connection = None
    writer.close()
    with Reader(tmp_path / "r.sqlite") as reader:
        assert reader.frames(limit=10**6) == frames
        assert sum(point.count for point in reader.series(0, frames[0].t, frames[-1].t, limit=3)) == 400


@pytest.mark.parametrize("logs", [True, False])
def test_what_explains_the_run_is_carried_over_and_the_rest_is_counted(tmp_path, monkeypatch, logs):
    monkeypatch.setattr(writer_module, "SETTLE_S", 0.0)
    frames = list(Stream(ranks=2, steps=200, spike_every=20).frames())
    writer = Writer(tmp_path / "r.sqlite", RUN)
    half = len(frames) // 2
    for count, frame in enumerate(frames, 1):
        writer.append(frame.seq, frame.t, frame.message)
        if count % 50 == 0 or count == half:
            writer.commit()
        if count == half:
            reader = Reader(tmp_path / "r.sqlite")
            whole = reader.state_at(frame.t)
            for path in tmp_path.glob("r.sqlite*"):
                if logs or not path.name.endswith(("-wal", "-shm")):
                    path.unlink()
            if not logs:
                reader.close()
    writer.close()
    assert writer.error == ""
    assert writer.notice
    with Reader(tmp_path / "r.sqlite") as found:
        kept = found.frames(limit=10**6)
        assert [frame for frame in kept if frame.seq > frames[half - 1].seq] == frames[half:]
        earlier = {frame.seq for frame in kept if frame.seq <= frames[half - 1].seq}
        assert {frame.seq for frame in whole if isinstance(frame.message, Hello | Alert)} <= earlier
        info = found.info()
        assert f"{half - len(earlier)} messages between " in info.missing
        assert "the recording was removed; a new one was begun" in info.missing
        assert not info.complete
    assert os.path.exists(tmp_path / "r.sqlite")
    assert not os.path.exists(tmp_path / "r.sqlite-wal")


def test_a_directory_on_its_way_out_gets_no_new_file(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SETTLE_S", 0.0)
    (tmp_path / "run.json").touch()
    frames = list(Stream(ranks=2, steps=20).frames())
    writer = Writer(tmp_path / "r.sqlite", RUN)
    append(writer, frames[:20])
    writer.commit()
    for path in [tmp_path / "run.json", *tmp_path.glob("r.sqlite*")]:
        path.unlink()
    append(writer, frames[20:], commit_every=1)
    assert not (tmp_path / "r.sqlite").exists()


@pytest.mark.usefixtures("private_home")
def test_a_live_runs_recording_that_is_removed_goes_on_in_a_new_file_and_apps_have_its_history():
    with started(fake_ranks({"rate": 50}, {"rate": 50})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.rank == 1 and step.step > 20)
            app.history()
            run.recording.unlink()
            app.wait_for(Alert, lambda alert: (alert.kind, alert.evidence.get("rule")) == ("disk", "removed"))
            app.frames.clear()
            later = app.wait_for(Step, lambda step: step.rank == 0)
            history = app.history()
            assert {frame.message.rank for frame in history if isinstance(frame.message, Hello)} == {0, 1}
            eventually(lambda: any(f.message == later for f in app.history()), "the step in the new file")
            assert app.command("kill", signal="KILL").ok
        exit_of(run)
        hub_gone(run)
        info = Reader(run.recording).info()
        assert info.steps > 0
        assert "the recording was removed" in info.missing
