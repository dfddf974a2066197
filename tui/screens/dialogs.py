"""Dialogs: a position to go to, one command with its outcome, and commands sent by one key."""

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.screen import ModalScreen

from ...protocol.messages.control import Result, Verb
from ...protocol.text import sanitize
from ..model.oom import CommandRecord
from ..model.run import RunModel
from ..widgets.base import Canvas, Prompt
from ..widgets.drawing import Line, marked
from ..widgets.header import time_of_day
from ..widgets.state import AppState
from ..widgets.theme import Theme


class Panel(Canvas):
    """Draws the text of its dialog."""

    def draw(self, width: int, height: int) -> list[Line]:
        dialog = self.screen
        assert isinstance(dialog, Dialog)
        return dialog.lines(width, height)


class Dialog(ModalScreen[Any]):
    """A question over the screen behind it. A subclass defines its lines, its size, and its keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close", tooltip="do nothing")]
    WIDTH = 76

    def __init__(self, app_state: AppState) -> None:
        super().__init__()
        self.app_state = app_state
        self.panel = Panel(app_state, name="panel", classes="dialog")

    @property
    def theme(self) -> Theme:
        return self.app_state.theme

    def compose(self) -> ComposeResult:
        yield self.panel

    def lines(self, width: int, height: int) -> list[Line]:
        raise NotImplementedError

    @property
    def inner_width(self) -> int:
        return min(self.WIDTH, self.app.size.width - 2) - 4

    def fit(self) -> None:
        """Set the panel to the size of its content, within the terminal."""
        styles = self.panel.styles
        if self.theme.glyphs.is_ascii:
            styles.border = ("ascii", self.theme.tone("accent"))
        styles.width = self.inner_width + 4
        styles.height = min(len(self.lines(self.inner_width, 1000)) + 2, self.app.size.height)

    def on_mount(self) -> None:
        self.fit()

    def on_resize(self, event: Resize) -> None:
        self.fit()

    def tick(self) -> None:
        self.panel.tick()

    def action_leave(self) -> None:
        """Close the dialog; while a command is under way leave the app, which does not end the command."""
        if getattr(self, "sent", ""):
            self.app.exit()
        else:
            self.dismiss(None)

    def action_close(self) -> None:
        self.dismiss(None)


class CommandDialog(Dialog):
    """A subclass draws the question and the progress, binds keys to the actions here, and defines the command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "close", "no", tooltip="do nothing"),
        Binding("left,right,tab", "other", "choose", tooltip="between no and yes"),
        Binding("enter", "answer", "answer", tooltip="do what is chosen"),
    ]
    yes = False
    sent = ""  # the command's id; empty until it is sent

    def command(self) -> Verb | None:
        """Return the command to send for yes; None if it is not possible yet, after showing the reason."""
        raise NotImplementedError

    @property
    def record(self) -> CommandRecord | None:
        source = self.app_state.source
        return source.commands.get(self.sent) if source is not None and self.sent else None

    def tick(self) -> None:
        if self.sent:
            self.fit()
        super().tick()

    def paint(self) -> None:
        self.fit()
        self.panel.tick(force=True)

    def action_other(self) -> None:
        self.yes = not self.yes
        self.panel.tick()

    def action_answer(self) -> None:
        if self.sent or not self.yes:
            self.dismiss(None)
        else:
            self.action_yes()

    def action_yes(self) -> None:
        source = self.app_state.source
        if source is None or self.sent:
            return
        wanted = self.command()
        if wanted is not None:
            self.sent = source.send(wanted)
            self.paint()


def button_line(no: str, yes: str, yes_chosen: bool, theme: Theme) -> Line:
    """Draw two buttons; the selected one is filled and in brackets."""

    def button(text: str, chosen: bool, tone: str) -> Line:
        if chosen:
            return Line(f"[ {text} ]", theme.style("on_color", tone, bold=True, reverse=not theme.color))
        return Line(f"  {text}  ", theme.style("dim"))

    line = Line("  ", theme.base).join(button(no, not yes_chosen, "accent")).add("   ", theme.base)
    return line.join(button(yes, yes_chosen, "error"))


def answer_lines(record: CommandRecord, model: RunModel, width: int, theme: Theme) -> list[Line]:
    """Draw the state of a command: sent, accepted or refused, done or failed, with the hub's text."""
    glyphs = theme.glyphs
    good, bad, dim = theme.style("good"), theme.style("error", bold=True), theme.style("dim")
    accepted, result = record.accepted, record.result
    if accepted is None:
        waited = max(0.0, model.now - record.sent) if record.sent else 0.0
        text = "sent, waiting for the hub" + (f" for {waited:.0f} s" if waited >= 2 else "")
        return [Line(f"{glyphs.states['starting']} {text}", dim)]
    if not accepted.ok:
        return marked(f"{glyphs.error} refused: ", bad, accepted.text, width, theme.base)
    lines = marked(f"{glyphs.resolved} ", good, accepted.text or "under way", width, theme.base)
    if result is None:
        return lines
    mark, style, words = (glyphs.resolved, good, "done") if result.ok else (glyphs.error, bad, "failed")
    return lines + marked(f"{mark} ", style, result.text or words, width, theme.base)


_DONE = {"compose": "a step was analysed", "arm": "stacks were recorded: the cause is below"}


def refusal(app_state: AppState, verb: str) -> str:
    """Return the reason why a command cannot be sent to the run; empty if it can."""
    source = app_state.source
    if app_state.read_only:
        return f"read-only: {verb} is refused"
    if source is None or not source.can_command:
        replay = source is not None and source.transport.mode == "replay"
        return f"cannot {verb}: {'a replay has no processes' if replay else 'the run has no hub'}"
    return ""


class CommandStatus:
    """Sends commands and shows their state at the bottom of the screen."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._open: set[str] = set()  # commands without a final answer, by id

    def ask(self, verb: Verb, words: str) -> None:
        """Send a command; ``words`` is the text to show once it is accepted."""
        app_state, source = self._app_state, self._app_state.source
        why = refusal(app_state, verb.name)
        if why or source is None:
            app_state.show_message(why, "warning")
            return
        self._open.add(source.send(verb))
        app_state.show_message(f"{words} ...")

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    def tick(self) -> None:
        source = self._app_state.source
        for number in list(self._open) if source is not None else []:
            record = source.commands.get(number) if source is not None else None
            if record is not None:
                self._show(number, record)

    def _show(self, number: str, record: CommandRecord) -> None:
        accepted, result = record.accepted, record.result
        if result is not None:
            self._open.discard(number)
            words = result_words(record.verb.name, result)
            tone = "error" if not result.ok else "warning" if without_native(result) else "good"
            self._app_state.show_message(words, tone)
        elif accepted is not None and not accepted.ok:
            self._open.discard(number)
            self._app_state.show_message(f"{record.verb.name} refused: {sanitize(accepted.text, 200)}", "error")


def result_words(verb: str, result: Result) -> str:
    """Return a command's result in one line; for a snapshot its path; for native stacks why a rank has none."""
    paths = [*_told(result, "path").values()]
    if verb == "snapshot" and result.ok and paths:
        return f"snapshot written: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    for rank, why in without_native(result).items():
        return f"rank {rank}, no native frames: {why}"
    if result.ok and verb in _DONE:
        return _DONE[verb]
    return sanitize(result.text or f"{verb}: {'done' if result.ok else 'failed'}", 300)


def without_native(result: Result) -> dict[str, str]:
    """Return reasons of missing native frames, by rank, from the answers to a ``stacks`` command for them."""
    return _told(result, "no_native")


def _told(result: Result, field: str) -> dict[str, str]:
    answers = result.data.get("answers")
    found: dict[str, str] = {}
    for rank, answer in answers.items() if isinstance(answers, dict) else ():
        text = answer.get(field) if isinstance(answer, dict) else None
        if isinstance(text, str) and text:
            found[sanitize(str(rank))] = sanitize(text, 200)
    return found


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
