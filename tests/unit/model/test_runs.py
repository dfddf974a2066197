import os
import time
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.host.process import ProcessId, this_process
from ftmon.protocol.run import run_store
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon.tui.model.runs import RunList
from streams import Stream, write


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))


def made(name: str, launcher: ProcessId | None = None) -> RunDir:
    run = run_store.create(name, ["train.py", "--lr", "1"], "run")
    if launcher is not None:
        run.write_run(msgspec.structs.replace(run.read_run(), launcher=launcher))
    return run


def test_a_run_that_ended_has_its_end_from_the_exit_file_and_its_steps_from_the_recording() -> None:
    run = made("done")
    write(run.recording, Stream(ranks=2, steps=30).frames())
    run.write_exit(ExitFile(3, time.time(), "failed", "rank 1 died"))
    (entry,) = RunList().entries()
    assert (entry.state, entry.live, entry.exit_code, entry.step, entry.ranks) == ("failed", False, 3, 30, 2)
    assert entry.ended is not None
    assert entry.recording_bytes == run.recording.stat().st_size
    assert entry.problem == ""


def test_a_run_whose_launcher_lives_is_live_before_any_hub_has_written() -> None:
    made("young", this_process())
    (entry,) = RunList().entries()
    assert (entry.live, entry.state, entry.ended, entry.recording, entry.problem) == (True, "starting", None, "", "")
    assert entry.duration_s(entry.created + 5) == pytest.approx(5)


def test_a_run_that_nobody_saw_end_is_lost() -> None:
    run = made("lost", ProcessId(2**22 + 1, 1))
    write(run.recording, Stream(ranks=1, steps=5, finished=False).frames())
    (entry,) = RunList().entries()
    assert (entry.state, entry.live) == ("lost", False)


def test_a_recording_that_cannot_be_read_says_why_and_hides_no_other_run() -> None:
    made("good", this_process())
    made("bad").recording.write_bytes(b"this is no recording at all " * 100)
    entries = {entry.name: entry for entry in RunList().entries()}
    assert entries["good"].problem == ""
    assert "recording" in entries["bad"].problem


def test_the_newest_run_comes_first() -> None:
    older, newer = made("older"), made("newer")
    os.utime(older.path / "run.json", (1, 1))
    assert [entry.id for entry in RunList().entries()] == [newer.id, older.id]


def test_an_unchanged_recording_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made("done")
    write(run.recording, Stream(ranks=1, steps=3).frames())
    listing = RunList()
    first = listing.entries()
    reads: list[RunDir] = []
    monkeypatch.setattr("ftmon.tui.model.runs._read_info", lambda run: reads.append(run) or (None, "read again"))
    assert listing.entries() == first
    assert reads == []
    with run.recording.open("ab") as file:
        file.write(b"\0" * 4096)
    listing.entries()
    assert [read.id for read in reads] == [run.id]
