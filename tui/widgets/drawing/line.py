"""Builds screen lines from styled pieces, measured in cells, cut or padded to a width."""

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from ....protocol.text import sanitize


def width_of(text: str) -> int:
    """Return the width of text in terminal cells."""
    return len(text) if text.isascii() else cell_len(text)


def cut(text: str, width: int, ellipsis: str = "…") -> str:
    """Return text cut to at most ``width`` cells, with an ellipsis at the end if it is cut."""
    if width <= 0:
        return ""
    if width_of(text) <= width:
        return text
    return set_cell_size(text, width - width_of(ellipsis)).rstrip() + ellipsis


def tail(text: str, width: int) -> str:
    """Return the end of a text, at most ``width`` cells."""
    text = text[-width:] if width > 0 else ""
    while width_of(text) > width:
        text = text[1:]
    return text


def fitting(parts: Iterable[str], gap: str, width: int) -> str:
    """Return as many of the first parts as fit in ``width`` cells, joined."""
    joined = ""
    for part in parts:
        longer = joined + gap + part if joined else part
        if width_of(longer) > width:
            break
        joined = longer
    return joined


class Line:
    """A line under construction. Adjacent pieces of one style become one segment."""

    __slots__ = ("parts", "width")

    def __init__(self, text: str = "", style: Style | None = None) -> None:
        self.parts: list[tuple[str, Style]] = []
        self.width = 0
        if text and style is not None:
            self.add(text, style)

    def add(self, text: str, style: Style) -> "Line":
        """Append text without its control characters."""
        if text:
            if not text.isprintable():
                text = sanitize(text)
            if self.parts and self.parts[-1][1] is style:
                self.parts[-1] = (self.parts[-1][0] + text, style)
            else:
                self.parts.append((text, style))
            self.width += width_of(text)
        return self

    def join(self, other: "Line") -> "Line":
        """Append another line's pieces."""
        for text, style in other.parts:
            self.add(text, style)
        return self

    def pad(self, width: int, style: Style) -> "Line":
        """Append blanks up to ``width`` cells."""
        if self.width < width:
            self.add(" " * (width - self.width), style)
        return self

    def fit(self, width: int, style: Style) -> "Line":
        """Make the line exactly ``width`` cells: padded with ``style``, or cut."""
        if self.width > width:
            parts, self.parts, self.width = self.parts, [], 0
            for text, piece_style in parts:
                room = width - self.width
                if room <= 0:
                    break
                self.add(text if width_of(text) <= room else set_cell_size(text, room), piece_style)
        return self.pad(width, style)

    @property
    def plain(self) -> str:
        """The text without styles."""
        return "".join(text for text, _ in self.parts)

    def strip(self) -> Strip:
        """Return the line as Textual's strip."""
        return Strip([Segment(text, style) for text, style in self.parts], self.width)


def spread(left: Line, right: Line, width: int, style: Style) -> Line:
    """Return a line of ``width`` cells with lines at its ends; the left one is cut if both do not fit."""
    room = width - right.width
    if room < 1:
        return left.fit(width, style)
    return left.fit(room, style).join(right)


def beside(lines: Iterable[Line], gap: str, style: Style) -> Line:
    """Return the non-empty lines joined with a gap."""
    joined = Line()
    for line in lines:
        if line.width:
            if joined.width:
                joined.add(gap, style)
            joined.join(line)
    return joined
