"""Which code a spike came from: its size, what finding it out cost, and the stacks with the bytes each allocated."""

import re

from ...protocol.memory import Cause, StackGroup
from ...protocol.snapshot.stacks import library_of
from ...protocol.text import duration, gib, sanitize
from .line import Line, cut
from .look import Look

_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<name>.*)")
SHORT_LIST = 3
"""Stacks that are shown while the list is folded."""


def cause_lines(cause: Cause, width: int, look: Look, unfolded: bool = False) -> list[Line]:
    """Draw a cause: a head, a line of evidence, and its stacks; ``unfolded`` shows all of them with all frames."""
    lines = [cause_head(cause, look), Line("   " + evidence_words(cause), look.style("dim"))]
    if cause.note:
        lines.append(Line("   " + cut(sanitize(cause.note), width - 4, look.glyphs.ellipsis), look.style("dim")))
    shown = cause.groups if unfolded else cause.groups[:SHORT_LIST]
    for group in shown:
        lines.append(_group_line(group, width, look))
        if unfolded:
            lines += _frames(group, width, look)
    rest = len(cause.groups) - len(shown)
    if rest or (cause.groups and not unfolded):
        more = f"{rest} more stack{'' if rest == 1 else 's'}, all frames" if rest else "all frames"
        lines.append(Line(f"   enter: {more}", look.style("faint")))
    return lines


def cause_head(cause: Cause, look: Look) -> Line:
    """Say which phase took how much, in which step."""
    stayed = cause.reason == "leak"
    line = Line(f" {look.glyphs.spike} ", look.style("warning", bold=True))
    line.add(f"{sanitize(cause.phase, 20) or 'step'} ", look.style(bold=True))
    line.add(f"+{gib(cause.transient_bytes)}", look.style("warning", bold=True))
    words = "stayed after" if stayed else "came and went in"
    return line.add(f" {words} step {cause.step:,}, allocated by", look.base)


def evidence_words(cause: Cause) -> str:
    """Say how much of it has stacks, and what recording them cost."""
    parts: list[str] = []
    if cause.transient_bytes:
        share = min(1.0, cause.attributed_bytes / cause.transient_bytes)
        parts.append(f"{share * 100:.0f} % of it has stacks")
    if cause.armed_us:
        took = f"with stacks the phase took {duration(cause.armed_us * 1e-6)}"
        parts.append(f"{took} instead of {duration(cause.usual_us * 1e-6)}" if cause.usual_us else took)
    return ", ".join(parts) or "no stacks were recorded"


def frame_parts(frame: str) -> tuple[str, str]:
    """Split ``file:line function`` into ``function  file:line`` and the package it belongs to (empty: one's own)."""
    found = _FRAME.fullmatch(sanitize(frame, 400))
    if found is None:
        return sanitize(frame, 400), ""
    short = found["file"].replace("\\", "/").rpartition("/")[2]
    return f"{found['name']}  {short}:{found['line']}", library_of(found["file"])


def _group_line(group: StackGroup, width: int, look: Look) -> Line:
    line = Line(f"   {gib(group.bytes):>10} ", look.base).add(
        f"{look.glyphs.times}{group.count:<5,} ", look.style("dim")
    )
    frames = [frame_parts(frame) for frame in group.frames]
    if not frames:
        return line.add("no stack", look.style("dim"))
    innermost = frames[-1][0]
    own = next((words for words, library in reversed(frames) if not library), "")
    line.add(cut(innermost, width - line.width, look.glyphs.ellipsis), look.base)
    if own and own != innermost:
        room = width - line.width - 4
        if room > 12:
            line.add(f" {look.glyphs.back} ", look.style("dim"))
            line.add(cut(own, room, look.glyphs.ellipsis), look.style("accent"))
    return line


def _frames(group: StackGroup, width: int, look: Look) -> list[Line]:
    lines: list[Line] = []
    for frame in reversed(group.frames):
        words, library = frame_parts(frame)
        text = cut(" " * 20 + words, width - 1, look.glyphs.ellipsis)
        lines.append(Line(text, look.style("dim" if library else "accent")))
    return lines
