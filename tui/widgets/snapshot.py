"""Draws the timeline of a memory snapshot, and the list of the selected view below it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ...protocol import text
from ...protocol.analysis.allocator.snapshot_layout import Piece
from ...protocol.snapshot.columns import FREE, PENDING
from ...protocol.text import duration, sanitize
from ..model.snapshot import Explorer, Row, rows_of
from .base import Canvas, Listing
from .drawing import Line, beside, gib, ruled, spread
from .plots import Column, Scale, band_row, memory_graph
from .state import AppState, nice_top

_TITLES = {
    "stacks": ("1 live stacks", "1 stacks"),
    "blocks": ("2 largest blocks", "2 blocks"),
    "between": ("3 between marks", "3 between"),
    "segments": ("4 segments", "4 segments"),
    "report": ("5 report", "5 report"),
    "difference": ("6 difference", "6 diff"),
}


class SnapshotList(Listing[Row]):
    """The rows of one view, with a selection."""

    empty = "nothing is live here"

    def __init__(self, app_state: AppState, explorer: Explorer, name: str) -> None:
        super().__init__(app_state, name=name)
        self.explorer = explorer
        self._rows: Sequence[Row] = []
        self._made_of: object = None

    def key(self) -> object:
        return self.explorer.choices, self.selected, self.top

    def items(self) -> Sequence[Row]:
        made_of = (self.explorer.choices, self.size.width)
        if made_of != self._made_of:
            self._made_of = made_of
            self._rows = rows_of(self.explorer, self.size.width)
        return self._rows

    def head(self, width: int) -> list[Line]:
        theme, explorer = self.theme, self.explorer
        left = Line()
        for view in explorer.views:
            chosen = view == explorer.view
            style = theme.style("accent" if chosen else "dim", bold=chosen, reverse=chosen and not theme.color)
            left.add(f" {_TITLES[view][width < 100]} ", style)
        right = Line()
        if explorer.find:
            right.add(f" with {explorer.find!r}", theme.style("accent"))
        if explorer.view == "stacks":
            right.add(" libraries folded " if explorer.fold else " all frames ", theme.style("dim"))
        return [ruled(left, right, width, theme)]

    def item(self, item: Row, width: int, selected: bool) -> Line:
        row, theme = item, self.theme
        ground = "raised" if selected else "background"
        line = Line(theme.glyphs.selected if selected else " ", theme.style("accent", ground))
        if row.piece is not None:
            self._segment(row, row.piece, line, width, ground)
        else:
            self._figures(row, line, ground)
            line.add("  " * row.depth, theme.style("text", ground))
            if row.branch:
                line.add("- " if row.shown else "+ ", theme.style("accent", ground))
            elif row.path:
                line.add("  ", theme.style("text", ground))
            tone = "accent" if row.head and row.tone == "text" else row.tone
            words = theme.cut(row.words, width - line.width)
            line.add(words, theme.style(tone, ground, bold=row.head))
        return line.fit(width, theme.style("text", ground))

    def _figures(self, row: Row, line: Line, ground: str) -> None:
        theme = self.theme
        if row.size is None:
            return
        sign = "+" if row.signed and row.size > 0 else ""
        tone = "text" if not row.signed or not row.size else "warning" if row.size > 0 else "good"
        line.add(f"{sign + text.gib(row.size):>12} ", theme.style(tone, ground, bold=row.head))
        if not row.signed and row.share:
            line.add(f"{row.share * 100:>4.0f} % ", theme.style("dim", ground))
        line.add(f"{row.blocks:>6,}  " if row.blocks else " " * 8, theme.style("dim", ground))

    def _segment(self, row: Row, piece: Piece, line: Line, width: int, ground: str) -> None:
        theme = self.theme
        taken = 1 - piece.free_bytes / piece.size if piece.size else 0.0
        line.add(f"{text.gib(piece.size):>10} {taken * 100:>3.0f} %{row.blocks:>5,} ", theme.style("text", ground))
        words = f" {row.words}"
        room = max(10, width - line.width - max(16, min(34, len(words))))
        self._map(piece, room, line)
        line.add(theme.cut(words, width - line.width), theme.style("dim", ground))

    def _map(self, piece: Piece, room: int, line: Line) -> None:
        theme = self.theme
        full, waiting = [0.0] * room, [False] * room
        scale = room / max(1, piece.size)
        for block in piece.blocks:
            if block.state == FREE:
                continue
            begin, end = (block.address - piece.address) * scale, (block.address - piece.address + block.size) * scale
            for cell in range(int(begin), min(room, int(end) + 1)):
                full[cell] += max(0.0, min(end, cell + 1) - max(begin, cell))
                waiting[cell] |= block.state == PENDING
        for share, waits in zip(full, waiting, strict=True):
            # The smallest block is drawn, and only a full cell looks full.
            level = 0 if share <= 0 else 8 if share >= 0.999 else max(1, min(7, int(share * 8)))
            glyph = theme.glyphs.eighths[level] if level else theme.glyphs.reserved if theme.plain_graphs else " "
            line.add(glyph, theme.style("warning" if waits else "allocated", "reserved"))


_AXIS = 7
_BANDS, _BANDS_TALL, _TALL = 1, 3, 14


class _Pooled(NamedTuple):
    key: tuple[int, int, int, int]
    columns: list[Column]
    starts: list[int]


class SnapshotTimeline(Canvas):
    """Both curves by trace entry; a column has the highest of its entries."""

    def __init__(self, app_state: AppState, explorer: Explorer, name: str) -> None:
        super().__init__(app_state, name=name)
        self.explorer = explorer
        self._pooled: _Pooled | None = None

    def key(self) -> object:
        return self.explorer.choices

    def pooled(self, width: int) -> _Pooled:
        """Pool the curves by maximum into ``width`` columns; kept until the window changes."""
        explorer = self.explorer
        replay = explorer.replay
        key = (explorer.first, explorer.last, replay.device, width)
        if self._pooled is None or self._pooled.key != key:
            span = explorer.last - explorer.first + 1
            starts = [explorer.first + column * span // width for column in range(width + 1)]
            columns = [
                # A curve's position is its moment plus one: position 0 is before the first entry.
                Column(
                    max(replay.allocated[begin + 1 : max(begin + 2, end + 1)]),
                    max(replay.reserved[begin + 1 : max(begin + 2, end + 1)]),
                )
                for begin, end in pairwise(starts)
            ]
            self._pooled = _Pooled(key, columns, starts)
        return self._pooled

    def column_of(self, moment: int, width: int) -> int:
        """Return the column of a moment; -1 if it is out of view."""
        explorer = self.explorer
        if not explorer.first <= moment <= explorer.last:
            return -1
        # The last column with a begin at or before the moment.
        return min(width - 1, self._column(moment, width))

    def _column(self, moment: int, width: int) -> int:
        explorer = self.explorer
        span = explorer.last - explorer.first + 1
        return ((moment - explorer.first + 1) * width - 1) // span

    def moment_beside(self, columns: int) -> int:
        """Return the moment at a distance of columns from the cursor, at least one entry away."""
        explorer = self.explorer
        span = explorer.last - explorer.first + 1
        return explorer.cursor + columns * max(1, span // max(1, self.size.width - _AXIS))

    def draw(self, width: int, height: int) -> list[Line]:
        theme, explorer = self.theme, self.explorer
        replay = explorer.replay
        bands = explorer.bands[: _BANDS_TALL if height >= _TALL else _BANDS]
        room, rows = width - _AXIS, height - 3 - len(bands)
        top = nice_top(max(replay.reserved))
        lines = [self._head(width)]
        graph = memory_graph(self.pooled(room).columns, room, rows, Scale(top, replay.peak_bytes), theme)
        for index, line in enumerate(graph):
            label = gib(top, short=True) if index == 0 else gib(0, short=True)[0] if index == rows - 1 else ""
            lines.append(Line(f"{label:>{_AXIS - 1}} ", theme.style("dim")).join(line))
        for row in bands:
            lines.append(
                Line(" " * _AXIS, theme.base).join(band_row(row, lambda at: self._column(at, room), room, theme))
            )
        lines.append(self._marks(room))
        lines.append(self._figures(width))
        return lines

    def _head(self, width: int) -> Line:
        theme, explorer = self.theme, self.explorer
        replay = explorer.replay
        left = Line(" ", theme.base).add(
            sanitize(replay.snapshot.path).rpartition("/")[2], theme.style("text", bold=True)
        )
        if len(explorer.replays) > 1:
            left.add(f"  device {replay.device} of {len(explorer.replays)}", theme.style("accent"))
        else:
            left.add(f"  device {replay.device}", theme.style("dim"))
        whole = explorer.first == -1 and explorer.last == replay.last
        shown = f"{replay.entries:,} entries" if whole else f"entries {explorer.first:,} to {explorer.last:,}"
        left.add(f"  {shown}", theme.style("dim"))
        right = Line()
        if replay.ooms:
            words = "out of memory" if width >= 100 else "OOM"
            right.add(f" {theme.glyphs.error} {words} ", theme.style("error", bold=True))
        right.add(f" peak {gib(replay.peak_bytes)} GiB at {replay.peak_index:,} ", theme.style("peak"))
        return spread(left, right, width, theme.base)

    def _marks(self, room: int) -> Line:
        theme, explorer = self.theme, self.explorer
        replay = explorer.replay
        cells: dict[int, tuple[str, str]] = {self.column_of(replay.peak_index, room): ("P", "peak")}
        cells |= {self.column_of(index, room): (theme.glyphs.error, "error") for index in replay.ooms}
        if explorer.mark is not None:
            cells[self.column_of(explorer.mark, room)] = ("m", "warning")
        cells[self.column_of(explorer.cursor, room)] = (theme.glyphs.spike, "accent")
        line = Line(" " * _AXIS, theme.base)
        for column in range(room):
            glyph, tone = cells.get(column, (theme.glyphs.rule, "rule"))
            line.add(glyph, theme.style(tone, bold=tone != "rule"))
        return line

    def _figures(self, width: int) -> Line:
        theme, explorer = self.theme, self.explorer
        replay, cursor = explorer.replay, explorer.cursor
        seconds = explorer.seconds()
        left = Line(f" {theme.glyphs.spike} ", theme.style("accent", bold=True))
        left.add(f"{cursor:,} {explorer.entry_words()}" if cursor >= 0 else explorer.entry_words(), theme.base)
        if seconds is not None:
            left.add(f"  at {duration(seconds)}", theme.style("dim"))
        figures = [
            Line(f" {name} {gib(replay.at(curve, cursor))}", theme.style("text" if name == "alloc" else "dim"))
            for name, curve in (
                ("alloc", replay.allocated),
                ("active", replay.active),
                ("req", replay.requested),
                ("rsvd", replay.reserved),
            )
        ]
        room = width - left.width - len(" GiB ")
        if words := explorer.annotation_words():
            # The figures at the ends are always drawn.
            most = min(40, room - figures[0].width - figures[-1].width - 3)
            left.add(f"  {theme.cut(words, most)}", theme.style("accent"))
            room = width - left.width - len(" GiB ")
        # The two in the middle are omitted first: they hardly differ from allocated.
        for optional in (2, 1):
            if sum(figure.width for figure in figures) > room:
                del figures[optional]
        right = beside(figures, "", theme.base)
        return spread(left, right.add(" GiB ", theme.style("dim")), width, theme.base)
