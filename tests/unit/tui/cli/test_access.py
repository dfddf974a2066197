"""``ls``, ``status`` and ``stacks`` of a recording file, as ``replay`` takes one; and what is no recording at all."""

import json
import os
import socket
from itertools import product
from pathlib import Path

import pytest
from ftmon.protocol.messages.telemetry import LogLine, Stacks
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run import rundir
from ftmon.protocol.text import escape_json
from ftmon.tui.cli.main import main
from streams import RUN, Stream, write

pytestmark = pytest.mark.usefixtures("private_home")

DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/home/user/train.py", line 12 in main
"""
COMMANDS = ["replay", "status", "ls", "stacks", "logs", "memory", "events", "oom"]
NO_RECORDINGS = ["fifo", "socket", "device", "empty folder", "missing", "long", "notes"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a recording that was copied from another host, with stacks of rank 1."""
    frames = list(Stream(ranks=2, steps=24).frames())
    last = frames[-1]
    stacks = Stacks(1, last.t, DUMP, "asked", "0x00007f0000000001")
    return write(tmp_path / "copied.sqlite", [*frames, Frame(last.seq + 1, last.t, stacks)])


def test_logs_of_a_rank_that_failed_before_its_first_message_and_stacks_recorded_last_are_shown(path, capsys):
    writer = Writer(path, RUN)
    writer.append(100_000, RUN.created, LogLine(5, RUN.created, "err", "ImportError: no module named flash"))
    writer.close()
    assert main(["logs", str(path), "--rank", "5"]) == 0
    assert capsys.readouterr().out == "rank 5| ImportError: no module named flash\n"
    assert main(["logs", str(path), "--rank", "5", "--text", "nowhere"]) == 0, "the rank is known"
    assert main(["logs", str(path), "--rank", "6"]) == 2
    assert main(["stacks", str(path)]) == 0
    assert "rank 1: " in (text := capsys.readouterr().out)
    assert "train.py:12 in main" in text
    assert main(["stacks", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["ranks"] == [1]
    for rank, words in (("0", "no stacks were recorded"), ("9", "no rank 9 in this run")):
        assert main(["stacks", "--rank", rank, str(path)]) == 2
        assert words in capsys.readouterr().err


def test_status_and_ls_describe_a_recording_file_and_a_folder_that_holds_one(path, capsys):
    assert main(["status", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{RUN.id}  finished")
    assert "step 24" in text
    assert f"recording: {path}" in text
    folder = path.with_name("run")
    folder.mkdir()
    path.rename(folder / "recording.sqlite")
    assert main(["ls", "--json", str(folder)]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["id"], entry["step"], entry["ranks"], entry["live"]) == (RUN.id, 24, 2, False)
    assert main(["ls", str(folder), str(folder / "recording.sqlite")]) == 0
    assert capsys.readouterr().out.count(RUN.id) == 2


def test_a_folder_without_a_recording_hides_no_run_of_its_name(path, tmp_path, monkeypatch, capsys):
    run = rundir.create("train", ["train"], "run")
    path.rename(run.recording)
    (tmp_path / "train").mkdir()
    monkeypatch.chdir(tmp_path)
    for words in (["status", "train"], ["replay", "train", "--plain"]):
        assert main(words) == 0
    assert str(run.recording) in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "replay", "logs", "stacks", "kill", "stop", "report"])
def test_an_empty_name_and_an_empty_folder_are_wrong_usage(tmp_path, monkeypatch, capsys, command):
    rundir.create("train", ["train"], "run")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, told in (("", "name of the run is empty"), ("folder", "folder")):
        assert main([command, name]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert "ftmon ls" in error


@pytest.mark.parametrize(
    ("kind", "command"),
    # ``oom`` has a process read notes: tests/integration/test_snapshot_cli.py
    [pair for pair in product(NO_RECORDINGS, COMMANDS) if pair != ("notes", "oom")],
)
def test_what_is_no_recording_is_refused_at_once_in_one_line(tmp_path, capsys, command, kind):
    place = tmp_path / "x.sqlite"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(place))
    elif make := {"fifo": os.mkfifo, "empty folder": Path.mkdir, "notes": lambda at: at.write_text("no\n")}.get(kind):
        make(place)
    else:
        place = {"device": Path("/dev/zero"), "long": tmp_path / f"{'x' * 5000}.sqlite"}.get(kind, place)
    assert main([command, str(place)]) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err[:7], err.count("\n")) == ("", "ftmon: ", 1)
    assert "Traceback" not in err


def test_what_json_escapes_is_read_back_as_it_was():
    text = "".join(map(chr, (*range(0x20, 0xD800), *range(0xE000, 0x10000), 0xE0041, 0x1F600)))
    written = escape_json(json.dumps(text, ensure_ascii=False))
    assert json.loads(written) == text
    assert not set(written) & set(map(chr, (*range(0x7F, 0xA0), 0x200B, 0x200D, 0x202E, 0x2066, 0xFEFF, 0xE0041)))
