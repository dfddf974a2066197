"""The input line of a console, continued over several lines as in Python, with a history."""

from dataclasses import dataclass

from textual.events import Key, Paste
from textual.message import Message

from ...model.console import ConsoleSession, is_complete
from ..base.canvas import Canvas
from ..drawing.line import Line, cut, tail, width_of
from ..state.app_state import AppState


class ConsoleInput(Canvas, can_focus=True):
    """Edits one piece of code. Enter posts ``Entered`` once the code is complete; escape posts ``Left``."""

    @dataclass
    class Entered(Message):
        """Code is to be run."""

        code: str

    class Left(Message):
        """Escape was pressed."""

    @dataclass
    class Scrolled(Message):
        """A page key was pressed."""

        direction: int

    def __init__(self, app_state: AppState, name: str) -> None:
        super().__init__(app_state, name=name)
        self.session: ConsoleSession | None = None
        self.before = ""
        """Earlier lines of incomplete code; each ends with a newline."""
        self.text = ""
        self.cursor = 0

    def key(self) -> object:
        return self.before, self.text, self.cursor, self.has_focus

    def draw(self, width: int, height: int) -> list[Line]:
        theme = self.theme
        line = Line(" ... " if self.before else " >>> ", theme.style("accent", bold=True))
        room = max(4, width - line.width - 1)
        before = tail(self.text[: self.cursor], room - 2)
        after = cut(self.text[self.cursor : self.cursor + room], room - width_of(before), "")
        line.add(before, theme.base)
        if self.has_focus:
            line.add(after[:1] or " ", theme.style("background", "accent", reverse=not theme.color))
            line.add(after[1:], theme.base)
        else:
            line.add(after, theme.base)
            if not self.text:
                line.add("enter: type", theme.style("faint"))
        return [line]

    def on_key(self, event: Key) -> None:
        if event.key == "enter":
            self._enter()
        elif event.key == "escape":
            self.post_message(self.Left())
        elif event.key in ("up", "down") and self.session is not None:
            self._put(self.session.recall(-1 if event.key == "up" else 1, self.before + self.text))
        elif event.key in ("pageup", "pagedown"):
            self.post_message(self.Scrolled(-1 if event.key == "pageup" else 1))
        elif not self._edit(event):
            return
        event.stop()
        event.prevent_default()
        self.tick()

    def on_paste(self, event: Paste) -> None:
        """Insert pasted text; its whole lines become lines of the code."""
        event.stop()
        code = self.before + self.text[: self.cursor] + event.text.replace("\r\n", "\n").replace("\r", "\n")
        self._put("".join(each for each in code if each == "\n" or each.isprintable()) + self.text[self.cursor :])
        self.tick()

    def _put(self, code: str) -> None:
        """Edit this piece of code, starting with its last line."""
        before, newline, self.text = code.rpartition("\n")
        self.before = before + newline
        self.cursor = len(self.text)

    def _edit(self, event: Key) -> bool:
        text, at = self.text, self.cursor
        match event.key:
            case "left" | "ctrl+b":
                self.cursor = max(0, at - 1)
            case "right" | "ctrl+f":
                self.cursor = min(len(text), at + 1)
            case "home" | "ctrl+a":
                self.cursor = 0
            case "end" | "ctrl+e":
                self.cursor = len(text)
            case "backspace" | "ctrl+h" if at:
                self.text, self.cursor = text[: at - 1] + text[at:], at - 1
            case "backspace" | "ctrl+h" if self.before:
                self._put(self.before[:-1] + text)
                self.cursor = len(self.text) - len(text)
            case "backspace" | "ctrl+h":
                pass
            case "delete" | "ctrl+d":
                self.text = text[:at] + text[at + 1 :]
            case "ctrl+u":
                self.text, self.cursor = text[at:], 0
            case "ctrl+k":
                self.text = text[:at]
            case "ctrl+w":
                kept = text[:at].rstrip().rpartition(" ")
                self.text, self.cursor = kept[0] + kept[1] + text[at:], len(kept[0] + kept[1])
            case "tab":
                self.text, self.cursor = text[:at] + "    " + text[at:], at + 4
            case _ if event.is_printable and event.character:
                self.text = text[:at] + event.character + text[at:]
                self.cursor = at + len(event.character)
            case _:
                return False
        return True

    def _enter(self) -> None:
        code = self.before + self.text
        if not code.strip():
            self._put("")
        # As in Python's own console, an empty line ends a block.
        elif is_complete(code) or (self.before and not self.text.strip()):
            self._put("")
            self.post_message(self.Entered(code.rstrip("\n")))
        else:
            self._put(code + "\n")
