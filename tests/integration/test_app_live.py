"""The app on a live run: a real hub, ranks that are real processes; what it shows, kills, refuses and rewinds."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from eventually import SECONDS
from ftmon.protocol.messages.control import RunState
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run.notices import TERMINAL, Notify, write_notify
from ftmon.protocol.run.rundir import RunDir
from ftmon.tui.app import FtmonApp
from ftmon.tui.model import RunModel
from ftmon.tui.screens.dialogs import KillDialog
from ftmon.tui.screens.overview import OverviewScreen
from ftmon.tui.screens.runs import RunsScreen
from ftmon.tui.source.live import LiveSource
from ftmon.tui.widgets import state
from ftmon.tui.widgets.base import Canvas, SummaryBar
from hub_client import exit_of, fake_ranks, hub_of, members, started
from scenes import until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    with started(fake_ranks({}, {})) as run:
        hub_of(run)
        yield run


def shown(app: Any) -> str:
    return "\n".join(widget.plain for widget in app.screen.query(Canvas) if widget.display)


async def both_train(pilot: Any) -> None:
    def training() -> bool:
        states = [rank.state for rank in pilot.app.app_state.model.ranks.values()]
        return pilot.app.app_state.source.can_command and states == ["training", "training"]

    await until(pilot, training, "two training ranks")


async def test_a_kill_asks_first_then_shows_that_nothing_is_left(run):
    with closing(LiveSource(run)) as source:
        app = FtmonApp(source)
        async with app.run_test(size=(80, 24)) as pilot:
            await both_train(pilot)
            behind = app.screen.query_one(SummaryBar)
            await pilot.press("k")
            await until(pilot, lambda: isinstance(app.screen, KillDialog) and "[ No ]" in shown(app), "the dialog")
            before = behind.plain
            await until(pilot, lambda: behind.plain != before, "another step in the bar behind the dialog")
            text = shown(app)
            assert "Kill" in text
            assert "rank 1" in text
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, OverviewScreen), "the overview: the default is no")
            assert len(members(run)) >= 2
            await pilot.press("k")
            await until(pilot, lambda: isinstance(app.screen, KillDialog), "the dialog")
            await pilot.press("a", "y")
            await until(pilot, lambda: "nothing is left of the run" in " ".join(shown(app).split()), "the result")
            await until(pilot, lambda: not [p for p in members(run) if "fake" in str(p)], "the processes' end")
            assert exit_of(run).state in ("stopped", "failed")


async def test_a_live_view_is_held_rewound_and_returns_and_read_only_it_refuses_to_kill(run, monkeypatch):
    monkeypatch.setattr(state, "MESSAGE_SECONDS", SECONDS)
    with closing(LiveSource(run)) as source:
        app = FtmonApp(source, read_only=True)
        async with app.run_test(size=(80, 24)) as pilot:
            await both_train(pilot)
            await until(pilot, lambda: app.app_state.model.leading_step >= 4, "four steps")
            await pilot.press("left_square_bracket")
            await until(pilot, lambda: source.transport.mode == "rewound", "the past")
            await until(pilot, lambda: "live: L" in shown(app), "the way back")
            await pilot.press("L")
            await until(pilot, lambda: source.transport.mode == "live", "the present")
            await pilot.press("k")
            await until(pilot, lambda: "read-only" in app.app_state.message[0], "the refusal")
            assert isinstance(app.screen, OverviewScreen)
            assert "read-only" in shown(app)


def notified(app: FtmonApp) -> list[str]:
    """Return the runs that the terminal's notifications name when the run finishes."""
    assert app._notices is not None
    model = RunModel()
    model.apply(Frame(1, time.time(), RunState(state="finished", time=time.time() + 1, exit_code=0)))
    return [notice.run for notice in app._notices.fresh(model)]


async def test_the_list_opens_a_live_run_and_leads_back(run):
    write_notify(run, Notify([TERMINAL], ["finish"]))
    app = FtmonApp()
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: run.id[:10] in shown(app), "the run in the list")
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, OverviewScreen), "the overview")
            await both_train(pilot)
            await until(pilot, lambda: "rank 1" in shown(app), "the ranks")
            assert notified(app) == [run.id]
            await pilot.press("R")
            await until(pilot, lambda: isinstance(app.screen, RunsScreen), "the list again")
    finally:
        if app.app_state.source is not None:
            app.app_state.source.close()
