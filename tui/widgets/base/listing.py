"""A scrolling list with a selection that is kept in view, optionally following the newest item."""

from ..drawing.line import Line
from .canvas import Canvas


class Listing(Canvas):
    """A list with one line per item. A subclass counts the items and draws one."""

    selected = 0
    top = 0
    follow = False
    """Keep the last item selected as items are added."""
    empty = "nothing here"

    def count(self) -> int:
        """Return the number of items."""
        raise NotImplementedError

    def item(self, index: int, width: int, selected: bool) -> Line:
        """Draw one item."""
        raise NotImplementedError

    def head(self, width: int) -> list[Line]:
        """Draw the lines above the items."""
        return []

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the visible items, with a scroll mark at the right if there are more."""
        head, total = self.head(width), self.count()
        room = max(1, height - len(head))
        if self.follow:
            self.selected = max(0, total - 1)
        self.selected = max(0, min(self.selected, total - 1))
        self.top = max(0, min(max(self.selected - room + 1, min(self.top, self.selected)), total - room))
        if not total:
            return [*head, Line(f" {self.empty}", self.theme.style("dim"))]
        lines = [
            self.item(index, width - 1, index == self.selected).fit(width - 1, self.theme.base)
            for index in range(self.top, min(total, self.top + room))
        ]
        self._scroll_mark(lines, total, room)
        return [*head, *lines]

    def _scroll_mark(self, lines: list[Line], total: int, room: int) -> None:
        size = max(1, room * room // total) if total > room else 0
        begin = round(self.top / max(1, total - room) * (room - size)) if total > room else 0
        style = self.theme.style("faint")
        for index, line in enumerate(lines):
            inside = size and begin <= index < begin + size
            line.add(self.theme.glyphs.scroll if inside else " ", style)

    def move(self, delta: int) -> None:
        """Move the selection, which ends following."""
        total = self.count()
        self.selected = max(0, min(self.selected + delta, total - 1))
        self.follow = False
        self.tick(force=True)

    def page(self, direction: int) -> None:
        """Move by one screen."""
        self.move(direction * max(1, self.size.height - 2))

    def go_to(self, index: int) -> None:
        """Select an item; -1 is the last."""
        self.selected = index if index >= 0 else max(0, self.count() - 1)
        self.tick(force=True)
