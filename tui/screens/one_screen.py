"""An app with the look of the monitor and one screen."""

from typing import ClassVar

from .base import MonitorScreen
from .help import HelpScreen
from .themed_app import ThemedApp

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
