"""Draws alerts, the code that caused a spike, and lines of a rank's output."""

from collections.abc import Mapping
from typing import Any

from ...protocol import text
from ...protocol.analysis.findings.finding import Shown
from ...protocol.analysis.kinds import shown
from ...protocol.messages.control import Alert
from ...protocol.messages.memory import Cause
from ...protocol.messages.telemetry import StackGroup
from ...protocol.text import duration, sanitize
from ..model import oom
from ..model.alerts import LogEntry
from .drawing import UNICODE, Glyphs, Line, Theme, gib, marked, spread, wrap
from .header import time_of_day

SHORT_LIST = 3


def cause_lines(
    cause: Cause, verdict: oom.SpikeVerdict | None, width: int, theme: Theme, unfolded: bool = False
) -> list[Line]:
    """Draw a cause: a head, the hub's verdict, the evidence, and its stacks.

    ``unfolded``: all stacks with all frames, instead of the first ones in short.
    """
    lines = [cause_head(cause, theme)]
    for index, words in enumerate(oom.verdict_words(verdict) if verdict is not None else []):
        style = theme.style("text" if index else "accent", bold=not index)
        lines += [Line("   " + row, style) for row in wrap(words, width - 4)]
    lines += [Line("   " + row, theme.style("dim")) for row in wrap(oom.evidence_words(cause), width - 4)]
    if cause.note:
        lines += [Line("   " + row, theme.style("dim")) for row in wrap(cause.note, width - 4)]
    shown = cause.groups if unfolded else cause.groups[:SHORT_LIST]
    for group in shown:
        lines.append(_group_line(group, oom.shown_bytes(cause, group), width, theme))
        if unfolded:
            lines += _frames(group, width, theme)
    rest = len(cause.groups) - len(shown)
    if cause.groups and not unfolded:
        more = f"{rest} more stack{'' if rest == 1 else 's'}, all frames" if rest else "all frames"
        lines.append(Line(f"   enter: {more}", theme.style("faint")))
    return lines


def cause_head(cause: Cause, theme: Theme) -> Line:
    """Draw phase, size and step of a cause."""
    stayed = cause.reason == "leak"
    line = Line(f" {theme.glyphs.spike} ", theme.style("warning", bold=True))
    line.add(f"{sanitize(cause.phase, 20) or 'step'} ", theme.style(bold=True))
    line.add(f"+{text.gib(cause.transient_bytes)}", theme.style("warning", bold=True))
    what, by = ("stayed after", ", allocated by") if stayed else ("allocated and freed in", " by")
    return line.add(f" {what} step {cause.step:,}{by}", theme.base)


def _group_line(group: StackGroup, size: int, width: int, theme: Theme) -> Line:
    line = Line(f"   {text.gib(size):>10} ", theme.base)
    line.add(f"{theme.glyphs.times}{group.count:<5,} ", theme.style("dim"))
    innermost, own = oom.group_parts(group)
    line.add(theme.cut(innermost, width - line.width), theme.base if group.frames else theme.style("dim"))
    room = width - line.width - 4
    if own and room > 12:
        line.add(f" {theme.glyphs.back} ", theme.style("dim"))
        line.add(theme.cut(own, room), theme.style("accent"))
    return line


def _frames(group: StackGroup, width: int, theme: Theme) -> list[Line]:
    parts = (oom.frame_parts(frame) for frame in reversed(group.frames))
    return [
        Line(theme.cut(" " * 20 + words, width - 1), theme.style("dim" if library else "accent"))
        for words, library in parts
    ]


_EPOCH = 1e9  # smallest figure that is a time of day: seconds since 1970, in 2001


def alert_line(alert: Alert, width: int, theme: Theme, selected: bool = False, hint: str = "") -> Line:
    """Draw one alert on one line: time, severity, title, and at the right whether it is resolved."""
    ground = "raised" if selected else "background"
    glyph, tone = theme.severity(alert.severity)
    over = alert.resolved
    line = Line(f" {time_of_day(alert.time)} ", theme.style("dim", ground))
    line.add(glyph + " ", theme.style("dim" if over is not None else tone, ground, bold=over is None))
    right = Line()
    if alert.count > 1:
        right.add(f" {theme.glyphs.times}{alert.count}", theme.style("dim", ground))
    if over is not None:
        right.add(
            f" {theme.glyphs.resolved} over after {duration(max(0, over - alert.time))}", theme.style("dim", ground)
        )
    if hint:
        right.add(f" {hint}", theme.style("faint", ground))
    right.add(" ", theme.style("text", ground))
    title = theme.cut(sanitize(alert.title), width - line.width - right.width)
    line.add(title, theme.style("dim" if over is not None else "text", ground, bold=selected))
    return spread(line, right, width, theme.style("text", ground))


def alert_detail(
    alert: Alert, width: int, theme: Theme, cause: Cause | None = None, unfolded: bool = False
) -> list[Line]:
    """Draw an alert's details: title, place, explanation, the code that caused it if known, the evidence."""
    base, dim = theme.base, theme.style("dim")
    glyph, tone = theme.severity(alert.severity)
    lines = marked(f" {glyph} ", theme.style(tone, bold=True), alert.title, width - 1, theme.style(bold=True))
    named = "ranks " + ", ".join(map(str, alert.ranks[:12])) + (" ..." if len(alert.ranks) > 12 else "")
    where = (
        time_of_day(alert.time),
        alert.kind,
        (named if alert.ranks else "") if alert.rank is None else f"rank {alert.rank}",
        "" if alert.step is None else f"step {alert.step:,}",
        alert.phase,
        f"{alert.count} times" if alert.count > 1 else "",
        "" if alert.resolved is None else f"over after {duration(max(0, alert.resolved - alert.time))}",
    )
    lines += [Line("   " + f" {theme.glyphs.dot} ".join(filter(None, where)), dim), Line()]
    for paragraph in oom.text_without_remedy(alert).splitlines():
        lines += [Line("   " + row, base) for row in wrap(paragraph, width - 5)]
    lines += _cause(alert, cause, width, theme, unfolded)
    evidence = oom.other_evidence(alert)
    if evidence:
        lines += [Line(), Line("   evidence", theme.style("accent", bold=True))]
        lines += evidence_lines(evidence, width, theme)
    return lines


def _cause(alert: Alert, cause: Cause | None, width: int, theme: Theme, unfolded: bool) -> list[Line]:
    verdict, groups = oom.verdict_of(alert), oom.evidence_groups(alert)
    if cause is not None:
        return [Line(), *cause_lines(cause, verdict, width, theme, unfolded)]
    if verdict is None and not groups:
        return []
    lines = [Line(), Line("   cause", theme.style("accent", bold=True))]
    for words in oom.verdict_words(verdict) if verdict is not None else []:
        lines += [Line("   " + row, theme.base) for row in wrap(words, width - 5)]
    return [*lines, *(_group_line(group, group.bytes, width, theme) for group in groups)]


def evidence_lines(
    evidence: Mapping[str, Any], width: int, theme: Theme, indent: int = 3, of: Shown | None = None
) -> list[Line]:
    """Draw evidence as words and figures with units; ``of``: the key whose value this mapping is."""
    base, dim = theme.base, theme.style("dim")
    rows_of = [(_shown(key, value, of), value) for key, value in evidence.items()]
    rows_of = [(words, value) for words, value in rows_of if words.words]
    label = min(max((len(words.words) for words, _ in rows_of), default=0), width // 2)
    lines: list[Line] = []
    for words, value in rows_of:
        head = Line(" " * indent + words.words.ljust(label) + "  ", dim)
        if isinstance(value, dict) and value:
            lines.append(head)
            inner = {str(name): one for name, one in value.items()}  # pids are numbers
            lines += evidence_lines(inner, width, theme, indent + 2, words)
            continue
        text = figure(words.unit, value, theme.glyphs)
        rows = [piece for part in text.splitlines() or [""] for piece in wrap(part, max(10, width - head.width - 1))]
        lines.append(head.add(rows[0], base))
        lines.extend(Line(" " * (indent + label + 2) + row, base) for row in rows[1:])
    return lines


def _shown(key: str, value: Any, of: Shown | None) -> Shown:
    if of is None:
        return shown(key, value)
    if of.by:
        return Shown(f"{of.by} {key}", of.unit)
    return Shown(key, of.unit) if of.unit else shown(key, value)


def figure(unit: str, value: Any, glyphs: Glyphs = UNICODE) -> str:
    """Format one piece of evidence in its unit (``Shown.unit``)."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not known"}[value]
    if isinstance(value, int | float):
        return _number(unit, value, glyphs)
    if isinstance(value, dict):
        parts = [(shown(key, one), one) for key, one in value.items() if one not in ("", None, 0)]
        return ", ".join(f"{words.words} {figure(words.unit, one, glyphs)}" for words, one in parts if words.words)
    if isinstance(value, list | tuple) and unit == "shape":
        return f" {glyphs.times} ".join(map(str, value)) or "none"
    if isinstance(value, list | tuple):
        separate = any(isinstance(item, dict) or len(str(item)) > 24 for item in value)
        return ("\n" if separate else ", ").join(figure(unit, item, glyphs) for item in value) or "none"
    return "\n".join(sanitize(row) for row in str(value).splitlines())


def _number(unit: str, value: float, glyphs: Glyphs) -> str:
    if unit == "moment" and value > _EPOCH:
        return time_of_day(value)
    if unit in ("bytes", "bytes/s"):
        size = f"{gib(value)} GiB" if abs(value) >= 2**20 else f"{value:,.0f} B"
        return f"{size}{unit[5:]}"
    if unit in _SECONDS:
        return duration(value * _SECONDS[unit]) if value else "0 s"
    if unit == "share":
        return f"{value * 100:.3g} %"
    words = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if unit == "rank":
        return f"rank {words}"
    if unit == "times":
        return f"{words}{glyphs.times}"
    unit = glyphs.degree if unit == "°C" else unit
    return f"{words} {unit}" if unit and unit != "moment" else words


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def log_line(entry: LogEntry, width: int, theme: Theme, with_rank: bool = True, selected: bool = False) -> Line:
    """Draw time, rank and text; lines of standard error are marked."""
    ground = "raised" if selected else "background"
    line = Line(f" {time_of_day(entry.time)} ", theme.style("dim", ground))
    if with_rank:
        name = "launcher" if entry.rank < 0 else f"rank {entry.rank}"
        line.add(f"{name:<9}", theme.style("accent", ground))
    if entry.stream == "err":
        line.add("err  ", theme.style("warning", ground))
    text = theme.cut(sanitize(entry.text), max(0, width - line.width))
    return line.add(text, theme.style("text", ground)).fit(width, theme.style("text", ground))
