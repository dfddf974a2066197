"""Rewrites terminal output so that only changed cells are sent, and only ASCII if the terminal has nothing else.

Textual sends each dirty line from its left end, with a reset and both colours for every piece; of a graph's line, a few
cells differ. This class keeps the cells that the terminal shows, compares, and sends the differences with the shortest
change of position and style. Sequences that are neither text, position nor style pass through unchanged.
"""

import re
import sys
import unicodedata
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from rich.cells import get_character_cell_size

_TOKEN = re.compile(
    r"\x1b\[(?:(?P<row>\d+);(?P<column>\d+))?H"
    r"|\x1b\[(?P<style>[\d;]*)m"
    r"|(?P<text>[^\x00-\x1f\x7f]+)"
    r"|(?P<line>\r?\n)"
    r"|(?P<other>\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|[\x00-\x1f\x7f])"
)
_FORGETTING = re.compile(r"\x1b\[\?(?:1049|1047|47)[hl]|\x1b\[[0-3]?J|\x1bc")
"""Sequences after which the contents of the screen are another's, or unknown."""

_SHORT_GAP = 4  # unchanged cells between changed ones that cost less than moving the cursor

_CERTAIN = ((0x20, 0x7F), (0xA1, 0x530), (0x2010, 0x2028), (0x2190, 0x2194), (0x2500, 0x25FD), (0x2713, 0x2718),
            (0x2800, 0x2900))  # fmt: skip
"""Ranges of characters on whose width of one cell terminals agree; after others the cursor is set anew."""

_REPLACEMENTS = {
    **dict.fromkeys("─━┄┅┈┉╌╍═‐‑‒–—−▔▁▂⎯", "-"),
    **dict.fromkeys("│┃┆┇┊┋╎╏║▎▏▕▍▌", "|"),
    **dict.fromkeys("▃▄▅▆░▒", "="),
    **dict.fromkeys("▇█▉▊▋▓▀■▐", "#"),
    **dict.fromkeys("▸▶→»›", ">"),
    **dict.fromkeys("◂◀←«‹", "<"),
    **dict.fromkeys("▲△↑", "^"),
    **dict.fromkeys("▼▽↓", "v"),
    **dict.fromkeys("•●◉⚫", "*"),
    **dict.fromkeys("○◌◯", "o"),
    **dict.fromkeys("±≈…", "~"),
    **dict.fromkeys("‘’′", "'"),
    **dict.fromkeys("“”″", '"'),
    "·": "-", "×": "x", "✖": "X", "✗": "X", "✓": "v", "≤": "<", "≥": ">", "µ": "u", "°": "o", "↵": "<", "†": "+",
}  # fmt: skip
"""ASCII characters for frequent others; further ones become their base letter, box lines ``+``, the rest ``?``."""


class Style(NamedTuple):
    """Style of a cell as parameters of SGR: attributes such as ``1;4``, foreground and background; empty: default."""

    attributes: str = ""
    foreground: str = ""
    background: str = ""


Cell = tuple[str, Style]
"""A character with its combining ones (empty: the right half of a wide character), and its style."""

_PLAIN = Style()
_INVISIBLE_ON_BLANKS = {"", "1", "2", "3", "1;2", "1;3", "2;3"}
"""Attributes without a visible effect on a blank: bold, dim, italic."""


@lru_cache(4096)
def _styled(before: Style, parameters: str) -> Style:
    attributes, foreground, background = before
    rest = iter(parameters.split(";"))
    for one in rest:
        number = int(one or 0)
        if number == 0:
            attributes = foreground = background = ""
        elif number in (38, 48):
            kind = next(rest, "")
            color = ";".join([one, kind, *(next(rest, "0") for _ in range(3 if kind == "2" else 1))])
            foreground, background = (color, background) if number == 38 else (foreground, color)
        elif number in (39, 49):
            foreground, background = ("", background) if number == 39 else (foreground, "")
        elif 30 <= number <= 37 or 90 <= number <= 97:
            foreground = one
        elif 40 <= number <= 47 or 100 <= number <= 107:
            background = one
        else:
            attributes = f"{attributes};{one}".strip(";")
    return Style(attributes, foreground, background)


@lru_cache(4096)
def _change(before: Style, after: Style) -> str:
    if before == after:
        return ""
    if after == _PLAIN:
        return "\x1b[0m"
    if before.attributes != after.attributes:
        parts = [after.attributes] if not before.attributes else ["0", after.attributes]
        before = _PLAIN if before.attributes else before
    else:
        parts = []
    if before.foreground != after.foreground:
        parts.append(after.foreground or "39")
    if before.background != after.background:
        parts.append(after.background or "49")
    return f"\x1b[{';'.join(part for part in parts if part)}m"


@lru_cache(4096)
def ascii_character(character: str) -> str:
    """Return an ASCII character for another one of one cell."""
    if character.isascii():
        return character
    if character in _REPLACEMENTS:
        return _REPLACEMENTS[character]
    if "\u2500" <= character <= "\u257f":
        return "+"
    if "\u2800" <= character <= "\u28ff":
        return " " if character == "\u2800" else "."
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return base[:1] if base[:1].isprintable() and base else "?"


def _is_certain(character: str) -> bool:
    return len(character) == 1 and any(first <= ord(character) < end for first, end in _CERTAIN)


@lru_cache(1024)
def cells_of(text: str, style: Style, ascii_only: bool) -> list[Cell]:
    """Return the cells of a text, one for each column; the list is shared."""
    blank = (" ", style if style.attributes not in _INVISIBLE_ON_BLANKS else Style("", "", style.background))
    cells: list[Cell] = []
    for character in text:
        width = 1 if character.isascii() else get_character_cell_size(character)
        if character == " ":
            cells.append(blank)
        elif width == 0:
            if cells and not ascii_only:  # a combining character
                cells[-1] = cells[-1][0] + character, cells[-1][1]
        else:
            cells.append((ascii_character(character) if ascii_only else character, style))
            cells += [("?" if ascii_only else "", style)] * (width - 1)
    return cells


class ScreenOutput:
    """The cells that a terminal shows, and the output that changes them; ``ascii_only``: send nothing but ASCII."""

    def __init__(self, ascii_only: bool = False) -> None:
        self.ascii_only = ascii_only
        self.size: tuple[int, int] | None = None
        """Columns and lines of the terminal, which draws what is beyond them in its last cells; None: no limit."""
        self._shown: dict[int, list[Cell | None]] = {}
        """Cells by row, from 0; None: unknown, as are missing rows and columns."""
        self._cursor: tuple[int, int] | None = None  # row and column of the terminal's cursor; None: unknown

    def forget(self) -> None:
        """Assume nothing about what the terminal shows: everything is sent again when it is next drawn."""
        self._shown.clear()
        self._cursor = None

    def rewrite(self, data: str) -> str:
        """Return output with the same effect on the screen as ``data``, which starts with the default style."""
        out: list[str] = []
        drawn: dict[int, dict[int, Cell]] = {}
        row, column = self._cursor or (0, 0)
        style, placed = _PLAIN, False
        for token in _TOKEN.finditer(data):
            kind = token.lastgroup
            if kind == "text":
                cells = cells_of(token["text"], style, self.ascii_only)
                if row in drawn or self._shown.get(row, [])[column : column + len(cells)] != cells:
                    drawn.setdefault(row, {}).update(zip(count(column), cells))
                column, placed = column + len(cells), False
            elif kind == "style":
                style = _styled(style, token["style"])
            elif kind == "line":
                row, column, placed = row + 1, 0, False
            elif kind == "other":
                self._send(drawn, out)
                out.append(self._passed_on(token["other"]))
            else:
                row, column, placed = int(token["row"] or 1) - 1, int(token["column"] or 1) - 1, True
        self._send(drawn, out)
        if placed and self._cursor != (row, column):
            self._cursor = row, column
            out.append(f"\x1b[{row + 1};{column + 1}H")
        return "".join(out)

    def _passed_on(self, sequence: str) -> str:
        if _FORGETTING.fullmatch(sequence):
            self.forget()
        return sequence.encode("ascii", "replace").decode() if self.ascii_only else sequence

    def _send(self, drawn: dict[int, dict[int, Cell]], out: list[str]) -> None:
        style = _PLAIN
        columns, lines = self.size or (sys.maxsize, sys.maxsize)
        for row in sorted(row for row in drawn if row < lines):
            shown, cells = self._shown.setdefault(row, []), drawn[row]
            shown += [None] * (min(columns, max(cells) + 1) - len(shown))
            for column in sorted(at for at, cell in cells.items() if at < columns and shown[at] != cell):
                character, wanted = shown[column] = cells[column]
                if not character:
                    continue  # drawn with the character before it
                self._go(row, column, shown, style, out)
                if character == " " and style.attributes in _INVISIBLE_ON_BLANKS and not wanted.attributes:
                    wanted = Style(style.attributes, style.foreground, wanted.background)
                out += (_change(style, wanted), character)
                style = wanted
                self._cursor = (row, column + 1) if _is_certain(character) else None
        if style != _PLAIN:
            out.append("\x1b[0m")
        drawn.clear()

    def _go(self, row: int, column: int, shown: list[Cell | None], style: Style, out: list[str]) -> None:
        if self._cursor == (row, column):
            return
        if self._cursor is None or self._cursor[0] != row or self._cursor[1] > column:
            out.append(f"\x1b[{row + 1};{column + 1}H")
        else:
            gap = shown[self._cursor[1] : column]
            same = all(cell is not None and _is_certain(cell[0]) and _fits(cell, style) for cell in gap)
            if same and len(gap) <= _SHORT_GAP:
                out += [cell[0] for cell in gap if cell is not None]
            else:
                out.append(f"\x1b[{len(gap)}C" if len(gap) > 1 else "\x1b[C")
        self._cursor = row, column


def _fits(cell: Cell, style: Style) -> bool:
    if cell[0] == " " and style.attributes in _INVISIBLE_ON_BLANKS and not cell[1].attributes:
        return cell[1].background == style.background
    return cell[1] == style
