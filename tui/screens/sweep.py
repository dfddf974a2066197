"""The app of one sweep: progress, table, curve, and keys."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ...protocol.errors import FtmonError
from ..model.sweep import SweepModel
from ..widgets.base import KeyBar
from ..widgets.state import AppState
from ..widgets.tables import SweepChart, SweepHead, SweepTable
from .base import FILE_KEYS, HelpScreen, MonitorScreen, OneScreenApp, TooSmall, key


class SweepScreen(MonitorScreen, inherit_bindings=False):
    """A sweep, read from its results file."""

    NAME = "sweep"
    inherits_keys = False
    WHAT = (
        "Each line is a configuration: its axes, the highest peak of any rank and phase, the error of the prediction, "
        "the step time. A failed run shows how it failed. The curve shows measured and predicted peaks over the "
        "integer axis. The sweep continues after you leave this screen."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        key("up", "scroll(1)", "up", "one line up", bar="↑ ↓"),
        key("down", "scroll(-1)", "down", "one line down", show=False),
        key("pageup", "scroll(10)", "page up", "ten lines up", show=False),
        key("pagedown", "scroll(-10)", "page down", "ten lines down", show=False),
        key("S", "stop", "end the sweep", "end the current run and the sweep; the same command resumes it"),
        *FILE_KEYS,
        key("q", "app.detach", "leave", "leave; the sweep continues"),
    ]

    def __init__(self, app_state: AppState, model: SweepModel) -> None:
        super().__init__(app_state)
        self.model = model

    def compose(self) -> ComposeResult:
        yield TooSmall(self.app_state, name="small")
        yield SweepHead(self.app_state, self.model, "summary")
        yield SweepTable(self.app_state, self.model, "rows")
        yield SweepChart(self.app_state, self.model, "sweep-chart")
        yield KeyBar(self.app_state, name="keys")

    def tick(self) -> None:
        try:
            self.model.refresh()
        except FtmonError as error:
            self.app_state.show_message(str(error), "error")
        super().tick()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return False for the end of a finished sweep, which hides its key."""
        return super().check_action(action, parameters) and (action != "stop" or self.model.alive)

    def action_scroll(self, lines: int) -> None:
        self.query_one(SweepTable).scroll(lines)
        self.tick()

    def action_stop(self) -> None:
        plan = self.model.results.plan if self.model.results is not None else None
        if plan is not None and self.model.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(plan.process.pid, signal.SIGINT)
            self.app_state.show_message("the sweep ends; its rows are kept, and the same command resumes it")
        self.tick()


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
