"""The list below the timeline: the rows of the selected view."""

from collections.abc import Sequence

from ....protocol.analysis.allocator.snapshot.layout import Piece
from ....protocol.snapshot.model import FREE, PENDING
from ....protocol.text import gib
from ...model.snapshot_explorer import Explorer
from ...model.snapshot_rows import Row, rows_of
from ..base.listing import Listing
from ..drawing.line import Line
from ..drawing.theme import ruled
from ..state.app_state import AppState

_TITLES = {
    "stacks": "1 live stacks",
    "blocks": "2 largest blocks",
    "between": "3 between marks",
    "segments": "4 segments",
    "report": "5 report",
    "difference": "6 difference",
}
_SHORT = {
    "stacks": "1 stacks",
    "blocks": "2 blocks",
    "between": "3 between",
    "segments": "4 segments",
    "report": "5 report",
    "difference": "6 diff",
}


class SnapshotList(Listing):
    """The rows of one view, with a selection."""

    empty = "nothing is live here"

    def __init__(self, app_state: AppState, explorer: Explorer, name: str) -> None:
        super().__init__(app_state, name=name)
        self.explorer = explorer
        self._rows: Sequence[Row] = []
        self._made_of: object = None

    def key(self) -> object:
        return self.explorer.version, self.selected, self.top

    def rows(self) -> Sequence[Row]:
        """Return the rows, cached until the explorer changes."""
        made_of = (self.explorer.version, self.size.width)
        if made_of != self._made_of:
            self._made_of = made_of
            self._rows = rows_of(self.explorer, self.size.width)
        return self._rows

    def count(self) -> int:
        return len(self.rows())

    def current(self) -> Row | None:
        """Return the selected row."""
        rows = self.rows()
        return rows[self.selected] if self.selected < len(rows) else None

    def head(self, width: int) -> list[Line]:
        theme, explorer = self.theme, self.explorer
        titles = _TITLES if width >= 100 else _SHORT
        left = Line()
        for view in explorer.views:
            chosen = view == explorer.view
            left.add(
                f" {titles[view]} ",
                theme.style("accent" if chosen else "dim", bold=chosen, reverse=chosen and not theme.color),
            )
        right = Line()
        if explorer.find:
            right.add(f" with {explorer.find!r}", theme.style("accent"))
        if explorer.view == "stacks":
            right.add(" libraries folded " if explorer.fold else " all frames ", theme.style("dim"))
        return [ruled(left, right, width, theme)]

    def item(self, index: int, width: int, selected: bool) -> Line:
        row, theme = self.rows()[index], self.theme
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
        line.add(f"{sign + gib(row.size):>12} ", theme.style(tone, ground, bold=row.head))
        if not row.signed and row.share:
            line.add(f"{row.share * 100:>4.0f} % ", theme.style("dim", ground))
        line.add(f"{row.blocks:>6,}  " if row.blocks else " " * 8, theme.style("dim", ground))

    def _segment(self, row: Row, piece: Piece, line: Line, width: int, ground: str) -> None:
        theme = self.theme
        taken = 1 - piece.free_bytes / piece.size if piece.size else 0.0
        line.add(f"{gib(piece.size):>10} {taken * 100:>3.0f} %{row.blocks:>5,} ", theme.style("text", ground))
        words = f" {row.words}"
        room = max(10, width - line.width - max(16, min(34, len(words))))
        self._map(piece, room, line)
        line.add(theme.cut(words, width - line.width), theme.style("dim", ground))

    def _map(self, piece: Piece, room: int, line: Line) -> None:
        """Draw a segment's blocks by the fill of each cell; blocks that wait for a stream have the warning colour."""
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
