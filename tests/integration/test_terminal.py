"""A person at a real terminal of 80x24: the app opens on a demo, obeys keys, is left, comes back, and kills."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon_process import LONG_SECONDS, PROGRAM, SMALL, Ftmon, ftmon_home, wait_until_nothing_is_left
from streams import Stream, write
from terminal import PtyTerminal, Terminal, command, open_terminal, wait_for, wait_until_gone

SCREENS = {
    "Enter": "phase, GiB", "t": "loss", "a": "evidence", "m": "peak", "l": "output of all ranks", "e": "allocator",
    "g": "go to", "?": "escape: close", "C-p": "Search for commands",
}  # fmt: skip
"""Keys of the overview, and words on what they open."""
SNAPSHOT = Path(__file__).parents[1] / "data" / "oom_backward.pickle.gz"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path / "home", LANG="C.UTF-8", LC_ALL="C.UTF-8") as ftmon:
        yield ftmon


@pytest.fixture
def terminal(home: Ftmon, tmp_path: Path) -> Iterator[Terminal]:
    with open_terminal(80, 24, home.environ, tmp_path) as opened:
        yield opened


def test_a_demo_from_its_first_step_to_its_kill(home, terminal):
    command(terminal, PROGRAM, "demo", "--steps", "100000", *SMALL)
    wait_for(terminal, "rank 0", "rank 1", "training", seconds=LONG_SECONDS)
    run = home.newest()

    terminal.press("?")
    wait_for(terminal, "overview", "escape: close")
    terminal.press("Escape")
    wait_until_gone(terminal, "escape: close")

    terminal.press("C-c")
    wait_for(terminal, "q leaves, training continues; k ends it")

    terminal.press("q")
    wait_for(terminal, "attach again", run.id)
    assert run.read_exit() is None, "training continues without the app"

    command(terminal, PROGRAM, "attach")
    wait_for(terminal, "rank 0", "rank 1", "training")
    kill_the_run(terminal, run)
    terminal.press("q")
    wait_for(terminal, "stopped", "ftmon replay")
    wait_until_nothing_is_left(run)


def kill_the_run(terminal: Terminal, run: RunDir) -> None:
    terminal.press("k")
    wait_for(terminal, "Kill: ", "escape: no")
    terminal.press("a")
    wait_for(terminal, "whole run")
    terminal.press("y")
    wait_for(terminal, "killing", "nothing is left of the run", "escape: close")
    eventually(run.read_exit, "the run's end")
    terminal.press("Escape")
    wait_until_gone(terminal, "escape: close")


def test_a_snapshot_opens_in_the_explorer_and_a_terminal_that_cannot_draw_gets_lines(terminal):
    command(terminal, PROGRAM, "snapshot", str(SNAPSHOT))
    wait_for(terminal, "libraries folded", "q quit")
    terminal.press("q")
    assert "Traceback" not in wait_for(terminal, "$ ")
    command(terminal, "TERM=dumb", PROGRAM)
    wait_for(terminal, "no runs in")


def test_a_terminal_too_small_gets_lines_and_the_reason_first(home, tmp_path):
    write(tmp_path / "recording.sqlite", Stream(ranks=2, steps=20).frames())
    with open_terminal(58, 60, {**home.environ, "PYTHONUNBUFFERED": "1"}, tmp_path) as narrow:
        command(narrow, PROGRAM, "replay", str(tmp_path / "recording.sqlite"))
        text = wait_for(narrow, "needs 60x16", "finished")
    assert text.index("needs 60x16") < text.index("rank"), text


def test_ftmon_alone_lists_runs_and_opens_the_chosen_one(home, terminal, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(home.home))
    run = rundir.create("recorded", ["train.py"], "run")
    write(run.recording, Stream(ranks=2, steps=20).frames())
    run.write_exit(ExitFile(0, Stream.started + 20, "finished", "exit code 0"))
    command(terminal, PROGRAM)
    wait_for(terminal, "recorded-", "finished")
    terminal.press("Enter")
    wait_for(terminal, "rank 0", "rank 1", "step")
    terminal.press("R")
    wait_for(terminal, "recorded-", "finished")
    terminal.press("q")
    wait_for(terminal, "$ ")


def test_a_recording_is_replayed_and_ctrl_z_goes_back_to_the_shell_and_fg_to_the_app(home, terminal, tmp_path):
    write(tmp_path / "recording.sqlite", Stream(ranks=2, steps=20, finished=False).frames())
    command(terminal, PROGRAM, "replay", str(tmp_path / "recording.sqlite"))
    wait_for(terminal, "rank 0", "rank 1", "play", "q detach")
    terminal.press("C-z")
    wait_for(terminal, "topped", "$ ")  # "Stopped", or "[1] + Stopped"
    terminal.press("fg", "Enter")
    wait_for(terminal, "rank 0", "rank 1", "highest peak", "q detach")
    terminal.press("q")
    wait_for(terminal, "$ ")


@pytest.mark.parametrize(("variable", "keys"), [("LC_ALL", list(SCREENS)), ("LANG", ["Enter"])])
def test_in_the_c_locale_every_byte_is_ascii(tmp_path, variable, keys):
    write(tmp_path / "recording.sqlite", Stream(ranks=2, steps=60, spike_every=10, finished=False).frames())
    with ftmon_home(tmp_path / "home") as ftmon:
        environ = {name: value for name, value in ftmon.environ.items() if name[:3] != "LC_" and name != "LANG"}
        terminal = PtyTerminal(80, 24, {**environ, variable: "C"}, tmp_path)
        try:
            wait_for(terminal, "$")
            command(terminal, PROGRAM, "replay", str(tmp_path / "recording.sqlite"))
            for key in keys:
                wait_for(terminal, "rank 1", "q detach")
                terminal.press(key)
                wait_for(terminal, SCREENS[key], seconds=20)
                terminal.press("Escape")
            wait_for(terminal, "rank 1", "q detach")
            terminal.press("q")
            wait_for(terminal, "$ ")
        finally:
            terminal.close()
    assert len(terminal.raw) > 1_000 * (1 + len(keys))
    assert terminal.raw.isascii(), {letter for letter in terminal.raw.decode() if not letter.isascii()}
