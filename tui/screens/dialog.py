"""Base of dialogs: a panel in the middle, drawn line by line, that closes with escape."""

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import ModalScreen

from ..widgets.base.canvas import Canvas
from ..widgets.drawing.line import Line
from ..widgets.drawing.theme import Theme
from ..widgets.state.app_state import AppState


class Panel(Canvas):
    """Draws the text of its dialog."""

    def draw(self, width: int, height: int) -> list[Line]:
        dialog = self.screen
        assert isinstance(dialog, Dialog)
        return dialog.lines(width, height)


class Dialog(ModalScreen[Any]):
    """A question over the screen behind it. A subclass defines its lines, its size, and its keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close", tooltip="do nothing")]
    WIDTH = 76

    def __init__(self, app_state: AppState) -> None:
        super().__init__()
        self.app_state = app_state
        self.panel = Panel(app_state, name="panel", classes="dialog")

    @property
    def theme(self) -> Theme:
        """The current palette and glyphs."""
        return self.app_state.theme

    def compose(self) -> ComposeResult:
        """Return the panel."""
        yield self.panel

    def lines(self, width: int, height: int) -> list[Line]:
        """Draw the dialog."""
        raise NotImplementedError

    def wanted_height(self) -> int:
        """Return the number of lines that the dialog needs."""
        return len(self.lines(self.inner_width, 1000))

    @property
    def inner_width(self) -> int:
        """Cells of a line inside the frame."""
        return min(self.WIDTH, self.app.size.width - 2) - 4

    def fit(self) -> None:
        """Set the panel to the size of its content, within the terminal."""
        styles = self.panel.styles
        if self.theme.glyphs.is_ascii:
            styles.border = ("ascii", self.theme.tone("accent"))
        styles.width = self.inner_width + 4
        styles.height = min(self.wanted_height() + 2, self.app.size.height)

    def on_mount(self) -> None:
        """Lay out and paint."""
        self.fit()

    def on_resize(self, event: Resize) -> None:
        """Lay out again."""
        self.fit()

    def tick(self) -> None:
        """Paint changes."""
        self.panel.tick()

    def action_leave(self) -> None:
        """Close the dialog; while a command is under way leave the app, which does not end the command."""
        if getattr(self, "sent", ""):
            self.app.exit()
        else:
            self.dismiss(None)

    def action_close(self) -> None:
        """Close."""
        self.dismiss(None)
