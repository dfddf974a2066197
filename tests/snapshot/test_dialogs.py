"""The dialogs, the stacks and the list of runs as they look, compared as SVG."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ftmon.protocol.run.rundir import ExitFile, Recipe, RunDir, RunFile
from ftmon.tui.app import FtmonApp
from ftmon.tui.screens import runs
from scenes import LARGE, SMALL, ReadyReplay, both, picture, recorded, until

CREATED = 1_780_000_000.0


PICTURES = {
    "a kill offers the whole run and says no": both("k"),
    "a kill of the whole run in ASCII": picture("k", "a", "right", ascii=True),
    "a kill that is refused says why": picture("k", "y"),
    "a stop asks first": both("S"),
    "the stacks of all ranks with equal ones together": both("s"),
    "the stacks of one group with all its threads": picture("s", "right", "enter"),
}


class Commanded(ReadyReplay):
    """A recording that the app takes for a run with a hub, up to the moment a command is sent."""

    can_command = True


@pytest.fixture
def shows(plays: Callable[..., bool], recording: Callable[[str], Path]) -> Callable[..., bool]:
    """Compare the screen after some keys on a run in which a rank hangs."""

    return partial(plays, Commanded(recording("hang"), at_end=True))


def test_picture(shows, picture):
    assert shows(*picture[0], **picture[1])


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_list_of_runs(snap_compare, tmp_path, monkeypatch, size):
    home = tmp_path / "home"
    monkeypatch.setenv("FTMON_HOME", str(home))
    monkeypatch.setattr(runs, "home", lambda: Path("~/ftmon"))
    ends = [("finished", 0), ("failed", 1), ("stopped", -15), None]
    for index, end in enumerate(ends):
        run = RunDir(home / "runs" / f"llama3-{index}")
        run.path.mkdir(parents=True)
        recipe = Recipe(
            f"llama3-{index}.yaml", ["zero.stage=3", "optimizer.lr=1e-5"], "Llama-3.1-8B", ["/data/chats.jsonl"]
        )
        made = RunFile(run.id, "llama3", CREATED - 3600 * index, ["deepspeed"], "/home/user", "node-1", "train")
        run.write_run(msgspec.structs.replace(made, recipe=recipe))
        recorded(run.recording, 2, steps=6 + index)
        if end is not None:
            run.write_exit(ExitFile(end[1], CREATED - 3600 * index + 95, end[0]))
    app = FtmonApp()

    async def look(pilot: Any) -> None:
        await until(pilot, lambda: len(app.screen.query_one(runs.RunRows).items()) == len(ends), "the runs")
        await pilot.press("down")
        await until(pilot, lambda: app.screen.query_one(runs.RunRows).selected == 1, "the second run selected")
        app.pump()

    assert snap_compare(app, terminal_size=size, run_before=look)
