"""An input line, for the filter after ``/`` and for the position to go to."""

from dataclasses import dataclass

from textual.events import Key
from textual.message import Message

from ..drawing.line import Line, tail
from ..state.app_state import AppState
from .canvas import Canvas


class Prompt(Canvas, can_focus=True):
    """One editable line. Enter and escape post ``Done``; every change posts ``Changed``."""

    @dataclass
    class Changed(Message):
        """The text changed."""

        text: str

    @dataclass
    class Done(Message):
        """Enter (``accepted``) or escape was pressed."""

        text: str
        accepted: bool

    def __init__(self, app_state: AppState, label: str, hint: str = "", name: str | None = None) -> None:
        super().__init__(app_state, name=name)
        self.label, self.hint = label, hint
        self.text = ""

    def key(self) -> object:
        return self.text, self.has_focus

    def draw(self, width: int, height: int) -> list[Line]:
        theme = self.theme
        line = Line(f" {self.label} ", theme.style("accent", bold=True))
        room = max(1, width - line.width - 2)
        line.add(tail(self.text, room), theme.base)
        if self.has_focus:
            line.add(" ", theme.style("background", "accent", reverse=not theme.color))
        if not self.text and self.hint:
            line.add(f" {self.hint}", theme.style("faint"))
        return [line]

    def on_key(self, event: Key) -> None:
        if event.key in ("enter", "escape"):
            self._consume(event)
            self.post_message(self.Done(self.text, event.key == "enter"))
            return
        if event.key in ("backspace", "ctrl+h"):
            changed = self.text[:-1]
        elif event.key in ("ctrl+u", "ctrl+w"):
            changed = ""
        elif event.is_printable and event.character:
            changed = self.text + event.character
        else:
            return
        self._consume(event)
        self.text = changed
        self.tick()
        self.post_message(self.Changed(self.text))

    @staticmethod
    def _consume(event: Key) -> None:
        event.stop()
        event.prevent_default()
