"""Draws the timeline of a snapshot: allocated and reserved, and below them cursor, marks, peak and errors."""

from itertools import pairwise
from typing import NamedTuple

from ....protocol.text import duration, sanitize
from ...model.snapshot_explorer import Explorer
from ..base.canvas import Canvas
from ..drawing.figures import gib
from ..drawing.line import Line, beside, spread
from ..plots.band_row import band_row
from ..plots.memory_graph import Column, Scale, memory_graph
from ..state.app_state import AppState
from ..state.view_models import nice_top

_AXIS = 7
_BANDS, _BANDS_TALL, _TALL = 1, 3, 14
"""Rows of bands, rows in a tall timeline, and its minimum height."""


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
        return self.explorer.version

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
        """Return a moment's column, below 0 or beyond ``width`` if it is out of view."""
        explorer = self.explorer
        span = explorer.last - explorer.first + 1
        return ((moment - explorer.first + 1) * width - 1) // span

    def moment_beside(self, columns: int) -> int:
        """Return the moment at a distance of columns from the cursor, at least one entry away."""
        width = max(1, self.size.width - _AXIS)
        explorer = self.explorer
        span = explorer.last - explorer.first + 1
        step = max(1, span // width)
        return explorer.cursor + columns * step

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
