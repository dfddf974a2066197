"""The dialog that releases held ranks: it states the consequences; the default is no."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from ....protocol.messages.verbs import Release
from ...model.held import held_cases
from ...model.oom import OomCase
from ...widgets.drawing.line import Line
from ...widgets.lines.alert_lines import wrap
from ...widgets.state.app_state import AppState
from ..command_answers import answer_lines, button_line
from ..command_dialog import CommandDialog


class ReleaseDialog(CommandDialog):
    """Asks whether to release the visible rank or all held ranks; then shows the outcome."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a,space", "all", "all", tooltip="this rank, or all that are held"),
        Binding("y", "yes", "yes", tooltip="release"),
        Binding("q", "leave", "leave", tooltip="close"),
    ]
    WIDTH = 74
    all_of_them = False

    def __init__(self, app_state: AppState, case: OomCase) -> None:
        super().__init__(app_state)
        self.case = case

    @property
    def ranks(self) -> list[int]:
        """The ranks that would be released."""
        if not self.all_of_them:
            return [self.case.oom.rank]
        return sorted({case.oom.rank for case in held_cases(self.app_state.model)} | {self.case.oom.rank})

    def command(self) -> Release:
        return Release(self.ranks)

    def lines(self, width: int, height: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        ranks = self.ranks
        words = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        lines = [Line(f"Release {words}", theme.style("text", bold=True)), Line()]
        if self.record is not None:
            lines += answer_lines(self.record, model, width, theme)
            return [*lines, Line(), Line("escape: close", theme.style("dim"))]
        lines += [Line(row, theme.base) for text in self._what_follows() for row in wrap(text, width)]
        held = len({case.oom.rank for case in held_cases(model)})
        if held > 1:
            mark = theme.glyphs.marked if self.all_of_them else theme.glyphs.unmarked
            lines += [Line(), Line(f"{mark} ", theme.style("accent")).add(f"all {held} held ranks (a)", theme.base)]
        return [*lines, Line(), button_line("No", f"Yes, release {words}", self.yes, theme)]

    def _what_follows(self) -> list[str]:
        model = self.app_state.model
        texts = [
            "The error is raised in the failing frame, as it would have been without ftmon. A script that catches it "
            "continues; otherwise the rank ends. Its console is closed."
        ]
        if model.info.framework == "deepspeed" or model.info.kind in ("demo", "train"):
            texts.append("When a rank ends, DeepSpeed's launcher ends every rank of its node, and the run ends.")
        elif model.world_size > 1:
            texts.append("When a rank ends, the others wait in their next collective until its timeout, or are ended.")
        return texts

    def action_all(self) -> None:
        if not self.sent:
            self.all_of_them = not self.all_of_them
            self.paint()
