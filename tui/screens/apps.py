"""Base of the monitor and of apps with one screen: themes, and the visible screen's actions by name."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.driver import Driver
from textual.events import Resize
from textual.screen import Screen
from textual.theme import Theme as AppTheme

from ..source.base import Source
from ..widgets.base import key_name
from ..widgets.drawing import ASCII, choose
from ..widgets.screen_output import ScreenOutput
from ..widgets.state import AppState
from ..widgets.theme import DARK, LIGHT, Palette, Theme
from .base import HelpScreen, MonitorScreen


def ordered_commands() -> "type[Provider]":
    """Return the palette's provider: commands in the order of ``get_system_commands``; Textual's sorts them by name."""
    from textual.command import DiscoveryHit, Hits  # only once the palette opens
    from textual.system_commands import SystemCommandsProvider

    class OrderedCommands(SystemCommandsProvider):
        async def discover(self) -> Hits:
            for title, help_text, callback, _ in self.app.get_system_commands(self.screen):
                yield DiscoveryHit(title, callback, help=help_text)

    return OrderedCommands


SCREENS = ("open", "training", "alerts", "memory", "logs", "stacks", "events", "oom", "jobs", "runs", "help")
"""Actions that open a screen, in the palette's order."""

ENDS = ("kill", "stop")

LAST = ("theme", "suspend_process", "redraw", "detach")


def palette_place(action: str) -> tuple[int, int]:
    """Return the place of an action in the palette: screens, ends of the run, what the screen does, the app itself."""
    name = action.removeprefix("app.")
    for group, names in ((0, SCREENS), (1, ENDS), (3, LAST)):
        if action.startswith("app.") and name in names:
            return group, names.index(name)
    return 2, 0


def _app_theme(palette: Palette) -> AppTheme:
    return AppTheme(
        name=palette.name,
        primary=palette.accent,
        secondary=palette.dim,
        accent=palette.accent,
        foreground=palette.text,
        background=palette.background,
        surface=palette.background,
        panel=palette.raised,
        success=palette.good,
        warning=palette.warning,
        error=palette.error,
        dark=palette.dark,
    )


class ThemedApp(App[None]):
    """An app in a light and a dark theme.

    ``ascii``: ASCII only, regardless of the locale. ``read_only``: refuse all commands to the run.
    """

    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ordered_commands}
    CSS_PATH = Path(__file__).parent.parent / "ftmon.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "detach", "detach", show=False, tooltip="leave"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding(
            "ctrl+z", "suspend_process", "suspend", show=False, priority=True, tooltip="back to the shell; fg returns"
        ),
    ]

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
        for palette in (DARK, LIGHT):
            self.register_theme(_app_theme(palette))
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
                with contextlib.suppress(OSError):
                    output.size = os.get_terminal_size(sys.__stderr__.fileno()) if sys.__stderr__ else None
                super().write(output.rewrite(data))

        return ChangedCellsDriver

    def on_resize(self, event: Resize) -> None:
        """Draw everything again: a terminal's own change is not known. This event also follows a suspension."""
        self.action_redraw()

    def repaint(self) -> None:
        raise NotImplementedError

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the actions of the visible screen: other screens first, then what ends the run, then the rest."""
        seen: set[str] = set()
        found = sorted(screen.active_bindings.values(), key=lambda active: palette_place(active.binding.action))
        for _, binding, enabled, tooltip in found:
            if binding.action in seen or not enabled or not binding.tooltip or binding.action == "command_palette":
                continue
            seen.add(binding.action)
            action = binding.action if "." in binding.action else f"screen.{binding.action}"
            title, run = (
                f"{binding.description}  ({key_name(binding.key)})",
                partial(self.call_later, self.run_action, action),
            )
            yield SystemCommand(title, tooltip or binding.tooltip, run)

    def action_detach(self) -> None:
        self.exit()

    def action_redraw(self) -> None:
        """Draw everything again, as after another program has written to the terminal."""
        self.output.forget()
        self.refresh(layout=True)

    def interrupt_words(self) -> str:
        """Return the answer to ctrl+c, which does not end the app."""
        return "q leaves"

    def action_interrupt(self) -> None:
        """Show how to leave: ctrl+c would often be meant for the training."""
        self.app_state.show_message(self.interrupt_words(), "warning")
        self.repaint()

    def action_suspend_process(self) -> None:
        """Stop this process group as ctrl+z does outside of the app; the shell's fg continues it."""
        if not has_job_control():
            self.app_state.show_message("ctrl+z: there is no shell to return to; q leaves", "warning")
            self.repaint()
        elif self._driver is not None and self._driver.can_suspend:
            self._suspend_signal()
            os.killpg(0, signal.SIGTSTP)  # the group, as a wrapper such as env or uv may be the shell's job

    def action_theme(self) -> None:
        before = self.app_state.theme
        palette = LIGHT if before.palette.dark else DARK
        self.app_state.theme = Theme(palette, before.glyphs, before.color)
        self.theme = palette.name
        self.repaint()


def has_job_control() -> bool:
    """Return whether a shell of this session would continue this process group: it is another group's child."""
    if sys.platform == "win32":
        return False
    import psutil

    try:
        group, session = os.getpgrp(), os.getsid(0)
        process = psutil.Process()
        while (parent := process.parent()) is not None and os.getpgid(parent.pid) == group:
            process = parent
        return parent is not None and os.getsid(parent.pid) == session
    except (psutil.Error, OSError):
        return False


_TICKS_A_SECOND = 2


class OneScreenApp(ThemedApp):
    """Shows ``MAIN_SCREEN``, which ``get_default_screen`` makes; ``HELP_SCREEN`` is its help."""

    MAIN_SCREEN: ClassVar[type[MonitorScreen]]
    HELP_SCREEN: ClassVar[type[HelpScreen]]

    def on_mount(self) -> None:
        self.set_interval(1 / _TICKS_A_SECOND, self.repaint)

    def repaint(self) -> None:
        # A closing app removes its screens before its timers.
        if self.is_running and isinstance(self.screen, self.MAIN_SCREEN):
            self.screen.tick()

    def action_help(self) -> None:
        if isinstance(self.screen, self.MAIN_SCREEN):
            self.push_screen(self.HELP_SCREEN(self.app_state, self.screen))
