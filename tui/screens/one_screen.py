"""An app with the look of the monitor and one screen."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ..themes import PALETTES, theme_of
from ..widgets.drawing.glyphs import ASCII, choose
from ..widgets.drawing.palette import DARK, LIGHT
from ..widgets.drawing.theme import Theme
from ..widgets.state.app_state import AppState
from .base import MonitorScreen
from .help import HelpScreen

_TICKS_A_SECOND = 2


class OneScreenApp(App[None]):
    """Shows ``MAIN_SCREEN``, which ``get_default_screen`` makes; ``HELP_SCREEN`` explains it.

    Args:
        ascii: draw with ASCII only, whatever the locale.
        light: begin with the light theme.
    """

    CSS_PATH = Path(__file__).parent.parent / "ftmon.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "detach", "leave", show=False, tooltip="leave")]
    MAIN_SCREEN: ClassVar[type[MonitorScreen]]
    HELP_SCREEN: ClassVar[type[HelpScreen]]

    def __init__(self, *, ascii: bool = False, light: bool = False) -> None:  # noqa: A002  (the name of the option)
        no_color = bool(os.environ.get("NO_COLOR"))
        super().__init__(ansi_color=True if no_color else None)
        for palette in PALETTES.values():
            self.register_theme(theme_of(palette))
        theme = Theme(LIGHT if light else DARK, ASCII if ascii else choose(False), color=not no_color)
        self.app_state = AppState(None, theme)
        self.theme = theme.palette.name

    def on_mount(self) -> None:
        """Draw again twice a second."""
        self.set_interval(1 / _TICKS_A_SECOND, self._tick)

    def _tick(self) -> None:
        # An app that closes removes its screens before its timers.
        if self.is_running and isinstance(self.screen, self.MAIN_SCREEN):
            self.screen.tick()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Offer every action of the screen by name."""
        for _, binding, enabled, tooltip in screen.active_bindings.values():
            if enabled and binding.tooltip and binding.action != "command_palette":
                action = binding.action if "." in binding.action else f"screen.{binding.action}"
                title = f"{binding.description}  ({binding.key})"
                yield SystemCommand(title, tooltip or binding.tooltip, lambda a=action: self._do(a))

    def _do(self, action: str) -> None:
        self.call_later(self.run_action, action)

    def action_detach(self) -> None:
        """Leave."""
        self.exit()

    def action_theme(self) -> None:
        """Switch between light and dark."""
        before = self.app_state.theme
        palette = LIGHT if before.palette.dark else DARK
        self.app_state.theme = Theme(palette, before.glyphs, before.color)
        self.theme = palette.name
        self._tick()

    def action_help(self) -> None:
        """Explain the screen."""
        if isinstance(self.screen, self.MAIN_SCREEN):
            self.push_screen(self.HELP_SCREEN(self.app_state, self.screen))
