"""Draws the code that caused a spike: its size, the cost of recording it, and the stacks with their bytes."""

from collections.abc import Sequence

from ....protocol.messages.blocks import StackGroup
from ....protocol.messages.memory import Cause
from ....protocol.text import gib, sanitize
from ...model.cause import SpikeVerdict, evidence_words, frame_parts, group_parts, shown_bytes, verdict_words
from ..drawing.line import Line
from ..drawing.theme import Theme
from ..drawing.wrapping import wrap

SHORT_LIST = 3
"""Stacks shown while the list is folded."""


def cause_lines(
    cause: Cause, verdict: SpikeVerdict | None, width: int, theme: Theme, unfolded: bool = False
) -> list[Line]:
    """Draw a cause: a head, the hub's verdict, the evidence, and its stacks.

    ``unfolded``: all stacks with all frames, instead of the first ones in short.
    """
    lines = [cause_head(cause, theme)]
    for index, words in enumerate(verdict_words(verdict) if verdict is not None else []):
        style = theme.style("text" if index else "accent", bold=not index)
        lines += [Line("   " + row, style) for row in wrap(words, width - 4)]
    lines += [Line("   " + row, theme.style("dim")) for row in wrap(evidence_words(cause), width - 4)]
    if cause.note:
        lines += [Line("   " + row, theme.style("dim")) for row in wrap(cause.note, width - 4)]
    shown = cause.groups if unfolded else cause.groups[:SHORT_LIST]
    for group in shown:
        lines.append(_group_line(group, shown_bytes(cause, group), width, theme))
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
    line.add(f"+{gib(cause.transient_bytes)}", theme.style("warning", bold=True))
    what, by = ("stayed after", ", allocated by") if stayed else ("allocated and freed in", " by")
    return line.add(f" {what} step {cause.step:,}{by}", theme.base)


def _group_line(group: StackGroup, size: int, width: int, theme: Theme) -> Line:
    line = Line(f"   {gib(size):>10} ", theme.base)
    line.add(f"{theme.glyphs.times}{group.count:<5,} ", theme.style("dim"))
    innermost, own = group_parts(group)
    line.add(theme.cut(innermost, width - line.width), theme.base if group.frames else theme.style("dim"))
    room = width - line.width - 4
    if own and room > 12:
        line.add(f" {theme.glyphs.back} ", theme.style("dim"))
        line.add(theme.cut(own, room), theme.style("accent"))
    return line


def _frames(group: StackGroup, width: int, theme: Theme) -> list[Line]:
    lines: list[Line] = []
    for frame in reversed(group.frames):
        words, library = frame_parts(frame)
        text = theme.cut(" " * 20 + words, width - 1)
        lines.append(Line(text, theme.style("dim" if library else "accent")))
    return lines


def stack_lines(groups: Sequence[StackGroup], width: int, theme: Theme) -> list[Line]:
    """Draw stacks in short form, as in an alert's evidence."""
    return [_group_line(group, group.bytes, width, theme) for group in groups]
