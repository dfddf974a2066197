"""Dialogs: a position to go to, kill, stop, one command with its outcome; and commands sent by one key."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.screen import ModalScreen

from ...protocol.messages.control import Alert, Kill, Result, Stop, Verb
from ...protocol.text import counted, sanitize
from ..model.oom import CommandRecord
from ..model.rank import RankModel
from ..model.run import RunModel
from ..widgets.base import Canvas, Prompt
from ..widgets.drawing import Line, Theme, cut, gib, marked, wrap
from ..widgets.header import time_of_day
from ..widgets.state import AppState


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


def button_line(yes: str, yes_chosen: bool, theme: Theme) -> Line:
    """Draw the buttons ``No`` and ``yes``; the selected one is filled and in brackets."""

    def button(text: str, chosen: bool, tone: str) -> Line:
        if chosen:
            return Line(f"[ {text} ]", theme.style("on_color", tone, bold=True, reverse=not theme.color))
        return Line(f"  {text}  ", theme.style("dim"))

    line = Line("  ", theme.base).join(button("No", not yes_chosen, "accent")).add("   ", theme.base)
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
        # Only where the last step is in view is its number known.
        steps = (
            f"step 1 to {self.app_state.model.leading_step:,}, " if transport.mode == "live" or transport.at_end else ""
        )
        span = f"{steps}{time_of_day(transport.first)} to {time_of_day(transport.last)}"
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


_STUCK = ("hung", "stopped", "unreachable", "held")
"""States of a rank that does not recover by itself and blocks the others; waiting ranks are not included."""

_NAMED = 6  # maximum number of ranks named one by one; more are counted


@dataclass
class Targets:
    """The ranks that can be ended, the marked ones, and whether the whole run is marked."""

    ranks: list[int]
    marked: set[int] = field(default_factory=set[int])
    whole: bool = False
    before: dict[int, int] = field(default_factory=dict[int, int])
    """Device memory in use by rank when the kill was sent."""

    @classmethod
    def of(cls, model: RunModel, marked: set[int]) -> "Targets":
        """Return a run's living ranks, some marked.

        The whole run instead, if all are marked, there is only one, or one rank's end is that of the run.
        """
        ranks = [rank.rank for rank in model.ranks.values() if rank.alive]
        marked = marked & set(ranks)
        if len(ranks) <= 1 or len(marked) == len(ranks) or launcher_that_ends_all(model):
            return cls(ranks, set(), True)
        return cls(ranks, marked)

    @property
    def any(self) -> bool:
        return self.whole or bool(self.marked)

    @property
    def chosen(self) -> list[int]:
        """The ranks in the form of a command: empty means the run."""
        return [] if self.whole else sorted(self.marked)

    @property
    def first_marked(self) -> int:
        """The first marked row: 0 is the whole run, then the ranks."""
        marked = (row for row, rank in enumerate(self.ranks, 1) if rank in self.marked and not self.whole)
        return next(marked, 0)

    @property
    def words(self) -> str:
        """Text for the marked targets: ``the whole run``, ``rank 3``, ``ranks 1, 2``, ``12 ranks``, ``nothing``."""
        if self.whole:
            return "the whole run"
        if not self.marked:
            return "nothing"
        if len(self.marked) > _NAMED:
            return f"{len(self.marked)} ranks"
        return f"rank{'s' * (len(self.marked) > 1)} {', '.join(map(str, sorted(self.marked)))}"

    def toggle(self, row: int) -> None:
        """Mark or unmark a row: 0 is the whole run, then the ranks."""
        self.whole = row == 0 and not self.whole
        self.marked ^= {self.ranks[row - 1]} if row else set()

    def remember(self, model: RunModel) -> None:
        for number in self.chosen or self.ranks:
            rank = model.ranks.get(number)
            if rank is not None:
                self.before[number] = _held(model, rank)

    def aftermath(self, model: RunModel, width: int, theme: Theme) -> list[Line]:
        """Draw each target's state, and its device memory before and now."""
        lines: list[Line] = []
        numbers = list(self.before)
        if not self.whole:
            glyph, tone = theme.state(model.state)
            words = f"the run  {model.state}" + (f": {model.state_text}" if model.state_text else "")
            lines += marked(f"{glyph} ", theme.style(tone), words, width, theme.base)
        for number in numbers[:_NAMED]:
            rank = model.ranks.get(number)
            if rank is None:
                continue
            glyph, tone = theme.state(rank.state)
            line = Line(f"{glyph} ", theme.style(tone if rank.alive else "good"))
            line.add(f"rank {number:<4}", theme.base)
            line.add(f"{rank.state:<12}", theme.style("dim" if not rank.alive else tone))
            if not rank.on_cpu and self.before[number]:
                words = f"GPU memory {gib(self.before[number])} GiB before, {gib(_held(model, rank))} GiB now"
                line.add(words, theme.style("dim"))
            elif rank.state_text:
                line.add(theme.cut(rank.state_text, max(0, width - line.width)), theme.style("dim"))
            lines.append(line)
        if len(numbers) > _NAMED:
            left = sum(model.ranks[number].alive for number in numbers if number in model.ranks)
            lines.append(Line(f"  {len(numbers) - left} of {len(numbers)} ranks have ended", theme.style("dim")))
        return lines


def launcher_that_ends_all(model: RunModel) -> str:
    """Return the launcher that ends every rank once one of them has ended; empty: not known, or one rank."""
    info = model.info
    if model.world_size < 2:
        return ""
    if info.kind in ("demo", "train"):
        return "ftmon's launcher"
    words = {word.replace("\\", "/").rpartition("/")[2] for word in info.command}
    for names, launcher in _LAUNCHERS.items():
        if words & set(names):
            return launcher
    return "DeepSpeed's launcher" if info.framework == "deepspeed" else ""


_LAUNCHERS = {
    ("torchrun", "torch.distributed.run", "torch.distributed.launch"): "torchrun",
    ("accelerate", "accelerate.commands.launch"): "accelerate",
    ("deepspeed", "deepspeed.launcher.runner"): "DeepSpeed's launcher",
}
"""Launchers by the words of a command line; each ends all ranks of a node with the first that fails."""


def suggested(model: RunModel, selected: int, alert: Alert | None = None) -> set[int]:
    """Return the ranks that a kill suggests: the stuck ones that the alert names, else its rank while it is unresolved.

    Without an alert: the selected rank if it is stuck (and not all are), else all stuck ranks, else the selected rank.
    """
    stuck = {rank.rank for rank in model.ranks.values() if rank.state in _STUCK}
    if alert is not None:
        named = {*alert.ranks, *([] if alert.rank is None else [alert.rank])}
        if named & stuck:
            return named & stuck
        if alert.rank in model.ranks and alert.resolved is None and model.ranks[alert.rank].alive:
            return {alert.rank}
    alive = {rank.rank for rank in model.ranks.values() if rank.alive}
    return {selected} if not stuck or (selected in stuck and stuck != alive) else stuck


def _held(model: RunModel, rank: RankModel) -> int:
    sample = model.device_of(rank)
    if sample is None or sample.kind != "gpu":
        return 0
    own = [process.used_bytes for process in sample.processes if process.rank == rank.rank]
    return sum(own) if own or not rank.alive else sample.used_bytes


def target_line(targets: Targets, row: int, model: RunModel, width: int, theme: Theme, at_cursor: bool) -> Line:
    """Draw a target: the whole run in row 0, then a rank per row."""
    glyphs = theme.glyphs
    marked = targets.whole or (row > 0 and targets.ranks[row - 1] in targets.marked)
    line = Line(f"{glyphs.selected if at_cursor else ' '} ", theme.style("accent", bold=True))
    tone = "accent" if at_cursor else "text"
    line.add(f"{glyphs.marked if marked else glyphs.unmarked} ", theme.style("error" if marked else "dim"))
    if row == 0:
        line.add("the whole run", theme.style(tone, bold=True))
        ranks = counted(len(targets.ranks), "rank")
        return line.add(f": {ranks}, the launcher and all that they started", theme.style("dim"))
    number = targets.ranks[row - 1]
    line.add(f"rank {number:<5}", theme.style(tone, bold=True))
    rank = model.ranks.get(number)
    if rank is None:  # a job with fewer ranks began while the dialog was open
        return line.add("has ended", theme.style("dim"))
    where = f"pid {rank.hello.pid} on {rank.hello.host}" if rank.hello else "no report yet"
    state_glyph, state_tone = theme.state(rank.state)
    line.add(cut(f"{where:<28}", 30, glyphs.ellipsis), theme.style("dim"))
    line.add(f" {state_glyph} {rank.state}", theme.style(state_tone))
    return line.add(f", step {rank.step:,}", theme.style("dim")).fit(width, theme.base)


def signal_line(name: str, at_cursor: bool, theme: Theme) -> Line:
    """Draw the choice of signal."""
    words = f"SIG{name}" if name else "INT, then TERM, then KILL"
    line = Line(f"{theme.glyphs.selected if at_cursor else ' '} ", theme.style("accent", bold=True))
    line.add("signal  ", theme.style("dim"))
    return line.add(f"< {words} >", theme.style("accent" if at_cursor else "text", bold=at_cursor))


def what_follows(targets: Targets, model: RunModel, signal: str, width: int, theme: Theme) -> list[Line]:
    """Draw the consequences of ending the targets."""
    text = _consequence(targets, model)
    text += " Stacks are saved first; then SIG" + signal + "." if signal else " Stacks are saved first."
    if signal == "KILL":
        text += " Nothing gets a chance to save."
    return [Line(f"  {row}", theme.style("warning" if targets.any else "dim")) for row in wrap(text, width - 3)]


def _consequence(targets: Targets, model: RunModel) -> str:
    if not targets.any:
        return "Nothing is marked: no process would be ended."
    if targets.whole:
        launcher = launcher_that_ends_all(model)
        reason = f" {launcher} would end it with any one rank." if launcher else ""
        return f"The run ends immediately; progress since its last checkpoint is lost.{reason}"
    marked = [rank for number, rank in model.ranks.items() if number in targets.marked]
    hosts = {rank.hello.host for rank in marked if rank.hello}
    same = [rank.rank for rank in model.ranks.values() if rank.hello and rank.hello.host in hosts and rank.alive]
    if launcher := launcher_that_ends_all(model):
        where = f" on {', '.join(sorted(hosts)[:3])}" if hosts else ""
        return (
            f"When a rank ends, {launcher} ends every rank of its node: all {len(same)}{where}. The others "
            "cannot continue without them, so the run ends."
        )
    return "The other ranks wait in their next collective forever, or their launcher ends them: the run is over."


SIGNALS = ("", "INT", "TERM", "KILL")  # signals to choose from; empty escalates: INT, then TERM, then KILL
_LISTED = 6


class KillDialog(CommandDialog):
    """Selects targets and a signal, then no or yes; ``marked`` are the initially marked ranks.

    The cursor is on a target (the run, then each rank), the signal, or the buttons. It starts on the buttons, with
    ``No`` selected. Only ``Yes`` sends the command, and only while a target is marked.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", tooltip="the target above"),
        Binding("down,j,tab", "move(1)", "down", tooltip="the target below, the signal, the answer"),
        Binding("pageup", "move(-6)", "page up", tooltip="six targets up"),
        Binding("pagedown", "move(6)", "page down", tooltip="six targets down"),
        Binding("left", "turn(-1)", "left", tooltip="another signal, or the other answer"),
        Binding("right", "turn(1)", "right", tooltip="another signal, or the other answer"),
        Binding("space", "mark", "mark", tooltip="mark or unmark a target"),
        Binding("a", "all", "whole run", tooltip="mark the whole run"),
        Binding("y", "yes", "yes", tooltip="end what is marked"),
        Binding("q", "leave", "leave", tooltip="close; once the kill is under way, detach"),
    ]
    WIDTH = 78

    def __init__(self, app_state: AppState, marked: set[int]) -> None:
        super().__init__(app_state)
        self.targets = Targets.of(app_state.model, marked)
        self.cursor = self.buttons
        self.signal = 0
        self.top = 0

    @property
    def buttons(self) -> int:
        return len(self.targets.ranks) + 2

    def command(self) -> Kill | None:
        if not self.targets.any:
            self.app_state.show_message("nothing is marked: space marks a rank, a the whole run", "warning")
            return None
        self.targets.remember(self.app_state.model)
        return Kill(self.targets.chosen, SIGNALS[self.signal])

    def lines(self, width: int, height: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        dim = theme.style("dim")
        name = model.info.name or model.info.id or "the run"
        head = [Line(f"Kill: {name}", theme.style("text", bold=True)), Line()]
        if self.record is not None:
            return [*head, *self._progress(self.record, width)]
        rows = range(len(self.targets.ranks) + 1)
        marked_row = self.cursor if self.cursor in rows else self.targets.first_marked
        self.top = max(marked_row - _LISTED + 1, min(self.top, marked_row))
        self.top = max(0, min(self.top, len(rows) - _LISTED))
        shown = rows[self.top : self.top + _LISTED]
        lines = [target_line(self.targets, index, model, width, theme, index == self.cursor) for index in shown]
        if len(rows) > len(shown):
            lines.append(Line(f"    {self.targets.words}; {len(rows) - 1} ranks, up and down scroll", dim))
        lines += [Line(), signal_line(SIGNALS[self.signal], self.cursor == self.buttons - 1, theme), Line()]
        lines += what_follows(self.targets, model, SIGNALS[self.signal], width, theme)
        lines += [Line(), button_line(f"Yes, kill {self.targets.words}", self.yes, theme)]
        lines.append(Line("  arrows: choose   space: mark   a: the whole run   escape: no", dim))
        return [*head, *lines]

    def _progress(self, record: CommandRecord, width: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        lines = [Line(f"killing {self.targets.words}", theme.base), *answer_lines(record, model, width, theme), Line()]
        lines += self.targets.aftermath(model, width, theme)
        word = "escape: close" if record.done else "escape: close (the kill continues)"
        return [*lines, Line(), Line(word, theme.style("dim"))]

    def action_move(self, delta: int) -> None:
        self.cursor = max(0, min(self.cursor + delta, self.buttons))
        self.paint()

    def action_turn(self, direction: int) -> None:
        if self.cursor == self.buttons:
            self.yes = direction > 0
        elif self.cursor == self.buttons - 1:
            self.signal = (self.signal + direction) % len(SIGNALS)
        self.paint()

    def action_mark(self) -> None:
        if self.cursor < self.buttons - 1 and not self.sent:
            self.targets.toggle(self.cursor)
            self.paint()

    def action_all(self) -> None:
        if not self.sent:
            self.targets.whole = True
            self.paint()

    def action_answer(self) -> None:
        """On a target, mark it; on the buttons, close or kill."""
        if self.sent or self.cursor == self.buttons:
            super().action_answer()
        elif self.cursor < self.buttons - 1:
            self.action_mark()
        else:
            self.action_move(1)


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
            foot = Line(f"the run is {model.state}   escape: close", theme.style("dim"))
            return [*lines, *answer_lines(self.record, model, width, theme), Line(), foot]
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
        lines += [Line(), button_line("Yes, stop", self.yes, theme)]
        return lines
