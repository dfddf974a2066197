"""Base class of the widgets: paints lines, and refreshes only lines that changed since the last paint."""

from typing import Any

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ..drawing.line import Line
from ..drawing.theme import Theme
from ..state.app_state import AppState


class Canvas(Widget, can_focus=False):
    """A widget that draws ``Line``s.

    A subclass defines ``draw`` (the lines, at most as many as the widget is high) and optionally ``key`` (a small value
    that changes whenever the drawing would). While the key is equal, ``tick`` costs one comparison. Textual sends all
    of a dirty region without comparing cells, so this class compares lines to limit the output to the terminal.
    """

    ALLOW_SELECT = False
    _lines: list[Line]
    _strips: list[Strip]
    _last_key: Any = None

    def __init__(self, app_state: AppState, name: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=name, classes=classes)
        self.app_state = app_state
        self._lines = []
        self._strips = []

    @property
    def theme(self) -> Theme:
        """The current palette and glyphs."""
        return self.app_state.theme

    def key(self) -> Any:
        """Return a value that changes whenever the drawing would; None: always draw."""
        return None

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the lines, top to bottom, each at most ``width`` cells wide."""
        raise NotImplementedError

    def tick(self, force: bool = False) -> None:
        """Draw again if the key changed, and refresh the lines that differ."""
        width, height = self.size
        if not width or not height or not self.is_mounted:
            return
        key = (self.key(), width, height, id(self.theme))
        if not force and key[0] is not None and key == self._last_key:
            return
        self._last_key = key
        before = self._lines if len(self._lines) == height else []
        base = self.theme.base
        try:
            lines = [line.fit(width, base) for line in self.draw(width, height)[:height]]
        except (ArithmeticError, ValueError, OSError) as error:
            # A recording may contain figures outside any calendar or graph; the other widgets are still drawn.
            lines = [Line(f" cannot be drawn: {type(error).__name__}: {error}", base).fit(width, base)]
        lines.extend(Line(" " * width, base) for _ in range(height - len(lines)))
        if not before or self._strips[0].cell_length != width:
            self._strips = [line.strip() for line in lines]
            self._lines = lines
            self.refresh()
            return
        changed: list[Region] = []
        for y, (old, new) in enumerate(zip(before, lines, strict=True)):
            if old.parts != new.parts:
                self._strips[y] = new.strip()
                changed.append(Region(*_changed_span(old, new, y, width)))
        self._lines = lines
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Return one line for Textual."""
        if y < len(self._strips) and self._strips[y].cell_length == self.size.width:
            return self._strips[y]
        return Strip.blank(self.size.width, self.theme.base)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.tick(force=True)

    def watch_has_focus(self, has_focus: bool) -> None:
        """Show or hide the cursor."""
        super().watch_has_focus(has_focus)
        self.tick(force=True)

    @property
    def plain(self) -> str:
        """The present drawing as text."""
        return "\n".join(line.plain.rstrip() for line in self._lines)


def _changed_span(old: Line, new: Line, y: int, width: int) -> tuple[int, int, int, int]:
    """Return the region of a changed line to send: x, y, width, height.

    Textual sends a partial line from its left end, so only an unchanged right end can be omitted. A line with wide
    characters, where cells and characters differ, is sent whole.
    """
    if sum(len(text) for text, _ in new.parts) != width:
        return 0, y, width, 1
    last = width
    for old_part, new_part in zip(reversed(old.parts), reversed(new.parts), strict=False):
        if old_part != new_part:
            break
        last -= len(new_part[0])
    return 0, y, max(1, last), 1
