"""Base of the apps (themes, actions by name) and of the full screens; the help screen with the legends of its signs."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.style import Style
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.driver import Driver
from textual.events import Resize
from textual.screen import Screen
from textual.theme import Theme as AppTheme
from textual.widget import Widget

from ..model.waterfall import LABELS
from ..source.base import Source
from ..widgets.base import Canvas, KeyBar, Listing, Prompt, ReplayBar, SummaryBar, key_name, key_words
from ..widgets.drawing import ASCII, DARK, LIGHT, Line, Palette, Theme, choose, wrap
from ..widgets.memory import PART_FILLS
from ..widgets.plots import FILLS, SHORT, sign_of
from ..widgets.screen_output import ScreenOutput
from ..widgets.state import AppState, trouble_words
from .dialogs import Dialog, suggested

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
EVENTS = key("e", "app.events", "events", "what the allocator does, by phase")  # keys of the screens of a run


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
    LEGEND: ClassVar[tuple[str, ...]] = ()  # parts of the legend that belong to the screen: names of `LEGENDS`

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


STATE_WORDS = {
    "starting": "its process is up, no step is finished yet",
    "training": "it makes progress",
    "waiting": "it is in a collective that others have not entered",
    "hung": "no progress for longer than the phase's time limit",
    "held": "it waits at an out-of-memory error (--on-oom hold)",
    "stopped": "the process is stopped (SIGSTOP)",
    "gone": "there is no process any more",
    "unreachable": "no messages arrive from its host",
    "finished": "it ended without an error",
}

PHASE_WORDS = {
    "data": "waiting for the next batch",
    "generate": "generation (the rollout of a step)",
    "forward": "forward pass",
    "backward": "backward pass, gradient reduction included",
    "optimizer": "optimizer step",
    "wait": "inside collective calls (not part of the phases)",
    "other": "between phases, evaluations, checkpoints",
}

PART_WORDS = {
    "parameters": "the model's weights as it computes with them",
    "gradients": "gradients of the weights",
    "optimizer_states": "Adam's moments and the like",
    "master_copies": "the weights that mixed precision updates",
    "partitions": "ZeRO's flat partitions that are none of these",
    "buckets": "communication and reduction buffers",
    "activations": "saved in a forward for its backward",
    "temporaries": "allocated and freed within the phase",
    "other": "held by PyTorch, of no known use",
    "unattributed": "allocated, of unknown purpose",
    "untraced": "on the CPU: code, libraries, and what glibc's malloc keeps after free",
    "unused": "reserved by the allocator, not allocated",
}


def _legend(title: str, rows: Iterable[tuple[str, Style, str, str]], theme: Theme, lead: str = "  ") -> list[Line]:
    """Draw a title, and a line for each sign: the sign with its style, its name, and what it means."""
    lines = [Line(title, theme.style("accent", bold=True))]
    for sign, style, name, words in rows:
        lines.append(Line(lead, theme.base).add(sign, style).add(name, theme.base).add(words, theme.style("dim")))
    return lines


def _graph(theme: Theme) -> list[Line]:
    glyphs, spike = theme.glyphs, theme.style("warning", bold=True)
    behind = glyphs.reserved * 2 if theme.plain_graphs else "  "
    rows = [
        (glyphs.eighths[8] * 2, theme.style("allocated"), "", "  allocated (on a CPU: in use, by glibc)"),
        (behind, theme.style("text", "reserved"), "", "  reserved by the allocator (on a CPU: the resident set)"),
        (glyphs.peak * 2, theme.style("peak"), "", "  the highest peak of this rank so far"),
        (glyphs.spike + " ", spike, "", "  a spike: memory allocated and freed; n jumps to it, a explains it"),
    ]
    top = Line("  the top edge is the device's capacity, or after z the run's highest peak", theme.style("dim"))
    return [*_legend("memory", rows, theme), top]


def _fill(letters: Mapping[str, str], name: str, other: str, color: str, theme: Theme) -> tuple[str, Style]:
    return letters.get(name, other) * 2 if theme.plain_graphs else "  ", theme.style("on_color", color)


def _phases(theme: Theme) -> list[Line]:
    fills = ((*_fill(FILLS, name, "_", theme.phase(name), theme), name) for name in PHASE_WORDS)
    rows = [(sign, style, f"  {SHORT[name]:<6}", PHASE_WORDS[name]) for sign, style, name in fills]
    return _legend("shares of a step", rows, theme)


def _states(theme: Theme) -> list[Line]:
    signs = ((*theme.state(state), state) for state in STATE_WORDS)
    rows = [(f"  {glyph}   ", theme.style(tone), f"{state:<12}", STATE_WORDS[state]) for glyph, tone, state in signs]
    return _legend("states", rows, theme, lead="")


def _alerts(theme: Theme) -> list[Line]:
    words = {"error": "the run is blocked or ends", "warning": "needs attention", "info": "for information"}
    signs = ((*theme.severity(severity), text) for severity, text in words.items())
    rows = [(f"  {glyph}   ", theme.style(tone), "", text) for glyph, tone, text in signs]
    return _legend("alerts", rows, theme, lead="")


def _heat(theme: Theme) -> list[Line]:
    ramp = Line("  ", theme.base)
    for color in theme.palette.heat if theme.color else ():
        ramp.add(" ", theme.style("text", color))
    words = "  a rank's peak as a share of its device, in percent (small cells: tens of percent)"
    return [*_legend("heat map", (), theme), ramp.add(words, theme.style("dim"))]


def _parts(theme: Theme) -> list[Line]:
    labels = LABELS | {"unused": "unused, reserved"}
    fills = ((*_fill(PART_FILLS, name, "?", theme.part(name), theme), name) for name in PART_WORDS)
    rows = [(sign, style, f"  {labels.get(name, name):<22}", PART_WORDS[name]) for sign, style, name in fills]
    return _legend("composition of a peak", rows, theme)


def _training(theme: Theme) -> list[Line]:
    points = "loss of single steps; where several share a dot, the lowest and the highest"
    signs = (
        (sign_of("points", theme), "dim", points),
        (sign_of("line", theme), "accent", "smoothed loss; below, the mean of the steps"),
        (sign_of("marks", theme), "warning", "loss of an evaluation"),
        ("c", "good", "a checkpoint; C is the best so far"),
        ("E", "accent", "the training stopped early"),
    )
    rows = [(sign, theme.style(tone), "", f"   {words}") for sign, tone, words in signs]
    return _legend("curves and marks", rows, theme)


LEGENDS: dict[str, Callable[[Theme], list[Line]]] = {
    "graph": _graph,
    "phases": _phases,
    "states": _states,
    "alerts": _alerts,
    "heat": _heat,
    "parts": _parts,
    "training": _training,
}


def ordered_commands() -> "type[Provider]":
    """Return the palette's provider: commands in the order of ``get_system_commands``; Textual's sorts them by name."""
    from textual.command import DiscoveryHit, Hits  # only once the palette opens
    from textual.system_commands import SystemCommandsProvider

    class OrderedCommands(SystemCommandsProvider):
        async def discover(self) -> Hits:
            for title, help_text, callback, _ in self.app.get_system_commands(self.screen):
                yield DiscoveryHit(title, callback, help=help_text)

    return OrderedCommands


SCREENS = ("open", "training", "alerts", "memory", "logs", "stacks", "events", "oom", "jobs", "runs", "help")
"""Actions that open a screen, in the palette's order."""

ENDS = ("kill", "stop")

LAST = ("theme", "suspend_process", "redraw", "detach")


def palette_place(action: str) -> tuple[int, int]:
    """Return the place of an action in the palette: screens, ends of the run, what the screen does, the app itself."""
    name = action.removeprefix("app.")
    for group, names in ((0, SCREENS), (1, ENDS), (3, LAST)):
        if action.startswith("app.") and name in names:
            return group, names.index(name)
    return 2, 0


def _app_theme(palette: Palette) -> AppTheme:
    return AppTheme(
        name=palette.name,
        primary=palette.accent,
        secondary=palette.dim,
        accent=palette.accent,
        foreground=palette.text,
        background=palette.background,
        surface=palette.background,
        panel=palette.raised,
        success=palette.good,
        warning=palette.warning,
        error=palette.error,
        dark=palette.dark,
    )


class ThemedApp(App[None]):
    """An app in a light and a dark theme.

    ``ascii``: ASCII only, regardless of the locale. ``read_only``: refuse all commands to the run.
    """

    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ordered_commands}
    CSS_PATH = Path(__file__).parent.parent / "ftmon.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "detach", "detach", show=False, tooltip="leave"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding(
            "ctrl+z", "suspend_process", "suspend", show=False, priority=True, tooltip="back to the shell; fg returns"
        ),
    ]

    def __init__(
        self,
        source: Source | None = None,
        *,
        ascii: bool = False,  # noqa: A002  (the name of the option)
        light: bool = False,
        read_only: bool = False,
    ) -> None:
        no_color = bool(os.environ.get("NO_COLOR"))
        # With native ANSI colours Textual applies NO_COLOR as no colour at all, otherwise as shades of grey.
        super().__init__(ansi_color=True if no_color else None)
        for palette in (DARK, LIGHT):
            self.register_theme(_app_theme(palette))
        theme = Theme(LIGHT if light else DARK, ASCII if ascii else choose(False), color=not no_color)
        self.app_state = AppState(source, theme, read_only)
        self.output.ascii_only = theme.glyphs.is_ascii
        self.theme = theme.palette.name

    def get_driver_class(self) -> type[Driver]:
        """Return Textual's driver for this platform, which sends only changed cells (not on Windows)."""
        base = super().get_driver_class()
        self.output = output = ScreenOutput()
        if sys.platform == "win32":
            return base

        class ChangedCellsDriver(base):
            def write(self, data: str) -> None:
                with contextlib.suppress(OSError):
                    output.size = os.get_terminal_size(sys.__stderr__.fileno()) if sys.__stderr__ else None
                super().write(output.rewrite(data))

        return ChangedCellsDriver

    def on_resize(self, event: Resize) -> None:
        """Draw everything again: a terminal's own change is not known. This event also follows a suspension."""
        self.action_redraw()

    def repaint(self) -> None:
        raise NotImplementedError

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the actions of the visible screen: other screens first, then what ends the run, then the rest."""
        seen: set[str] = set()
        found = sorted(screen.active_bindings.values(), key=lambda active: palette_place(active.binding.action))
        for _, binding, enabled, tooltip in found:
            if binding.action in seen or not enabled or not binding.tooltip or binding.action == "command_palette":
                continue
            seen.add(binding.action)
            action = binding.action if "." in binding.action else f"screen.{binding.action}"
            title, run = (
                f"{binding.description}  ({key_name(binding.key)})",
                partial(self.call_later, self.run_action, action),
            )
            yield SystemCommand(title, tooltip or binding.tooltip, run)

    def action_detach(self) -> None:
        self.exit()

    def action_redraw(self) -> None:
        """Draw everything again, as after another program has written to the terminal."""
        self.output.forget()
        self.refresh(layout=True)

    def interrupt_words(self) -> str:
        """Return the answer to ctrl+c, which does not end the app."""
        return "q leaves"

    def action_interrupt(self) -> None:
        """Show how to leave: ctrl+c would often be meant for the training."""
        self.app_state.show_message(self.interrupt_words(), "warning")
        self.repaint()

    def action_suspend_process(self) -> None:
        """Stop this process group as ctrl+z does outside of the app; the shell's fg continues it."""
        if not has_job_control():
            self.app_state.show_message("ctrl+z: there is no shell to return to; q leaves", "warning")
            self.repaint()
        elif self._driver is not None and self._driver.can_suspend:
            self._suspend_signal()
            os.killpg(0, signal.SIGTSTP)  # the group, as a wrapper such as env or uv may be the shell's job

    def action_theme(self) -> None:
        before = self.app_state.theme
        palette = LIGHT if before.palette.dark else DARK
        self.app_state.theme = Theme(palette, before.glyphs, before.color)
        self.theme = palette.name
        self.repaint()


def has_job_control() -> bool:
    """Return whether a shell of this session would continue this process group: it is another group's child."""
    if sys.platform == "win32":
        return False
    import psutil

    try:
        group, session = os.getpgrp(), os.getsid(0)
        process = psutil.Process()
        while (parent := process.parent()) is not None and os.getpgid(parent.pid) == group:
            process = parent
        return parent is not None and os.getsid(parent.pid) == session
    except (psutil.Error, OSError):
        return False


_TICKS_A_SECOND = 2


class OneScreenApp(ThemedApp):
    """Shows ``MAIN_SCREEN``, which ``get_default_screen`` makes; ``HELP_SCREEN`` is its help."""

    MAIN_SCREEN: ClassVar[type[MonitorScreen]]
    HELP_SCREEN: ClassVar[type[HelpScreen]]

    def on_mount(self) -> None:
        self.set_interval(1 / _TICKS_A_SECOND, self.repaint)

    def repaint(self) -> None:
        # A closing app removes its screens before its timers.
        if self.is_running and isinstance(self.screen, self.MAIN_SCREEN):
            self.screen.tick()

    def action_help(self) -> None:
        if isinstance(self.screen, self.MAIN_SCREEN):
            self.push_screen(self.HELP_SCREEN(self.app_state, self.screen))
