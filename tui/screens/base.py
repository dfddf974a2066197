"""Base of the full screens (summary, replay bar, keys, minimum size), and the help screen."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import Screen
from textual.widget import Widget

from ..widgets.base import Canvas, KeyBar, Listing, Prompt, ReplayBar, SummaryBar, key_words
from ..widgets.drawing import Line, wrap
from ..widgets.legend import LEGENDS
from ..widgets.state import AppState, trouble_words
from .dialogs import Dialog
from .kill import suggested

SMALLEST = (60, 16)
TALL = 30  # minimum rows with room for more alerts


def key(keys: str, action: str, label: str, what: str, show: bool = True, bar: str | None = None) -> Binding:
    """Return a binding; ``label`` is for the key bar (after ``bar``, if given), ``what`` for help and the palette."""
    return Binding(keys, action, label, show=show, key_display=bar, tooltip=what)


HELP_KEYS: list[BindingType] = [
    key("ctrl+p", "app.command_palette", "commands", "every action by name", show=False),
    key("ctrl+z", "app.suspend_process", "suspend", "back to the shell; fg returns", show=False),
    key("ctrl+l", "app.redraw", "redraw", "draw everything again, as after another program's output", show=False),
    key("question_mark", "app.help", "help", "explain this screen, its signs and keys"),
]

FILE_KEYS: list[BindingType] = [key("t", "app.theme", "theme", "light or dark", show=False), *HELP_KEYS]
"""Keys of every screen on a file: a snapshot, the results of a sweep."""
LINE_KEYS: list[BindingType] = [
    key("up", "move(-1)", "up", "one line up", show=False),
    key("down", "move(1)", "down", "one line down", show=False),
    key("pageup", "page(-1)", "page up", "a screen up", show=False),
    key("pagedown", "page(1)", "page down", "a screen down", show=False),
]
"""Keys of a list of lines."""
BACK = key("escape", "app.back", "back", "back to the overview")
TRAINING = key("t", "app.training", "training", "loss, evaluations, learning rate, speed and MFU over the run")
ALERTS = key("a", "app.alerts", "alerts", "all alerts, each with its evidence")
MEMORY = key("m", "app.memory", "memory", "where the memory of a step's peak goes")
LOGS = key("l", "app.logs", "logs", "the output of all ranks")
STACKS = key("s", "app.stacks", "stacks", "where every rank is: Python stacks, equal ones together")
EVENTS = key("e", "app.events", "events", "what the allocator does, by phase")
"""Keys of the screens of a run."""


def hidden(binding: Binding) -> Binding:
    """Return a binding that is not on the key bar."""
    return replace(binding, show=False)


COMMON_KEYS: list[BindingType] = [
    key("k", "app.kill", "kill", "end ranks, or the run; asks first"),
    key("S", "app.stop", "stop", "save a checkpoint and end the run; asks first"),
    key("space", "app.transport('toggle')", "pause", "pause or resume the view (the run itself continues)"),
    key("left_square_bracket", "app.transport('step', -1)", "step back", "one step back", show=False),
    key("right_square_bracket", "app.transport('step', 1)", "step", "one step forward", bar="[ ]"),
    key("left_curly_bracket", "app.transport('skip', -10)", "10 s back", "ten seconds back", show=False),
    key("right_curly_bracket", "app.transport('skip', 10)", "10 s", "ten seconds forward", bar="{ }"),
    key("plus,equals_sign", "app.transport('faster')", "speed", "play faster, up to 64x", bar="+ -"),
    key("minus", "app.transport('slower')", "slower", "play slower, down to 0.25x", show=False),
    key("n", "app.transport('next_alert')", "alert", "jump to the next alert"),
    key("N", "app.transport('previous_alert')", "alert before", "jump to the previous alert", show=False),
    key("o", "app.oom", "oom", "out-of-memory errors: why, what to try, and what can be done now"),
    key("J", "app.jobs", "jobs", "the jobs of the run: steps, peaks, loss and end of each training that it started"),
    key("g", "app.goto", "go to", "go to a step or a time"),
    key("L", "app.transport('live')", "live", "back to the live end of the run", show=False),
    key("comma", "app.finer", "finer", "graphs: less time a column", show=False),
    key("full_stop", "app.coarser", "coarser", "graphs: more time a column", show=False),
    key("d", "app.theme", "light/dark", "switch between the light and the dark theme", show=False),
    key("R", "app.runs", "runs", "the list of live and recorded runs", show=False),
    *HELP_KEYS,
    key("q", "app.detach", "detach", "leave; the training continues"),
]


class TooSmall(Canvas):
    """Shown in a terminal too small for the screens."""

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw what is wrong with the run, if anything is, then the terminal's size and the required one."""
        size, theme, model = self.app.size, self.theme, self.app_state.model
        text = f"terminal {size.width}x{size.height} is too small:"
        remedy = f"ftmon needs {SMALLEST[0]}x{SMALLEST[1]}"
        trouble = trouble_words(model) or (f"{model.state}: {model.state_text}" if model.state == "failed" else "")
        lines = [Line(f"{theme.glyphs.error} {row}", theme.style("error")) for row in wrap(trouble, width - 2) if row]
        lines += [Line()] * max(0, (height - 3) // 2 - len(lines))
        for row, tone in ((text, "warning"), (remedy, "text"), ("q: detach", "dim")):
            lines.append(Line(row.center(width), theme.style(tone)))
        return lines


class MonitorScreen(Screen[Any]):
    """A screen of one run. A subclass defines its body, and updates it in ``tick``."""

    BINDINGS: ClassVar[list[BindingType]] = COMMON_KEYS
    AUTO_FOCUS: ClassVar[str | None] = ""  # else a filter would receive every key
    TITLE_LINES: int = 2
    NAME = ""
    WHAT = ""
    inherits_keys = True
    """Whether the keys of a run apply to it; a class without them also has ``inherit_bindings=False``."""
    HIDDEN: ClassVar[frozenset[str]] = frozenset()  # actions of the app that do not apply to this screen
    LEGEND: ClassVar[tuple[str, ...]] = ()
    """Parts of the legend that belong to the screen: names of ``widgets.legend.LEGENDS``."""

    def __init__(self, app_state: AppState) -> None:
        super().__init__()
        self.app_state = app_state

    def body(self) -> Iterable[Widget]:
        return ()

    def compose(self) -> ComposeResult:
        yield TooSmall(self.app_state, name="small")
        yield SummaryBar(self.app_state, name="summary", classes="short" if self.TITLE_LINES == 1 else None)
        yield from self.body()
        yield ReplayBar(self.app_state, name="replay")
        yield KeyBar(self.app_state, name="keys")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Ignore keys typed ahead of the screen: its widgets are not there yet."""
        return self.is_mounted

    def on_mount(self) -> None:
        self.tick()

    def on_screen_resume(self) -> None:
        self.tick()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width < SMALLEST[0] or event.size.height < SMALLEST[1], "small")
        self.set_class(event.size.height >= TALL, "tall")
        self.call_after_refresh(self.tick)

    def tick(self) -> None:
        """Draw changes; called by the app's timer."""
        self.set_class(self.app_state.replaying, "replaying")
        for widget in [child for child in self.children if isinstance(child, Canvas) and child.display]:
            widget.tick()

    def in_question(self) -> set[int]:
        """Return the ranks that a kill from this screen suggests."""
        return suggested(self.app_state.model, self.app_state.selected)


class ListScreen(MonitorScreen):
    """A screen with a list, and maybe a line to filter it by a text."""

    def filter_by(self, text: str) -> None:
        """Show only what contains a text; empty: everything."""
        raise NotImplementedError

    def action_move(self, delta: int) -> None:
        self.query_one(Listing).move(delta)

    def action_page(self, direction: int) -> None:
        self.query_one(Listing).page(direction)

    def action_filter(self) -> None:
        self.add_class("filtering")
        self.query_one(Prompt).focus()

    def on_prompt_changed(self, event: Prompt.Changed) -> None:
        self.filter_by(event.text)
        self.tick()

    def on_prompt_done(self, event: Prompt.Done) -> None:
        prompt = self.query_one(Prompt)
        if not event.accepted:
            prompt.text = ""
            self.filter_by("")
        self.set_class(bool(prompt.text), "filtering")
        self.set_focus(None)
        self.tick()


class SelectedRankScreen(MonitorScreen):
    """A screen of the selected rank, with an action that selects a neighbour."""

    def in_question(self) -> set[int]:
        return {self.app_state.selected}

    def action_rank(self, delta: int) -> None:
        ranks = list(self.app_state.model.ranks)
        if self.app_state.selected in ranks:
            index = ranks.index(self.app_state.selected) + delta
            self.app_state.select(ranks[max(0, min(index, len(ranks) - 1))])
        self.tick()


class HelpScreen(Dialog):
    """Explains the screen behind it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "close", "close", tooltip="close help"),
        Binding("down,j,space,pagedown", "scroll(1)", "more", tooltip="further down"),
        Binding("up,k,pageup", "scroll(-1)", "back", tooltip="further up"),
    ]
    WIDTH = 96

    def __init__(self, app_state: AppState, behind: MonitorScreen) -> None:
        super().__init__(app_state)
        self.behind = behind
        self.top = 0

    def content(self, width: int) -> list[Line]:
        theme = self.theme
        lines = [Line(f"{self.behind.NAME}", theme.style("accent", bold=True)), Line()]
        lines += [Line(row, theme.base) for row in wrap(self.behind.WHAT, width - 2)]
        for part in self.behind.LEGEND:
            lines += [Line(), *LEGENDS[part](theme)]
        lines += [Line(), Line("keys", theme.style("accent", bold=True))]
        for binding in self._bindings_of_behind():
            keys = key_words(binding, theme)
            line = Line(f"  {keys:<12}", theme.style("text", bold=True))
            lines.append(line.add(binding.tooltip or binding.description, theme.style("dim")))
        return lines

    def _bindings_of_behind(self) -> list[Binding]:
        own = [binding for binding in type(self.behind).BINDINGS if isinstance(binding, Binding)]
        inherited = MonitorScreen.BINDINGS if self.behind.inherits_keys else []
        common = [binding for binding in inherited if isinstance(binding, Binding)]
        actions, keys = {each.action for each in own}, {each for binding in own for each in binding.key.split(",")}
        return [*own, *(each for each in common if each.action not in actions and each.key not in keys)]

    def lines(self, width: int, height: int) -> list[Line]:
        """Draw the visible part, and the keys that show the rest."""
        content = self.content(width)
        if len(content) <= height:
            return content
        room = height - 1
        self.top = max(0, min(self.top, len(content) - room))
        at = f"{self.top + 1} to {min(len(content), self.top + room)} of {len(content)}"
        foot = Line(f"{at}   up, down: scroll   escape: close", self.theme.style("dim"))
        return [*content[self.top : self.top + room], foot]

    def action_scroll(self, direction: int) -> None:
        self.top += direction * max(1, self.panel.size.height // 2)
        self.panel.tick(force=True)
