"""The dialog that stops a run: the trainer saves a checkpoint and ends after the step."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from ...protocol.messages.verbs import Stop
from ..widgets.drawing.line import Line
from ..widgets.lines.alert_lines import wrap
from .command_answers import answer_lines, button_line
from .command_dialog import CommandDialog


class StopDialog(CommandDialog):
    """Asks for confirmation (the default is no), then shows the outcome."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "yes", tooltip="stop the run"),
        Binding("q", "leave", "leave", tooltip="close; once the stop is under way, detach"),
    ]
    WIDTH = 72

    def command(self) -> Stop:
        return Stop()

    def lines(self, width: int, height: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        name = model.info.name or model.info.id or "the run"
        lines = [Line(f"Stop {name}", theme.style("text", bold=True)), Line()]
        if self.record is not None:
            lines += answer_lines(self.record, model, width, theme)
            lines += [Line(), Line(f"the run is {model.state}   escape: close", theme.style("dim"))]
            return lines
        own = model.info.kind in ("demo", "train", "")
        states = model.rank_states()
        what = (
            "Every rank finishes its step, the trainer saves a checkpoint, and the run ends; it can be resumed."
            if own
            else "The script gets an interrupt (SIGINT), as from ctrl+c. Whether it saves anything is up to the script."
        )
        lines += [Line(row, theme.base) for row in wrap(what, width)]
        if states.get("hung") or states.get("stopped"):
            warning = "A rank stands still and finishes no step: it cannot stop in order. k ends it."
            lines += [Line(row, theme.style("warning")) for row in wrap(warning, width)]
        lines += [Line(), button_line("No", "Yes, stop", self.yes, theme)]
        return lines
