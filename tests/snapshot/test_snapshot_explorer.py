"""The snapshot explorer as it looks: the two real snapshots in the real app, compared as SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.protocol.snapshot.reader import open_snapshot
from ftmon.tui.screens.snapshot import SnapshotApp
from phasesnapshot import step_with_phases

DATA = Path(__file__).parents[1] / "data"
SMALL, LARGE = (80, 24), (200, 60)
OOM, STEP = "oom_backward", "step_zero3"


@pytest.fixture(scope="module")
def replays() -> dict[str, list[Replay]]:
    return {name: [Replay(open_snapshot(DATA / f"{name}.pickle.gz"), 0)] for name in (OOM, STEP)}


@pytest.fixture
def shows(snap_compare: Any, replays: dict[str, list[Replay]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Compare the screen after some keys."""

    def compare(
        name: str, size: tuple[int, int], *keys: str, before: str = "", color: bool = True, **options: Any
    ) -> bool:
        if not color:
            monkeypatch.setenv("NO_COLOR", "1")
        app = SnapshotApp(replays[name], replays[before] if before else None, **options)

        async def play(pilot: Any) -> None:
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
            # What the foot says for a few seconds would be there or not.
            app.app_state.show_message("")
            await pilot.pause()
            app.repaint()
            await pilot.pause()

        return snap_compare(app, terminal_size=size, run_before=play)

    return compare


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("name", [OOM, STEP])
def test_it_opens_at_the_error_or_the_peak_with_live_stacks(
    shows: Callable[..., bool], name: str, size: tuple[int, int]
) -> None:
    assert shows(name, size)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("view", ["2", "4", "5"])
def test_the_other_views(shows: Callable[..., bool], view: str, size: tuple[int, int]) -> None:
    assert shows(OOM, size, view)


def test_what_came_and_went_between_the_mark_and_the_cursor(shows: Callable[..., bool]) -> None:
    assert shows(STEP, LARGE, "m", *["left"] * 8, "3")


def test_a_search_narrows_the_tree(shows: Callable[..., bool]) -> None:
    assert shows(OOM, SMALL, "slash", *"silu", "enter")


def test_every_frame_when_libraries_are_not_folded(shows: Callable[..., bool]) -> None:
    assert shows(OOM, LARGE, "f")


def test_a_closed_branch(shows: Callable[..., bool]) -> None:
    assert shows(STEP, SMALL, "enter")


def test_the_timeline_close_up(shows: Callable[..., bool]) -> None:
    assert shows(STEP, SMALL, "plus", "plus", "plus", "plus", "right_square_bracket")


def test_the_difference_of_two(shows: Callable[..., bool]) -> None:
    assert shows(OOM, SMALL, before=STEP)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_help_explains_signs_figures_and_keys(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows(STEP, size, "question_mark")


def test_plain_ascii(shows: Callable[..., bool]) -> None:
    assert shows(OOM, SMALL, ascii=True)


def test_no_colour(shows: Callable[..., bool]) -> None:
    assert shows(OOM, SMALL, "4", color=False)


def test_the_light_theme(shows: Callable[..., bool]) -> None:
    assert shows(STEP, SMALL, light=True)


def test_too_small_a_terminal_says_so(shows: Callable[..., bool]) -> None:
    assert shows(STEP, (50, 12))


@pytest.mark.parametrize(("size", "options"), [(SMALL, {}), (LARGE, {}), (SMALL, {"ascii": True})])
def test_phases_and_spans_as_bands(snap_compare: Any, size: tuple[int, int], options: dict[str, bool]) -> None:
    app = SnapshotApp([step_with_phases()], **options)

    async def play(pilot: Any) -> None:
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=play)
