"""The snapshot explorer as it looks: the two real snapshots in the real app, compared as SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.protocol.snapshot.reader import open_snapshot
from ftmon.tui.screens.snapshot import SnapshotApp
from phasesnapshot import step_with_phases
from scenes import LARGE, both, picture

DATA = Path(__file__).parents[1] / "data"
OOM, STEP, PHASES = "oom_backward", "step_zero3", "phases"
PICTURES = {
    "it opens at the error with live stacks": both(OOM),
    "it opens at the peak with live stacks": both(STEP),
    **{f"view {view}": both(OOM, view) for view in ("2", "4", "5")},
    "what came and went between the mark and the cursor": picture(STEP, "m", *["left"] * 8, "3", sizes=(LARGE,)),
    "a search narrows the tree": picture(OOM, "slash", *"silu", "enter"),
    "every frame when libraries are not folded": picture(OOM, "f", sizes=(LARGE,)),
    "a closed branch": picture(STEP, "enter"),
    "the timeline close up": picture(STEP, *["plus"] * 4, "right_square_bracket"),
    "the difference of two": picture(OOM, before=STEP),
    "help explains signs, figures and keys": both(STEP, "question_mark"),
    "plain ASCII": picture(OOM, ascii=True),
    "no colour": picture(OOM, "4", color=False),
    "the light theme": picture(STEP, light=True),
    "a terminal too small": picture(STEP, sizes=((50, 12),)),
    "phases and spans as bands": both(PHASES),
    "phases and spans in ASCII": picture(PHASES, ascii=True),
}


@pytest.fixture(scope="module")
def replays() -> dict[str, list[Replay]]:
    found = {name: [Replay(open_snapshot(DATA / f"{name}.pickle.gz"), 0)] for name in (OOM, STEP)}
    return found | {PHASES: [step_with_phases()]}


@pytest.fixture
def shows(snap_compare: Any, replays: dict[str, list[Replay]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    def compare(
        size: tuple[int, int], name: str, *keys: str, before: str = "", color: bool = True, **options: Any
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


def test_picture(shows: Callable[..., bool], picture: tuple[Any, Any]) -> None:
    assert shows(*picture[0], **picture[1])
