"""The fixed parts of a screen: summary at the top; alert strip, replay bar and keys at the bottom."""

from textual.binding import Binding

from ....protocol.messages.control import Alert
from ....protocol.text import counted
from ..drawing.line import Line, spread
from ..drawing.theme import Theme, ruled
from ..lines.alert_lines import alert_line
from ..lines.scrubber import scrubber
from ..lines.summary import Summary, first_line, summary_lines
from ..state.view_models import summary_of
from .canvas import Canvas


class SummaryBar(Canvas):
    """The top of a screen: two lines, or one if its height is one."""

    def key(self) -> Summary:
        source = self.app_state.source
        if source is None:
            return Summary("no run")
        return summary_of(source.model, source.connection, self.app_state.read_only)

    def draw(self, width: int, height: int) -> list[Line]:
        summary = self.key()
        return [first_line(summary, width, self.theme)] if height == 1 else summary_lines(summary, width, self.theme)


class AlertStrip(Canvas):
    """A rule with the scale of graphs, and the latest alerts."""

    def key(self) -> tuple[object, ...]:
        alerts = self.app_state.model.alerts
        return id(alerts), alerts.version, self.app_state.scale_words

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

    def key(self) -> object:
        source = self.app_state.source
        if source is None:
            return ()
        at, step = source.transport, source.model.leading_step
        return int(at.position), int(at.last), at.playing, at.speed, step, tuple(at.marks)

    def draw(self, width: int, height: int) -> list[Line]:
        source = self.app_state.source
        return [scrubber(source.transport, source.model.leading_step, width, self.theme)] if source else []


class KeyBar(Canvas):
    """The keys of the visible screen on one line, the most needed first; messages replace it for a few seconds."""

    def key(self) -> object:
        transport = self.app_state.source.transport if self.app_state.source else None
        keys = tuple(binding.key for binding in self.shown_bindings())
        return self.app_state.message, keys, transport is not None and transport.playing

    def shown_bindings(self) -> list[Binding]:
        """Return the bindings on the bar: the screen's own first, in a replay those of the replay first."""
        own = {binding.action for binding in type(self.screen).BINDINGS if isinstance(binding, Binding)}
        found: dict[str, Binding] = {}
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            applies = (
                self.app_state.can_act if binding.action in _ACTING else binding.action != "app.oom" or self._any_oom
            )
            if binding.show and enabled and applies:
                found.setdefault(binding.action, binding)
        back = [binding for binding in found.values() if binding.action == "app.back"]
        rest = [binding for binding in found.values() if binding.action != "app.back"]
        return back + sorted(rest, key=lambda binding: (binding.action in own) == self.app_state.replaying)

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
        bindings = self.shown_bindings()
        last = [binding for binding in bindings if binding.action in _ALWAYS]
        first = [binding for binding in bindings if binding not in last]
        right = Line()
        for binding in last:
            right.join(self._entry(binding))
        left = Line(" ", self.theme.base)
        for binding in first:
            entry = self._entry(binding)
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
"""Actions whose keys are on the bar at every width."""

_ACTING = ("app.kill", "app.stop", "app.stacks", "compose", "arm", "take")
"""Actions that need a hub."""


_NAMES = {
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "slash": "/",
    "ctrl+p": "^p",
    "ctrl+l": "^l",
    "ctrl+z": "^z",
    "comma": ",",
    "full_stop": ".",
}


def key_words(binding: Binding, theme: Theme) -> str:
    """Return a binding's key as labelled on a keyboard."""
    return " ".join(theme.glyphs.keys.get(key, _NAMES.get(key, key)) for key in binding.key.split(","))
