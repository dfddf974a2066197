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
from scenes import ReadyReplay, recorded, until

SMALL, LARGE = (80, 24), (200, 60)
CREATED = 1_780_000_000.0


class Commanded(ReadyReplay):
    """A recording that the app takes for a run with a hub, up to the moment a command is sent."""

    can_command = True


@pytest.fixture
def asks(plays: Callable[..., bool], recording: Callable[[str], Path]) -> Callable[..., bool]:
    """Compare the screen after some keys on a run in which a rank hangs."""

    return partial(plays, Commanded(recording("hang"), at_end=True))


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_kill_offers_the_whole_run_and_says_no(asks: Callable[..., bool], size: tuple[int, int]) -> None:
    assert asks(size, "k")


def test_a_kill_of_the_whole_run_in_ascii(asks: Callable[..., bool]) -> None:
    assert asks(SMALL, "k", "a", "right", ascii=True)


def test_a_kill_that_is_refused_says_why(asks: Callable[..., bool]) -> None:
    assert asks(SMALL, "k", "y")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_stop_asks_first(asks: Callable[..., bool], size: tuple[int, int]) -> None:
    assert asks(size, "S")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_stacks_of_all_ranks_with_equal_ones_together(asks: Callable[..., bool], size: tuple[int, int]) -> None:
    assert asks(size, "s")


def test_the_stacks_of_one_group_with_all_its_threads(asks: Callable[..., bool]) -> None:
    assert asks(SMALL, "s", "right", "enter")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_list_of_runs(
    snap_compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
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
