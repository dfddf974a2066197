"""The app that explores memory snapshots."""

from typing import Any

from textual.screen import Screen

from ....protocol.analysis.allocator.snapshot.replay import Replay
from ...model.snapshot_explorer import Explorer, freeze_garbage_collector
from ..one_screen import OneScreenApp
from .help import SnapshotHelp
from .screen import SnapshotScreen


class SnapshotApp(OneScreenApp):
    """The explorer of one snapshot, or of the difference of two."""

    TITLE = "ftmon snapshot"
    MAIN_SCREEN, HELP_SCREEN = SnapshotScreen, SnapshotHelp

    def __init__(
        self,
        replays: list[Replay],
        before: list[Replay] | None = None,
        *,
        ascii: bool = False,  # noqa: A002  (the name of the option)
        light: bool = False,
    ) -> None:
        super().__init__(ascii=ascii, light=light)
        self.explorer = Explorer(replays, before)

    def get_default_screen(self) -> Screen[Any]:
        return SnapshotScreen(self.app_state, self.explorer)


def run_explorer(replays: list[Replay], before: list[Replay] | None = None, *, ascii_only: bool = False) -> int:
    """Run until the user quits; return 0, or 1 if an error ended the app."""
    freeze_garbage_collector()
    app = SnapshotApp(replays, before, ascii=ascii_only)
    app.run()
    return app.return_code or 0
