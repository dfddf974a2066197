"""Keys of the app, pressed in the real app on a real recording: what a person does, and what then stands there."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from eventually import SECONDS
from ftmon.protocol.messages.telemetry import LogLine
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.app import FtmonApp, _run
from ftmon.tui.screens.base import HelpScreen
from ftmon.tui.screens.lists import AlertList, AlertsScreen, LogList, LogsScreen
from ftmon.tui.screens.oom import OomScreen
from ftmon.tui.screens.overview import OverviewScreen, RankScreen
from ftmon.tui.screens.runs import RunsScreen
from ftmon.tui.source.replay import ReplaySource
from ftmon.tui.widgets import state
from ftmon.tui.widgets.base import Canvas
from ftmon.tui.widgets.ranks import RankGrid
from oomscenes import out_of_memory
from scenes import hanging, recorded, settled, until
from streams import Stream, write
from textual.widget import Widget


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("keys") / "eight.sqlite", 8)


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hanging(tmp_path_factory.mktemp("keys") / "hang.sqlite")


class Commanded(ReplaySource):
    """A recording that the app takes for a run with a hub."""

    can_command = True


@pytest.fixture
def source(eight: Path) -> Iterator[ReplaySource]:
    source = ReplaySource(eight, at_end=True)
    yield source
    source.close()


@pytest.fixture
def stuck(hang: Path) -> Iterator[ReplaySource]:
    source = ReplaySource(hang, at_end=True)
    yield source
    source.close()


@asynccontextmanager
async def opened(source: ReplaySource, size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[FtmonApp, Any]]:
    app = FtmonApp(source)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        yield app, pilot


async def look_at(app: FtmonApp, pilot: Any, key: str, screen: type) -> None:
    await pilot.press(key)
    await until(pilot, lambda: isinstance(app.screen, screen) and app.screen.is_mounted, screen.__name__)


def shown(app: Any) -> str:
    return "\n".join(widget.plain for widget in app.screen.query(Canvas) if widget.display)


async def test_the_first_screen_answers_the_first_questions_and_arrows_and_enter_open_a_rank(source):
    async with opened(source, (200, 60)) as (app, pilot):
        text = shown(app)
        assert "training" in text
        assert "step 60 / 60" in text
        assert "/ 139.8 GiB" in text
        assert all(f"rank {rank}" in text for rank in range(8))
        await pilot.press("down", "right", "enter")
        await until(pilot, lambda: isinstance(app.screen, RankScreen) and "rank 4" in shown(app), "rank 4")
        assert app.app_state.selected == 4, "three cards side by side"
        for word in ("data", "forward", "backward", "optimizer", "growth", "transient", "step time", "output"):
            assert word in shown(app)
        await pilot.press("left", "escape")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen), "the overview")
        assert app.app_state.selected == 3


async def test_a_hung_rank_is_in_the_overview_and_in_an_alert_with_evidence_that_opens_it(stuck):
    async with opened(stuck) as (app, pilot):
        text = shown(app)
        assert "1 hung, 3 waiting" in text
        assert "hung 34 s" in text
        assert "in data" in text
        assert " W" not in text, "in place of its power"
        await look_at(app, pilot, "a", AlertsScreen)
        await settled(pilot)
        text = shown(app)
        assert "evidence" in text
        assert "8,841" in text
        assert "34 s" in text
        await pilot.press("slash")
        await until(pilot, lambda: app.focused, "the filter's prompt")
        await pilot.press(*"spike")
        alerts = app.screen.query_one(AlertList)
        await until(pilot, lambda: len(alerts.items()) == 1, "the filter")
        await pilot.press("escape")
        await until(pilot, lambda: len(alerts.items()) == 2, "the filter's end")
        assert isinstance(app.screen, AlertsScreen)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, RankScreen), "the rank")
        assert app.app_state.selected == 3


async def test_logs_follow_until_one_scrolls_are_of_all_or_one_rank_and_filtered_by_any_letters(source):
    async with opened(source) as (app, pilot):
        await look_at(app, pilot, "l", LogsScreen)
        await settled(pilot)
        assert "following" in shown(app)
        await pilot.press("up")
        await until(pilot, lambda: "held" in shown(app), "that it is held")
        await pilot.press("f")
        await settled(pilot)
        assert "following" in shown(app)
        await pilot.press("right", "right")
        await settled(pilot)
        assert "output of rank 0" in shown(app)
        await pilot.press("slash")
        await until(pilot, lambda: app.focused, "the filter's prompt")
        await pilot.press(*"qk?a", "enter")
        await until(pilot, lambda: app.screen.query_one(LogList).text == "qk?a", "the filter")
        assert app.is_running
        assert isinstance(app.screen, LogsScreen)


async def test_scale_theme_size_and_palette_of_the_overview_and_q_leaves(source):
    async with opened(source) as (app, pilot):
        assert "graphs 0 to 139.8 GiB (device)" in shown(app)
        await pilot.press("z")
        await until(pilot, lambda: "graphs 0 to 40 GiB (the run's peak)" in shown(app), "the other scale")
        await pilot.press("d")
        await until(pilot, lambda: app.theme == "ftmon-light", "the light theme")
        assert not app.app_state.theme.palette.dark
        await pilot.press("d")
        await until(pilot, lambda: app.app_state.theme.palette.dark, "the dark theme")
        titles = " ".join(command.title for command in app.get_system_commands(app.screen))
        for word in ("open", "alerts", "logs", "kill", "stop", "zoom", "go to", "light/dark", "runs", "detach", "help"):
            assert word in titles
        assert titles.startswith("open  (enter) training  (t) alerts  (a) memory  (m) logs  (l) stacks  (s)")
        assert titles.index("kill") < titles.index("go to") < titles.index("light/dark")
        await pilot.resize_terminal(50, 10)
        await until(pilot, lambda: "terminal 50x10 is too small" in shown(app), "the message")
        assert "rank 0" not in shown(app)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "GPU 0" in shown(app), "the overview again")
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running, "the end")


async def test_steps_alerts_and_typed_places_are_gone_to(source, monkeypatch):
    monkeypatch.setattr(state, "MESSAGE_SECONDS", SECONDS)
    async with opened(source) as (app, pilot):
        before = app.app_state.model.leading_step
        await pilot.press("left_square_bracket")
        await until(pilot, lambda: app.app_state.model.leading_step == before - 1, "a step back")
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: app.app_state.model.leading_step == before, "a step forward")
        await pilot.press("N")
        await until(pilot, lambda: app.app_state.model.leading_step == 40, "the alert of step 40")
        await settled(pilot)
        assert "rank 1 optimizer" in shown(app)
        for typed, arrived in (
            ("12", lambda: app.app_state.model.leading_step == 12),
            ("99999", lambda: "99999" in app.app_state.message[0]),
        ):
            await pilot.press("g")
            await until(pilot, lambda: app.focused, "the prompt")
            await pilot.press(*typed, "enter")
            await until(pilot, arrived, f"step {typed}, or a line that says why not")


async def test_the_timer_that_outlives_the_widgets_while_the_app_is_taken_down_does_no_harm(stuck):
    app = FtmonApp(stuck)
    bare = 0

    def pump() -> None:
        nonlocal bare
        bare += bool(app.screen_stack) and not app.screen.query(RankGrid)
        app.pump()

    class Slow(Widget):
        async def on_unmount(self) -> None:
            for _ in range(20_000):
                if bare > 1:
                    return
                await asyncio.sleep(0.01)

    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await app.screen.mount(Slow())
        app.set_interval(0.01, pump)
    assert bare > 1


async def test_logs_of_a_rank_that_failed_before_its_first_message(tmp_path):
    frames = list(Stream(ranks=2, steps=8).frames())
    line = LogLine(9, frames[-1].t, "err", "ImportError: no module named flash")
    write(tmp_path / "recording.sqlite", [*frames, Frame(frames[-1].seq + 1, frames[-1].t, line)])
    source = ReplaySource(tmp_path / "recording.sqlite", at_end=True)
    app = FtmonApp(source)
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(pilot)
            await look_at(app, pilot, "l", LogsScreen)
            await pilot.press("left")
            await settled(pilot)
            assert "ImportError" in shown(app)
            assert app.screen.query_one(LogList).rank == 9
    finally:
        source.close()


async def test_help_explains_the_screen_in_view(source):
    async with opened(source, (200, 60)) as (app, pilot):
        await pilot.press("question_mark")
        await until(pilot, lambda: "Every rank of the run" in shown(app), "the overview's help")
        assert isinstance(app.screen, HelpScreen)
        assert "the run's highest peak" in shown(app)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen), "the overview again")
        await look_at(app, pilot, "a", AlertsScreen)
        await pilot.press("question_mark")
        await until(pilot, lambda: "Alerts: spikes" in shown(app), "the alerts' help")


async def test_a_replay_plays_and_holds(eight):
    source = ReplaySource(eight)
    app = FtmonApp(source, play=True)
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: source.transport.playing, "playing")
            for speed in (2.0, 4.0, 8.0):
                await pilot.press("plus")
                await until(pilot, lambda speed=speed: source.transport.speed == speed, f"speed {speed}")
            await until(pilot, lambda: app.app_state.model.leading_step >= 3, "the third step")
            await pilot.press("space")
            await until(pilot, lambda: not source.transport.playing, "holding")
    finally:
        source.close()


@pytest.mark.parametrize("key", ["k", "S"])
async def test_a_replay_kills_and_stops_nothing_and_says_so(source, key, monkeypatch):
    monkeypatch.setattr(state, "MESSAGE_SECONDS", SECONDS)
    async with opened(source) as (app, pilot):
        await pilot.press(key)
        await until(pilot, lambda: "a replay has no processes" in app.app_state.message[0], "the refusal")
        assert isinstance(app.screen, OverviewScreen)


@pytest.mark.parametrize("size", [(60, 16), (200, 60)])
async def test_kill_and_stop_are_on_every_key_bar(eight, size):
    source = Commanded(eight, at_end=True)
    async with opened(source, size) as (app, pilot):
        for key in ("", "t", "a", "m", "l", "s", "e", "enter"):
            if key:
                await pilot.press(key)
            await until(pilot, lambda: "k kill  S stop  ? help  q detach" in shown(app).splitlines()[-1], key)
            if key:
                await pilot.press("escape")
    source.close()


def test_an_error_that_ends_the_app_is_its_status(source, monkeypatch):
    def fail() -> None:
        raise RuntimeError("a bug")

    app = FtmonApp(source)
    monkeypatch.setattr(app, "run", partial(app.run, headless=True, size=(80, 24)))
    monkeypatch.setattr(app, "pump", fail)
    assert _run(app) == 1


async def test_without_a_run_the_list_of_runs_opens(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    app = FtmonApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, RunsScreen), "the list of runs")
        await until(pilot, lambda: "no runs yet" in shown(app), "that there are none")


async def test_ascii_draws_nothing_else(stuck):
    app = FtmonApp(stuck, ascii=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        assert shown(app).isascii()
        for key in ("enter", "a", "l", "question_mark"):
            await pilot.press(key)
            await settled(pilot)
            assert shown(app).isascii(), key
            await pilot.press("escape")


async def test_o_and_a_move_a_replay_to_what_is_still_to_come(tmp_path):
    path = out_of_memory(tmp_path)
    for key, screen, words in (("o", OomScreen, "out of memory"), ("a", AlertsScreen, "moved to the first error")):
        source = ReplaySource(path, start=1.0)
        app = FtmonApp(source)
        async with app.run_test(size=(100, 40)) as pilot:
            await until(pilot, lambda source=source: source.transport.marks, "the marks")
            assert not app.app_state.model.ooms, "the replay is before it"
            await pilot.press(key)
            await until(pilot, lambda app=app: len(app.app_state.model.ooms), "the moment of the error")
            await until(pilot, lambda app=app, words=words: words in shown(app), words)
            assert isinstance(app.screen, screen)
        source.close()


async def test_o_and_a_say_when_a_recording_has_nothing_of_the_kind(tmp_path):
    source = ReplaySource(write(tmp_path / "calm.sqlite", Stream(ranks=2, steps=6, spike_every=0).frames()))
    async with opened(source) as (app, pilot):
        await pilot.press("o")
        await until(pilot, lambda: "no out-of-memory error in this recording" in shown(app), "the answer to o")
        await pilot.press("a")
        await until(pilot, lambda: "no alert in this recording" in shown(app), "the answer to a")
    source.close()


async def test_in_a_terminal_too_small_what_is_wrong_comes_first(stuck):
    async with opened(stuck, (50, 12)) as (app, _pilot):
        lines = shown(app).splitlines()
        assert lines[0].endswith("1 hung, 3 waiting")
        assert any("ftmon needs 60x16" in line for line in lines)


@pytest.mark.parametrize(("size", "there"), [((80, 24), False), ((120, 34), False), ((200, 60), True)])
async def test_a_large_overview_has_the_course_of_loss_speed_and_step_time(source, size, there):
    async with opened(source, size) as (app, pilot):
        await until(pilot, lambda: ("step time" in shown(app)) is there, "the strip")
        text = shown(app)
        assert ("tokens/s" in text) is there
        assert all(f"rank {rank}" in text for rank in range(8)) or size == (80, 24), "cards, but rows in the small one"
        if there:
            await pilot.resize_terminal(80, 24)
            await until(pilot, lambda: "step time" not in shown(app), "the end of the strip")
