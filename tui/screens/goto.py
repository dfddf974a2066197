"""The dialog that asks for a position: a step, a time, a jump or a share."""

from textual.app import ComposeResult
from textual.containers import Vertical

from ..widgets.base.prompt import Prompt
from ..widgets.drawing.line import Line
from ..widgets.lines.scrubber import time_of_day
from .dialog import Dialog


class GotoDialog(Dialog):
    """Asks for a position and seeks to it; an error is shown at the bottom of the screen."""

    WIDTH = 60

    def compose(self) -> ComposeResult:
        with Vertical(id="goto", classes="dialog"):
            self.panel.remove_class("dialog")
            yield self.panel
            yield Prompt(self.app_state, "go to", name="place")

    def lines(self, width: int, height: int) -> list[Line]:
        source = self.app_state.source
        if source is None:
            return []
        transport, dim = source.transport, self.theme.style("dim")
        last = self.app_state.model.total_steps or self.app_state.model.leading_step
        span = f"step 1 to {last:,}, {time_of_day(transport.first)} to {time_of_day(transport.last)}"
        return [
            Line(span, self.theme.base),
            Line("812 a step   12:03:10 a time   +90s a jump   50% a share", dim),
            Line(),
        ]

    def fit(self) -> None:
        """Lay out text and input line."""
        self.panel.styles.height = 3
        box = self.query_one("#goto")
        if self.theme.glyphs.is_ascii:
            box.styles.border = ("ascii", self.theme.tone("accent"))
        box.styles.width, box.styles.height = self.inner_width + 4, 6

    def on_mount(self) -> None:
        self.fit()
        self.query_one(Prompt).focus()

    def on_prompt_done(self, event: Prompt.Done) -> None:
        source = self.app_state.source
        if event.accepted and event.text.strip() and source is not None:
            source.transport.goto(event.text.strip())
        self.dismiss(None)
