"""A dialog that sends one command after yes (the default is no), and then shows its outcome."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from ...protocol.messages.verbs import Verb
from ..source.base import CommandRecord
from .dialog import Dialog


class CommandDialog(Dialog):
    """A subclass draws the question and the progress, binds keys to the actions here, and defines the command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "close", "no", tooltip="do nothing"),
        Binding("left,right,tab", "other", "choose", tooltip="between no and yes"),
        Binding("enter", "answer", "answer", tooltip="do what is chosen"),
    ]
    yes = False
    """Whether yes is selected."""
    sent = ""
    """The command's id; empty until it is sent."""

    def command(self) -> Verb | None:
        """Return the command to send for yes; None if it is not possible yet, after showing the reason."""
        raise NotImplementedError

    @property
    def record(self) -> CommandRecord | None:
        """The sent command, or None."""
        source = self.app_state.source
        return source.commands.get(self.sent) if source is not None and self.sent else None

    def tick(self) -> None:
        """Show progress."""
        if self.sent:
            self.fit()
        super().tick()

    def paint(self) -> None:
        """Draw at once, in the needed size."""
        self.fit()
        self.panel.tick(force=True)

    def action_other(self) -> None:
        """Select the other answer."""
        self.yes = not self.yes
        self.panel.tick()

    def action_answer(self) -> None:
        """Run the selected answer."""
        if self.sent or not self.yes:
            self.dismiss(None)
        else:
            self.action_yes()

    def action_yes(self) -> None:
        """Send the command."""
        source = self.app_state.source
        if source is None or self.sent:
            return
        wanted = self.command()
        if wanted is not None:
            self.sent = source.send(wanted)
            self.paint()
