"""The snapshot explorer as an app."""

from ftmon.tui.screens.snapshot import SnapshotApp
from phasesnapshot import step_with_phases


async def test_a_timer_that_fires_while_the_app_closes_does_nothing() -> None:
    app = SnapshotApp([step_with_phases()])
    async with app.run_test() as pilot:
        await pilot.pause()
    assert not app.screen_stack
    app.repaint()  # raised ScreenStackError under load, as an app that closes removes its screens first
