"""The app that explores memory snapshots: the look of the monitor, and one screen."""

import os
from collections.abc import Iterable
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ....protocol.snapshot.replay import Replay
from ...model.snapshot_explorer import Explorer, spare_the_collector
from ...themes import PALETTES, theme_of
from ...widgets.glyphs import ASCII, choose
from ...widgets.look import Look
from ...widgets.palette import DARK, LIGHT
from ...widgets.stage import Stage
from .help import SnapshotHelp
from .screen import SnapshotScreen

_MESSAGES_A_SECOND = 2


class SnapshotApp(App[None]):
    """The explorer of one snapshot, or of the difference of two.

    Args:
        replays: the devices of the snapshot.
        before: those of an earlier one to compare it with.
        ascii: draw with ASCII only, whatever the locale.
        light: begin with the light theme.
    """

    CSS_PATH = "../../ftmon.tcss"
    TITLE = "ftmon snapshot"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "detach", "leave", show=False, tooltip="leave")]

    def __init__(
        self,
        replays: list[Replay],
        before: list[Replay] | None = None,
        *,
        ascii: bool = False,  # noqa: A002  (the name of the option)
        light: bool = False,
    ) -> None:
        no_color = bool(os.environ.get("NO_COLOR"))
        super().__init__(ansi_color=True if no_color else None)
        for palette in PALETTES.values():
            self.register_theme(theme_of(palette))
        look = Look(LIGHT if light else DARK, ASCII if ascii else choose(False), color=not no_color)
        self.stage = Stage(None, look)
        self.explorer = Explorer(replays, before)
        self.theme = look.palette.name

    def get_default_screen(self) -> Screen[Any]:
        """Give the one screen."""
        return SnapshotScreen(self.stage, self.explorer)

    def on_mount(self) -> None:
        """Let messages at the foot go after a while."""
        self.set_interval(1 / _MESSAGES_A_SECOND, self._tick)

    def _tick(self) -> None:
        if isinstance(self.screen, SnapshotScreen):
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
        before = self.stage.look
        palette = LIGHT if before.palette.dark else DARK
        self.stage.look = Look(palette, before.glyphs, before.color)
        self.theme = palette.name
        self._tick()

    def action_help(self) -> None:
        """Explain the screen."""
        if isinstance(self.screen, SnapshotScreen):
            self.push_screen(SnapshotHelp(self.stage, self.screen))


def run_explorer(replays: list[Replay], before: list[Replay] | None = None, *, ascii_only: bool = False) -> None:
    """Explore until the person leaves."""
    spare_the_collector()
    SnapshotApp(replays, before, ascii=ascii_only).run()
