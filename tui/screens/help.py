"""Help: the visible screen in a few sentences, its signs, and its keys."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from ..widgets.base.panes import key_words
from ..widgets.drawing.line import Line
from ..widgets.legend import LEGENDS
from ..widgets.lines.alert_lines import wrap
from ..widgets.state.app_state import AppState
from .base import MonitorScreen
from .dialog import Dialog


class HelpScreen(Dialog):
    """Explains the screen behind it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "close", "close", tooltip="close help"),
        Binding("down,j,space,pagedown", "scroll(1)", "more", tooltip="further down"),
        Binding("up,k,pageup", "scroll(-1)", "back", tooltip="further up"),
    ]
    WIDTH = 96

    def __init__(self, app_state: AppState, behind: MonitorScreen) -> None:
        super().__init__(app_state)
        self.behind = behind
        self.top = 0

    def content(self, width: int) -> list[Line]:
        """Return all lines."""
        theme = self.theme
        lines = [Line(f"{self.behind.NAME}", theme.style("accent", bold=True)), Line()]
        lines += [Line(row, theme.base) for row in wrap(self.behind.WHAT, width - 2)]
        for part in self.behind.LEGEND:
            lines += [Line(), *LEGENDS[part](theme)]
        lines += [Line(), Line("keys", theme.style("accent", bold=True))]
        for binding in self._bindings_of_behind():
            keys = key_words(binding, theme)
            line = Line(f"  {keys:<12}", theme.style("text", bold=True))
            lines.append(line.add(binding.tooltip or binding.description, theme.style("dim")))
        return lines

    def _bindings_of_behind(self) -> list[Binding]:
        own = [binding for binding in type(self.behind).BINDINGS if isinstance(binding, Binding)]
        inherited = MonitorScreen.BINDINGS if self.behind.inherits_keys else []
        common = [binding for binding in inherited if isinstance(binding, Binding)]
        actions, keys = {each.action for each in own}, {each for binding in own for each in binding.key.split(",")}
        return [*own, *(each for each in common if each.action not in actions and each.key not in keys)]

    def lines(self, width: int, height: int) -> list[Line]:
        """Draw the visible part, and the keys that show the rest."""
        content = self.content(width)
        if len(content) <= height:
            return content
        room = height - 1
        self.top = max(0, min(self.top, len(content) - room))
        at = f"{self.top + 1} to {min(len(content), self.top + room)} of {len(content)}"
        foot = Line(f"{at}   up, down: scroll   escape: close", self.theme.style("dim"))
        return [*content[self.top : self.top + room], foot]

    def action_scroll(self, direction: int) -> None:
        self.top += direction * max(1, self.panel.size.height // 2)
        self.panel.tick(force=True)
