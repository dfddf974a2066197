"""A dialog that sends one command after yes, the default being no, and then shows what comes of it."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from ...protocol.messages.verbs import Verb
from ..source.base import CommandRecord
from .dialog import Dialog


class CommandDialog(Dialog):
    """A subclass draws the question and the progress, binds keys to the actions here, and names the command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "close", "no", tooltip="do nothing"),
        Binding("left,right,tab", "other", "choose", tooltip="between no and yes"),
        Binding("enter", "answer", "answer", tooltip="do what is chosen"),
    ]
    yes = False
    """The answer that is chosen."""
    sent = ""
    """The command's id; empty until it is sent."""

    def command(self) -> Verb | None:
        """Return what to send for yes; None: not possible yet, and the reason was shown."""
        raise NotImplementedError

    @property
    def record(self) -> CommandRecord | None:
        """The command, once it was sent."""
        source = self.app_state.source
        return source.commands.get(self.sent) if source is not None and self.sent else None

    def tick(self) -> None:
        """Show progress."""
        if self.sent:
            self.fit()
        super().tick()

    def paint(self) -> None:
        """Draw at once, in the size that is needed now."""
        self.fit()
        self.panel.tick(force=True)

    def action_other(self) -> None:
        """Choose the other answer."""
        self.yes = not self.yes
        self.panel.tick()

    def action_answer(self) -> None:
        """Do what is chosen."""
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
