"""The app of one sweep."""

from pathlib import Path
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.screen import Screen

from ...model.sweep import SweepModel
from ..help import HelpScreen
from ..one_screen import OneScreenApp
from .screen import SweepScreen


class SweepApp(OneScreenApp):
    """Shows a sweep; the sweep continues when the user quits."""

    TITLE = "ftmon sweep"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "detach", "leave", show=False, tooltip="leave")]
    MAIN_SCREEN, HELP_SCREEN = SweepScreen, HelpScreen

    def __init__(self, path: Path, *, ascii: bool = False) -> None:  # noqa: A002  (the name of the option)
        super().__init__(ascii=ascii)
        self.model = SweepModel(path)

    def get_default_screen(self) -> Screen[Any]:
        return SweepScreen(self.app_state, self.model)


def run_sweep_app(path: Path, *, ascii_only: bool = False) -> SweepModel:
    """Show a sweep until the user quits; return its last state."""
    app = SweepApp(path, ascii=ascii_only)
    app.run()
    return app.model
