"""Python stacks of a rank: asked for when the screen opens, shown when they come."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ...protocol.text import sanitize
from ..widgets.line import Line, cut
from ..widgets.listing import Listing
from ..widgets.scrubber import time_of_day
from .base import MonitorScreen, key


class StackList(Listing):
    """The stacks of the selected rank, a line each."""

    empty = "no stacks yet"
    waiting = False

    def key(self) -> object:
        """Change with the stacks."""
        return self.stage.selected, id(self._stacks), self.selected, self.waiting

    @property
    def _stacks(self) -> object:
        rank = self.stage.model.ranks.get(self.stage.selected)
        return rank.stacks if rank else None

    def lines(self) -> list[str]:
        """Give the text by lines."""
        rank = self.stage.model.ranks.get(self.stage.selected)
        return rank.stacks.text.splitlines() if rank and rank.stacks else []

    def count(self) -> int:
        """Count the lines."""
        return len(self.lines())

    def item(self, index: int, width: int, selected: bool) -> Line:
        """Draw one line: threads stand out, frames are plain."""
        text = self.lines()[index]
        look = self.look
        ground = "raised" if selected else "background"
        head = not text.startswith((" ", "\t"))
        style = look.style("accent" if head else "text", ground, bold=head)
        line = Line(cut(" " + sanitize(text), width, look.glyphs.ellipsis), style)
        return line.fit(width, look.style("text", ground))

    def head(self, width: int) -> list[Line]:
        """Say whose stacks these are and of when."""
        look = self.look
        rank = self.stage.model.ranks.get(self.stage.selected)
        stacks = rank.stacks if rank else None
        line = Line(look.glyphs.rule, look.style("rule"))
        line.add(f" stacks of rank {self.stage.selected} ", look.style("text", bold=True))
        if stacks is not None:
            why = f", {stacks.reason}" if stacks.reason else ""
            line.add(f"taken at {time_of_day(stacks.time)}{why} ", look.style("dim"))
        elif self.waiting:
            line.add("asked for ", look.style("dim"))
        return [line.add(look.glyphs.rule * max(0, width - line.width), look.style("rule"))]


class StacksScreen(MonitorScreen):
    """Where every thread of a rank is."""

    NAME = "stacks"
    WHAT = (
        "Where each thread of the rank is, as faulthandler writes it: the innermost call first. The rank answers even "
        "when its training thread is stuck in Python; s asks again."
    )
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        key("escape", "app.back", "back", "back to the overview"),
        key("s", "again", "again", "ask for the stacks again"),
        key("left", "rank(-1)", "previous", "the rank before"),
        key("right", "rank(1)", "next rank", "the rank after"),
        key("up", "move(-1)", "up", "one line up", show=False),
        key("down", "move(1)", "down", "one line down", show=False),
        key("pageup", "page(-1)", "page up", "a screen up", show=False),
        key("pagedown", "page(1)", "page down", "a screen down", show=False),
        key("k", "app.kill", "kill", "end ranks, or the run; asks first"),
    ]

    def body(self) -> Iterable[Widget]:
        """Give the stacks."""
        yield StackList(self.stage, name="lines")

    def on_mount(self) -> None:
        """Ask at once."""
        self.action_again()

    def action_again(self) -> None:
        """Ask for the stacks."""
        source, lines = self.stage.source, self.query_one(StackList)
        if source is not None and source.can_command and not self.stage.read_only:
            source.send("stacks", {"ranks": [self.stage.selected]})
            lines.waiting = True
        elif lines.count() == 0:
            self.stage.say("none were recorded, and there is no hub to ask", "warning")
        self.tick()

    def action_rank(self, delta: int) -> None:
        """Go to a neighbouring rank."""
        ranks = list(self.stage.model.ranks)
        if self.stage.selected in ranks:
            index = ranks.index(self.stage.selected) + delta
            self.stage.select(ranks[max(0, min(index, len(ranks) - 1))])
            self.action_again()

    def in_question(self) -> set[int]:
        """A kill asked for here means the rank in view."""
        return {self.stage.selected}

    def action_move(self, delta: int) -> None:
        """Scroll by lines."""
        self.query_one(StackList).move(delta)

    def action_page(self, direction: int) -> None:
        """Scroll by screens."""
        self.query_one(StackList).page(direction)
