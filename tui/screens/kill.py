"""The dialog that ends ranks or the run: targets, signal, consequences, then the outcome. The default is no."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from ...protocol.messages.verbs import Kill
from ..source.base import CommandRecord
from ..widgets.drawing.line import Line
from ..widgets.state.app_state import AppState
from .command_answers import answer_lines, button_line
from .command_dialog import CommandDialog
from .kill_targets import Targets, signal_line, target_line, what_follows

SIGNALS = ("", "INT", "TERM", "KILL")
"""Signals to choose from; empty escalates: INT, then TERM, then KILL."""

_LISTED = 6
"""Number of visible targets."""


class KillDialog(CommandDialog):
    """Selects targets and a signal, then no or yes; ``marked`` are the initially marked ranks.

    The cursor is on a target (the run, then each rank), the signal, or the buttons. It starts on the buttons, with
    ``No`` selected. Only ``Yes`` sends the command, and only while a target is marked.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", tooltip="the target above"),
        Binding("down,j,tab", "move(1)", "down", tooltip="the target below, the signal, the answer"),
        Binding("pageup", "move(-6)", "page up", tooltip="six targets up"),
        Binding("pagedown", "move(6)", "page down", tooltip="six targets down"),
        Binding("left", "turn(-1)", "left", tooltip="another signal, or the other answer"),
        Binding("right", "turn(1)", "right", tooltip="another signal, or the other answer"),
        Binding("space", "mark", "mark", tooltip="mark or unmark a target"),
        Binding("a", "all", "whole run", tooltip="mark the whole run"),
        Binding("y", "yes", "yes", tooltip="end what is marked"),
        Binding("q", "leave", "leave", tooltip="close; once the kill is under way, detach"),
    ]
    WIDTH = 78

    def __init__(self, app_state: AppState, marked: set[int]) -> None:
        super().__init__(app_state)
        self.targets = Targets.of(app_state.model, marked)
        self.cursor = self.buttons
        self.signal = 0
        self.top = 0

    @property
    def buttons(self) -> int:
        """The cursor's position on the buttons."""
        return len(self.targets.ranks) + 2

    def command(self) -> Kill | None:
        if not self.targets.any:
            self.app_state.show_message("nothing is marked: space marks a rank, a the whole run", "warning")
            return None
        self.targets.remember(self.app_state.model)
        return Kill(self.targets.chosen, SIGNALS[self.signal])

    def lines(self, width: int, height: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        dim = theme.style("dim")
        name = model.info.name or model.info.id or "the run"
        head = [Line(f"Kill: {name}", theme.style("text", bold=True)), Line()]
        if self.record is not None:
            return [*head, *self._progress(self.record, width)]
        rows = range(len(self.targets.ranks) + 1)
        marked_row = self.cursor if self.cursor in rows else self._first_marked()
        self.top = max(marked_row - _LISTED + 1, min(self.top, marked_row))
        self.top = max(0, min(self.top, len(rows) - _LISTED))
        shown = rows[self.top : self.top + _LISTED]
        lines = [target_line(self.targets, index, model, width, theme, index == self.cursor) for index in shown]
        if len(rows) > len(shown):
            lines.append(Line(f"    {self.targets.words}; {len(rows) - 1} ranks, up and down scroll", dim))
        lines += [Line(), signal_line(SIGNALS[self.signal], self.cursor == self.buttons - 1, theme), Line()]
        lines += what_follows(self.targets, model, SIGNALS[self.signal], width, theme)
        lines += [Line(), button_line("No", f"Yes, kill {self.targets.words}", self.yes, theme)]
        lines.append(Line("  arrows: choose   space: mark   a: the whole run   escape: no", dim))
        return [*head, *lines]

    def _first_marked(self) -> int:
        return 0 if self.targets.whole or not self.targets.marked else self.targets.first_marked + 1

    def _progress(self, record: CommandRecord, width: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        lines = [Line(f"killing {self.targets.words}", theme.base), *answer_lines(record, model, width, theme), Line()]
        lines += self.targets.aftermath(model, width, theme)
        word = "escape: close" if record.done else "escape: close (the kill continues)"
        return [*lines, Line(), Line(word, theme.style("dim"))]

    def action_move(self, delta: int) -> None:
        self.cursor = max(0, min(self.cursor + delta, self.buttons))
        self.paint()

    def action_turn(self, direction: int) -> None:
        if self.cursor == self.buttons:
            self.yes = direction > 0
        elif self.cursor == self.buttons - 1:
            self.signal = (self.signal + direction) % len(SIGNALS)
        self.paint()

    def action_mark(self) -> None:
        if self.cursor < self.buttons - 1 and not self.sent:
            self.targets.toggle(self.cursor)
            self.paint()

    def action_all(self) -> None:
        if not self.sent:
            self.targets.whole = True
            self.paint()

    def action_answer(self) -> None:
        """On a target, mark it; on the buttons, close or kill."""
        if self.sent:
            self.dismiss(None)
        elif self.cursor < self.buttons - 1:
            self.action_mark()
        elif self.cursor == self.buttons - 1:
            self.action_move(1)
        elif self.yes:
            self.action_yes()
        else:
            self.dismiss(None)
