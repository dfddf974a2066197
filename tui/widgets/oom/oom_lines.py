"""Draws the report of an out-of-memory error: verdict, remedies, figures, batch, other ranks, failing code."""

from collections.abc import Iterable, Iterator

from ....protocol.analysis.oom.words import shape_words
from ....protocol.code_owner import library_of
from ....protocol.messages.memory import PARTS
from ....protocol.messages.oom import RankMoment, Remedy
from ....protocol.messages.telemetry import Oom
from ....protocol.text import gib, sanitize
from ...model.cause import split_frame
from ...model.held import hold_words
from ...model.oom import OomCase, numbers
from ...model.run import RunModel
from ...model.waterfall import CPU_LABELS, LABELS
from ...model.what_if import WhatIf
from ..drawing.line import Line, cut
from ..drawing.theme import Theme
from ..drawing.wrapping import wrap
from ..memory.peak_bars import PART_FILLS
from .what_if_lines import what_if_lines

_MOST_WIDE = 118
"""Widest sentence: longer lines are hard to read."""
_FRAMES, _HOLDERS = 16, 8
_TWO_COLUMNS = 150
"""Minimum width for the evidence beside the verdict."""
_WIDE = 100
"""Minimum width for a rank's reserved memory beside its collective."""


def report_lines(
    case: OomCase, model: RunModel, place: str, acts: bool, width: int, theme: Theme, what_if: WhatIf | None = None
) -> list[Line]:
    """Draw a report; in a wide terminal in two columns, the verdict and its evidence.

    ``place``: of its snapshot, in words. ``acts``: whether commands to the rank are possible.
    """
    asked = what_if or WhatIf()
    if width < _TWO_COLUMNS:
        return [
            *_meaning(case, model, acts, asked, width, theme),
            *_numbers(case.oom, width, theme),
            *_rest(case, place, width, theme),
        ]
    room = (width - 3) // 2
    left = [*_meaning(case, model, acts, asked, room, theme), *_numbers(case.oom, room, theme)]
    right = _rest(case, place, width - room - 3, theme)[1:]
    blank = [Line() for _ in range(abs(len(left) - len(right)))]
    left, right = (left + blank, right) if len(left) < len(right) else (left, right + blank)
    bar = Line(f" {theme.glyphs.bar} ", theme.style("rule"))
    return [one.fit(room, theme.base).join(bar).join(other) for one, other in zip(left, right, strict=True)]


def _meaning(case: OomCase, model: RunModel, acts: bool, asked: WhatIf, width: int, theme: Theme) -> list[Line]:
    """Draw the reason, the present state, and the remedies."""
    lines = [Line(" " + row, theme.base) for row in wrap(case.verdict.text, min(width, _MOST_WIDE) - 2)]
    sure = "certain from the figures" if case.verdict.sure else "most likely from the figures"
    lines.append(Line(f" {sure}", theme.style("dim")))
    if held := hold_words(model, case):
        lines += [Line(), _head(f"{theme.glyphs.states['held']} held", theme, "error")]
        lines += _sentences(held, width, theme)
        if acts:
            console = "c: a console in that frame   " if case.oom.console else ""
            lines.append(Line(f"  {console}r: release it   k: kill", theme.style("accent")))
    lines += what_if_lines(asked, width, theme)
    return lines + _section("what to try, in this order", _remedy_sentences(case.remedies, width, theme), theme)


def _rest(case: OomCase, place: str, width: int, theme: Theme) -> list[Line]:
    """Draw the composition of memory, and the places of all ranks."""
    oom, lines = case.oom, list[Line]()
    if oom.parts:
        lines += _section("allocated was", _parts(oom, width, theme), theme)
        lines += _sentences([oom.parts_note], width, theme, "dim") if oom.parts_note else []
    if oom.batch_shape:
        lines += _section("batch", [_batch(oom, theme)], theme)
    if oom.holders:
        lines += _section("who held most", _holders(oom, width, theme), theme)
    if case.ranks:
        lines += _section("all ranks at that moment", _ranks(case, width, theme), theme)
    if oom.stack:
        of = " (of the training thread)" if oom.stack_of == "training" else ""
        lines += _section(f"where it failed{of}, innermost first", _stack(oom, width, theme), theme)
    lines += _section("snapshot", _sentences([place], width, theme), theme)
    if oom.snapshot_note:
        lines += _sentences([oom.snapshot_note], width, theme, "dim")
    return lines


def _sentences(texts: list[str], width: int, theme: Theme, tone: str = "text") -> list[Line]:
    rows = [row for text in texts for row in wrap(text, min(width, _MOST_WIDE) - 3)]
    return [Line("  " + row, theme.style(tone)) for row in rows]


def _head(text: str, theme: Theme, tone: str = "accent") -> Line:
    return Line(f" {text}", theme.style(tone, bold=True))


def _section(title: str, rows: Iterable[Line], theme: Theme) -> list[Line]:
    return [Line(), _head(title, theme), *rows]


def _remedy_sentences(remedies: list[Remedy], width: int, theme: Theme) -> Iterator[Line]:
    if not remedies:
        yield Line("  no remedy follows from the figures", theme.style("dim"))
    for number, remedy in enumerate(remedies, 1):
        frees = f"{remedy.bound + ' ' if remedy.bound else ''}{gib(remedy.frees_bytes)}" if remedy.frees_bytes else ""
        room = min(width, _MOST_WIDE) - 5
        for index, row in enumerate(wrap(remedy.text, room)):
            mark = f"  {number} " if not index else "    "
            yield Line(mark, theme.style("accent", bold=True)).add(row, theme.base)
        if not remedy.setting and not frees:
            continue
        line = Line("    ", theme.base)
        if frees:
            line.add(f"frees {frees}", theme.style("good", bold=True)).add("   " if remedy.setting else "", theme.base)
        line.add(theme.cut(sanitize(remedy.setting), width - line.width - 1), theme.style("dim"))
        yield line


def _numbers(oom: Oom, width: int, theme: Theme) -> list[Line]:
    return _section("the numbers at that moment", _number_rows(oom, width, theme), theme)


def _number_rows(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    for index, (name, size, remark) in enumerate(numbers(oom)):
        line = Line(f"  {name:<24}", theme.style("dim"))
        line.add(f"{gib(size):>12}", theme.style("error" if index == 0 else "text", bold=index == 0))
        yield line.add(theme.cut(f"  {sanitize(remark)}", width - line.width), theme.style("dim"))


def _parts(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    """Draw allocated bytes by part, each with a bar relative to the largest."""
    total = max(1, sum(oom.parts.values()))
    largest = max(1, *oom.parts.values())
    labels = LABELS | (CPU_LABELS if oom.measure != "cuda" else {})
    names = [name for name in PARTS if oom.parts.get(name)] + sorted(set(oom.parts) - set(PARTS))
    room = max(8, min(width, _MOST_WIDE) - 50)
    for name in names:
        size = oom.parts[name]
        line = Line(f"  {sanitize(labels.get(name, name))[:22]:<22}", theme.style("dim"))
        line.add(f"{gib(size):>12} {size / total * 100:>4.0f} %  ", theme.base)
        cells = max(1, round(size / largest * room)) if size > 0 else 0
        fill = PART_FILLS.get(name, "#") if theme.plain_graphs else " "
        yield line.add(fill * cells, theme.style("on_color", theme.part(name)))


def _batch(oom: Oom, theme: Theme) -> Line:
    line = Line(f"  {shape_words(oom.batch_shape)}", theme.style("text", bold=True))
    if oom.micro_step:
        line.add(f", micro-step {oom.micro_step}", theme.base)
    if not oom.largest_shape:
        return line.add("; there was none before in this process", theme.style("dim"))
    step = f" in step {oom.largest_shape_step:,}" if oom.largest_shape_step else ""
    return line.add(f"; the largest before was {shape_words(oom.largest_shape)}{step}", theme.style("dim"))


def _holders(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    for group in oom.holders[:_HOLDERS]:
        blocks = f"{group.count:>6,} " + ("block " if group.count == 1 else "blocks")
        line = Line(f"  {gib(group.bytes):>12}", theme.style("text", bold=True)).add(f" {blocks}  ", theme.style("dim"))
        yield line.add(theme.cut(_place(group.frames), width - line.width - 1), theme.base)


def _place(frames: list[str]) -> str:
    """Return the place of a stack: its innermost frame, and the innermost one in user code."""
    parts = [split_frame(frame) for frame in reversed(frames)]
    if not parts:
        return "no Python stack recorded"
    own = next((part for part in parts if not library_of(part[0])), None)
    words = _frame_words(*parts[0])
    return words if own is None or own == parts[0] else f"{words} (from {_frame_words(*own)})"


def _frame_words(filename: str, line: str, name: str) -> str:
    return f"{name} {filename.replace(chr(92), '/').rpartition('/')[2]}:{line}" if filename else name


def _ranks(case: OomCase, width: int, theme: Theme) -> Iterator[Line]:
    reserved = f"{'reserved':>11}" if width >= _WIDE else ""
    head = f"  {'rank':<6}{'state':<13}{'step':>8}  {'phase':<11}{'allocated':>11}{reserved}{'batch':>11}"
    yield Line(cut(head, width, ""), theme.style("dim"))
    for moment in case.ranks:
        yield _rank(moment, moment.rank == case.oom.rank, width, theme)


def _rank(moment: RankMoment, failed: bool, width: int, theme: Theme) -> Line:
    glyph, tone = theme.state(moment.state)
    line = Line(f"{theme.glyphs.error if failed else ' '} {moment.rank:<6}", theme.style("error" if failed else "text"))
    line.add(f"{glyph} ", theme.style(tone)).add(f"{sanitize(moment.state)[:10]:<11}", theme.base)
    line.add(f"{moment.step:>8,}  {sanitize(moment.phase)[:10]:<11}", theme.base)
    reserved = f"{gib(moment.reserved_bytes):>11}" if width >= _WIDE else ""
    line.add(f"{gib(moment.allocated_bytes):>11}{reserved}", theme.base)
    line.add(f"{shape_words(moment.batch_shape):>11}", theme.style("dim"))
    if moment.collective:
        words = f"  in {sanitize(moment.collective)}"
        line.add(theme.cut(words, width - line.width), theme.style("warning"))
    return line


def _stack(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    frames = [split_frame(frame) for frame in reversed(oom.stack)]
    for filename, number, name in frames[:_FRAMES]:
        own = bool(filename) and not library_of(filename)
        line = Line(f"  {name}", theme.style("text" if own else "dim", bold=own))
        room = width - line.width - 3
        where = f"{filename}:{number}" if filename else ""
        if len(where) > room > 1:
            where = theme.glyphs.ellipsis + where[-(room - 1) :]
        yield line.add(f"  {where}", theme.style("dim"))
    if len(frames) > _FRAMES:
        yield Line(f"  and {len(frames) - _FRAMES} more", theme.style("faint"))
