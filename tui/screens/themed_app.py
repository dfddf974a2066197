"""Base of the monitor and of apps with one screen: themes, and the visible screen's actions by name."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.events import Resize
from textual.keys import format_key
from textual.screen import Screen

from ..source.base import Source
from ..themes import PALETTES, theme_of
from ..widgets.drawing.glyphs import ASCII, choose
from ..widgets.drawing.palette import DARK, LIGHT
from ..widgets.drawing.screen_output import ScreenOutput
from ..widgets.drawing.theme import Theme
from ..widgets.state.app_state import AppState


class ThemedApp(App[None]):
    """An app in a light and a dark theme.

    Args:
        source: The run to show, if any.
        ascii: Draw with ASCII only, regardless of the locale.
        light: Start with the light theme.
        read_only: Refuse all commands to the run.
    """

    CSS_PATH = Path(__file__).parent.parent / "ftmon.tcss"
    ENABLE_COMMAND_PALETTE = True
    # Textual's own ctrl+q and ctrl+c are kept; ctrl+c twice also leaves.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "detach", "detach", show=False, tooltip="leave")]

    def __init__(
        self,
        source: Source | None = None,
        *,
        ascii: bool = False,  # noqa: A002  (the name of the option)
        light: bool = False,
        read_only: bool = False,
    ) -> None:
        no_color = bool(os.environ.get("NO_COLOR"))
        # With native ANSI colours Textual applies NO_COLOR as no colour at all, otherwise as shades of grey.
        super().__init__(ansi_color=True if no_color else None)
        for palette in PALETTES.values():
            self.register_theme(theme_of(palette))
        theme = Theme(LIGHT if light else DARK, ASCII if ascii else choose(False), color=not no_color)
        self.app_state = AppState(source, theme, read_only)
        self.output.ascii_only = theme.glyphs.is_ascii
        self.theme = theme.palette.name

    def get_driver_class(self) -> type[Driver]:
        """Return Textual's driver for this platform, which sends only changed cells (not on Windows)."""
        base = super().get_driver_class()
        self.output = output = ScreenOutput()
        if sys.platform == "win32":
            return base

        class ChangedCellsDriver(base):
            def write(self, data: str) -> None:
                super().write(output.rewrite(data))

        return ChangedCellsDriver

    def on_resize(self, event: Resize) -> None:
        """Draw everything again: what a terminal shows after a change of its size differs among terminals."""
        del event
        self.output.forget()

    def repaint(self) -> None:
        """Draw changes."""
        raise NotImplementedError

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the actions of the visible screen by name."""
        seen: set[str] = set()
        for _, binding, enabled, tooltip in screen.active_bindings.values():
            if binding.action in seen or not enabled or not binding.tooltip or binding.action == "command_palette":
                continue
            seen.add(binding.action)
            sign = format_key(binding.key)  # "?" of question_mark
            name = sign if len(sign) == 1 and sign.isascii() else binding.key
            action = binding.action if "." in binding.action else f"screen.{binding.action}"
            yield SystemCommand(
                f"{binding.description}  ({name})", tooltip or binding.tooltip, lambda a=action: self._do(a)
            )

    def _do(self, action: str) -> None:
        self.call_later(self.run_action, action)

    def action_detach(self) -> None:
        """Leave the app; the run continues."""
        self.exit()

    def action_redraw(self) -> None:
        """Draw everything again, as after another program has written to the terminal."""
        self.output.forget()
        self.refresh(layout=True)

    def action_theme(self) -> None:
        """Switch between light and dark."""
        before = self.app_state.theme
        palette = LIGHT if before.palette.dark else DARK
        self.app_state.theme = Theme(palette, before.glyphs, before.color)
        self.theme = palette.name
        self.repaint()
