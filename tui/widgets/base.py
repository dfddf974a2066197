"""Base of the widgets (line painting, scrolling list, input line), and the fixed parts of a screen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from textual.binding import Binding
from textual.events import Key
from textual.keys import format_key
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ...protocol.messages.control import Alert
from ...protocol.text import counted
from .alerts import alert_line
from .drawing import Line, Theme, ruled, spread, tail
from .header import Summary, first_line, scrubber, summary_lines
from .state import AppState, summary_of


class Canvas(Widget, can_focus=False):
    """A widget that draws ``Line``s.

    A subclass defines ``draw`` (the lines, at most as many as the widget is high). Where drawing is expensive, it also
    defines ``key`` (a small value that changes whenever the drawing would). A drawing as before is not refreshed.
    """

    ALLOW_SELECT = False
    _lines: list[Line]
    _strips: list[Strip]
    _last_key: Any = None

    def __init__(self, app_state: AppState, name: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=name, classes=classes)
        self.app_state = app_state
        self._lines = []
        self._strips = []

    @property
    def theme(self) -> Theme:
        return self.app_state.theme

    def key(self) -> Any:
        """Return a value that changes whenever the drawing would; None: always draw."""
        return None

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the lines, top to bottom, each at most ``width`` cells wide."""
        raise NotImplementedError

    def tick(self, force: bool = False) -> None:
        """Draw again if the key changed, and refresh the widget if the drawing did."""
        width, height = self.size
        if not width or not height or not self.is_mounted:
            return
        key = (self.key(), width, height, id(self.theme))
        if not force and key[0] is not None and key == self._last_key:
            return
        self._last_key = key
        base = self.theme.base
        try:
            lines = [line.fit(width, base) for line in self.draw(width, height)[:height]]
        except (ArithmeticError, ValueError, OSError) as error:
            # A recording may contain figures outside any calendar or graph; the other widgets are still drawn.
            lines = [Line(f" cannot be drawn: {type(error).__name__}: {error}", base).fit(width, base)]
        lines.extend(Line(" " * width, base) for _ in range(height - len(lines)))
        if [line.parts for line in lines] != [line.parts for line in self._lines]:
            self._lines, self._strips = lines, [line.strip() for line in lines]
            self.refresh()

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips) and self._strips[y].cell_length == self.size.width:
            return self._strips[y]
        return Strip.blank(self.size.width, self.theme.base)

    def on_resize(self) -> None:
        self.tick(force=True)

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        self.tick(force=True)

    @property
    def plain(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self._lines)


_Item = TypeVar("_Item")


class Listing(Canvas, Generic[_Item]):
    """A list with one line per item. A subclass lists the items and draws one."""

    selected = 0
    top = 0
    follow = False  # keep the last item selected as items are added
    empty = "nothing here"

    def items(self) -> Sequence[_Item]:
        raise NotImplementedError

    def item(self, item: _Item, width: int, selected: bool) -> Line:
        raise NotImplementedError

    @property
    def chosen(self) -> _Item | None:
        """The selected item; None in an empty list."""
        items = self.items()
        return items[min(self.selected, len(items) - 1)] if items else None

    def head(self, width: int) -> list[Line]:
        return []

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the visible items, with a scroll mark at the right if there are more."""
        head, items = self.head(width), self.items()
        total = len(items)
        room = max(1, height - len(head))
        if self.follow:
            self.selected = max(0, total - 1)
        self.selected = max(0, min(self.selected, total - 1))
        self.top = max(0, min(max(self.selected - room + 1, min(self.top, self.selected)), total - room))
        if not total:
            return [*head, Line(f" {self.empty}", self.theme.style("dim"))]
        lines = [
            self.item(item, width - 1, index == self.selected).fit(width - 1, self.theme.base)
            for index, item in enumerate(items[self.top : self.top + room], self.top)
        ]
        return [*head, *scroll_marked(lines, self.top, total, room, self.theme)]

    def move(self, delta: int) -> None:
        self.selected = max(0, min(self.selected + delta, len(self.items()) - 1))
        self.follow = False
        self.tick(force=True)

    def page(self, direction: int) -> None:
        self.move(direction * max(1, self.size.height - 2))

    def go_to(self, index: int) -> None:
        """Select an item; -1 is the last."""
        self.selected = index if index >= 0 else max(0, len(self.items()) - 1)
        self.tick(force=True)


def scroll_marked(lines: list[Line], top: int, total: int, room: int, theme: Theme) -> list[Line]:
    """Return lines with a scroll mark at their right if there are more than ``room``; ``top``: the first visible."""
    size = max(1, room * room // total) if total > room else 0
    begin = round(top / max(1, total - room) * (room - size))
    for index, line in enumerate(lines):
        inside = size and begin <= index < begin + size
        line.add(theme.glyphs.scroll if inside else " ", theme.style("faint"))
    return lines


class SummaryBar(Canvas):
    """The top of a screen: two lines, or one if its height is one."""

    def draw(self, width: int, height: int) -> list[Line]:
        source = self.app_state.source
        summary = summary_of(source.model, source.connection, self.app_state.read_only) if source else Summary("no run")
        return [first_line(summary, width, self.theme)] if height == 1 else summary_lines(summary, width, self.theme)


class AlertStrip(Canvas):
    """A rule with the scale of graphs, and the latest alerts."""

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the rule and the alerts: unresolved ones first, then the newest."""
        theme, alerts = self.theme, self.app_state.model.alerts
        lines = [self._rule(width)]
        shown = pressing(list(alerts))[: height - 1]
        if not shown:
            lines.append(Line(f" {theme.glyphs.resolved} nothing to report", theme.style("dim")))
        for index, alert in enumerate(shown):
            lines.append(alert_line(alert, width, theme, hint="a: why" if index == 0 else ""))
        return lines

    def _rule(self, width: int) -> Line:
        theme, counts = self.theme, self.app_state.model.alerts.counts()
        right = Line()
        for severity in ("error", "warning"):
            if counts[severity]:
                glyph, tone = theme.severity(severity)
                right.add(f" {glyph} {counts[severity]}", theme.style(tone, bold=True))
        total = len(self.app_state.model.alerts)
        right.add(f" {'of ' if right.width else ''}{counted(total, 'alert')} ", theme.style("dim"))
        return ruled(Line(f" {self.app_state.scale_words} ", theme.style("dim")), right, width, theme)


def pressing(alerts: list[Alert]) -> list[Alert]:
    """Return alerts by urgency: unresolved ones, newest first, then resolved ones."""
    return sorted(alerts, key=lambda alert: (alert.resolved is None, alert.time, alert.id), reverse=True)


class ReplayBar(Canvas):
    """The scrubber of a replay or of a rewound live run."""

    def draw(self, width: int, height: int) -> list[Line]:
        source = self.app_state.source
        return [scrubber(source.transport, source.model.leading_step, width, self.theme)] if source else []


class KeyBar(Canvas):
    """The keys of the visible screen on one line, the most needed first; messages replace it for a few seconds."""

    def shown_bindings(self) -> list[Binding]:
        """Return the bindings on the bar: the screen's own first, in a replay those of the replay first."""
        own = {binding.action for binding in type(self.screen).BINDINGS if isinstance(binding, Binding)}
        found: dict[str, Binding] = {}
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            applies = binding.action != "app.oom" or self._any_oom
            applies = self.app_state.can_act if binding.action in _ACTING else applies
            if binding.show and enabled and applies:
                found.setdefault(binding.action, binding)
        replaying = self.app_state.replaying
        return sorted(found.values(), key=lambda one: (one.action != "app.back", (one.action in own) == replaying))

    @property
    def _any_oom(self) -> bool:
        source = self.app_state.source
        later = source is not None and source.transport.mode == "replay" and source.transport.first_alert("oom")
        return bool(self.app_state.model.ooms or later)

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw as many keys as fit, always with those that end the run, help and detach."""
        text, tone = self.app_state.message
        if text:
            return [Line(f" {text}", self.theme.style(tone, bold=True))]
        entries = [(binding.action in _ALWAYS, self._entry(binding)) for binding in self.shown_bindings()]
        left, right = Line(" ", self.theme.base), Line()
        for always, entry in entries:
            right.join(entry if always else Line())
        for entry in (entry for always, entry in entries if not always):
            if left.width + entry.width + right.width > width:
                break
            left.join(entry)
        return [spread(left, right, width, self.theme.base)]

    def _entry(self, binding: Binding) -> Line:
        key = binding.key_display or key_words(binding, self.theme)
        label = binding.description
        source = self.app_state.source
        if binding.action == "app.transport('toggle')" and source is not None and not source.transport.playing:
            label = "play"
        return Line(key, self.theme.style("accent", bold=True)).add(f" {label}  ", self.theme.style("dim"))


_ALWAYS = ("app.kill", "app.stop", "app.help", "app.detach")

_ACTING = ("app.kill", "app.stop", "app.stacks", "compose", "arm", "take")


def key_name(key: str) -> str:
    """Return a key's character, or its name if it has none: ``?`` of ``question_mark``, ``enter``."""
    sign = format_key(key)
    return sign if len(sign) == 1 and sign.isascii() else key


def key_words(binding: Binding, theme: Theme) -> str:
    """Return a binding's key as labelled on a keyboard."""
    keys = theme.glyphs.keys
    return " ".join(keys.get(key) or key_name(key).replace("ctrl+", "^") for key in binding.key.split(","))


class Prompt(Canvas, can_focus=True):
    """One editable line. Enter and escape post ``Done``; every change posts ``Changed``."""

    @dataclass
    class Changed(Message):
        """The text changed."""

        text: str

    @dataclass
    class Done(Message):
        """Enter (``accepted``) or escape was pressed."""

        text: str
        accepted: bool

    def __init__(self, app_state: AppState, label: str, hint: str = "", name: str | None = None) -> None:
        super().__init__(app_state, name=name)
        self.label, self.hint = label, hint
        self.text = ""

    def draw(self, width: int, height: int) -> list[Line]:
        theme = self.theme
        line = Line(f" {self.label} ", theme.style("accent", bold=True))
        room = max(1, width - line.width - 2)
        line.add(tail(self.text, room), theme.base)
        if self.has_focus:
            line.add(" ", theme.style("background", "accent", reverse=not theme.color))
        if not self.text and self.hint:
            line.add(f" {self.hint}", theme.style("faint"))
        return [line]

    def on_key(self, event: Key) -> None:
        if event.key in ("enter", "escape"):
            event.stop().prevent_default()
            self.post_message(self.Done(self.text, event.key == "enter"))
            return
        if event.key in ("backspace", "ctrl+h"):
            changed = self.text[:-1]
        elif event.key in ("ctrl+u", "ctrl+w"):
            changed = ""
        elif event.is_printable and event.character:
            changed = self.text + event.character
        else:
            return
        event.stop().prevent_default()
        self.text = changed
        self.tick()
        self.post_message(self.Changed(self.text))
