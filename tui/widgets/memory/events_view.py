"""Draws the allocator screen: rates by phase, graphs over the sampled steps, the other ranks."""

from collections.abc import Sequence
from itertools import pairwise

from ....protocol.text import gib as gib_words
from ....protocol.text import sanitize
from ...model.events import PhaseRates, allocated_bytes, allocations, phase_rates, segment_bytes
from ...model.rank import RankModel
from ...model.timeline import EMPTY
from ..drawing.figures import count, gib_signed, milliseconds
from ..drawing.line import Line, fitting
from ..drawing.theme import Theme, ruled
from ..plots.memory_graph import Column, Scale, memory_graph

_LABEL = 33
"""Cells before a graph, for its name and latest figure."""


def title_line(rank: RankModel, name: str, width: int, theme: Theme) -> Line:
    """Draw the rule with the rank and the latest sampled step."""
    line = Line(" allocator of ", theme.style("dim"))
    line.add(theme.cut(name, width // 2) + " ", theme.style(bold=True))
    right = Line()
    last = rank.allocator.last
    if last is not None:
        cost = f", read in {milliseconds(last.read_us)} ms" if last.read_us and width >= 100 else ""
        right.add(f" step {last.step:,}: {last.entries:,} entries{cost} ", theme.style("dim"))
    return ruled(line, right, width, theme)


def phase_lines(rank: RankModel, width: int, theme: Theme) -> list[Line]:
    """Draw the table of the last sampled step: a head, a line per phase, and the whole step."""
    last = rank.allocator.last
    if last is None:
        return []
    table = phase_rates(last, reversed(rank.steps))
    wide = width >= 100
    head = f" {'phase':<11}{'allocations':>12}{'a second':>10}{'GiB/s':>9}{'largest':>13}{'reserved grew':>15}"
    head += f"{'frees':>10}{'allocated':>13}{'segments':>10}" if wide else ""
    lines = [Line(head, theme.style("dim"))]
    for row in table:
        line = Line(" ", theme.base).add(" ", theme.style("text", theme.phase(row.name)))
        line.add(f" {sanitize(row.name, 9):<9}", theme.style(bold=True))
        lines.append(_figures(line, row, wide, theme))
    line = Line(f" {'step':<11}", theme.style("dim"))
    line.add(f"{allocations(last):>12,}{'':>10}{'':>9}{'':>13}", theme.style("dim"))
    line.add(f"{_grown(segment_bytes(last)):>15}", theme.style("dim"))
    line.add(f"{'':>10}{gib_words(allocated_bytes(last)):>13}" if wide else "", theme.style("dim"))
    return [*lines, line]


def _figures(line: Line, row: PhaseRates, wide: bool, theme: Theme) -> Line:
    rate = "-" if row.allocations_per_second is None else count(row.allocations_per_second)
    speed = "-" if row.bytes_per_second is None else f"{row.bytes_per_second / 2**30:.1f}"
    line.add(f"{row.allocations:>12,}{rate:>10}{speed:>9}{gib_words(row.largest):>13}", theme.base)
    line.add(f"{_grown(row.segment_bytes):>15}", theme.style("warning") if row.segment_bytes else theme.style("dim"))
    if wide:
        line.add(
            f"{row.frees:>10,}{gib_words(row.allocated_bytes):>13}{f'{row.segments:+,}' if row.segments else '0':>10}",
            theme.style("dim"),
        )
    return line


def _grown(size: int) -> str:
    return f"{gib_signed(size)} GiB" if size else "0"


def course_lines(rank: RankModel, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw graphs over the sampled steps, each ``height`` rows high, and of unused memory over the run."""
    samples = rank.allocator.samples
    if not samples:
        return []
    room = max(8, width - _LABEL - 1)
    made = [allocations(each) for each in samples]
    held = [allocated_bytes(each) for each in samples]
    grown = [max(0, segment_bytes(each)) for each in samples]
    lines = [Line(f" sampled steps {samples[0].step:,} to {samples[-1].step:,}", theme.style("dim"))]
    lines += _graph("allocations a step", f"{made[-1]:,}", made, max(made), room, height, "accent", theme)
    lines += _graph("allocated in a step", gib_words(held[-1]), held, max(held), room, height, "allocated", theme)
    total = sum(grown)
    lines += _graph("reserved grew", gib_words(total) if total else "0", grown, max(grown), room, height, "peak", theme)
    return lines


def unused_lines(rank: RankModel, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw the part of reserved memory not allocated at the peaks, over the whole run: mostly fragmentation."""
    room = max(8, width - _LABEL - 1)
    columns = rank.timeline.whole(room)
    shares = [
        0 if held in (EMPTY, 0) or used == EMPTY else max(0, 1000 - 1000 * used // held)
        for used, held in zip(columns.allocated, columns.reserved, strict=True)
    ]
    share = unused_share(rank)
    now = "-" if share is None else f"{share * 100:.0f} %"
    return _graph("unused of reserved", now, shares, 1000, room, height, "warning", theme)


def unused_share(rank: RankModel) -> float | None:
    """Return the share of reserved memory not allocated at the last step's peak; None: not known."""
    last = rank.last
    if last is None or rank.on_cpu or not last.phases:
        return None
    reserved = max(record.reserved.peak for record in last.phases)
    allocated = max(record.allocated.peak for record in last.phases)
    return max(0.0, 1 - allocated / reserved) if reserved else None


def free_line(rank: RankModel, width: int, theme: Theme) -> Line | None:
    """Draw the parts of unused memory, which show whether a large allocation fits into it."""
    last = rank.allocator.last
    if last is None or not last.reserved_bytes:
        return None
    line = Line(f" {'of it, in free blocks':<{_LABEL}}", theme.style("dim"))
    line.add(gib_words(last.free_bytes), theme.style(bold=True))
    words = [f"the largest {gib_words(last.largest_free_block_bytes)}"]
    words += [f"rounding {gib_words(last.rounding_bytes)}"] if last.rounding_bytes else []
    words += [f"waiting for a stream {gib_words(last.pending_bytes)}"] if last.pending_bytes else []
    words += [f"{last.segments:,} segments"] if last.segments else []
    more = fitting(words, f" {theme.glyphs.dot} ", width - line.width - 3)
    return line.add(f"   {more}", theme.style("dim"))


def retry_line(rank: RankModel, width: int, theme: Theme) -> Line:
    """Draw the number and steps of the allocator's retries, each a flush of its cache to the device."""
    retries = rank.allocator.retries or 0
    line = Line(f" {'retries (cudaMalloc flushes)':<{_LABEL}}", theme.style("warning" if retries else "dim"))
    if not retries:
        return line.add("none", theme.style("dim"))
    line.add(f"{retries:,}", theme.style("warning", bold=True))
    when = [f"{step:,} (+{number})" if number > 1 else f"{step:,}" for step, number in rank.allocator.retry_steps]
    if when:
        words = f"   in step{'s' if len(when) > 1 else ''} {', '.join(when[-8:])}: each one waits for the device"
        line.add(theme.cut(words, width - line.width), theme.style("dim"))
    return line


def _graph(
    label: str, figure: str, values: Sequence[int], top: int, room: int, height: int, tone: str, theme: Theme
) -> list[Line]:
    """Draw a graph with its label and latest figure at the bottom left; values are pooled by maximum to the room."""
    shown = stretched(pooled(values, room), room)
    rows = memory_graph([Column(value, 0) for value in shown], len(shown), height, Scale(max(1, top)), theme)
    lines = [Line()] if height > 2 else []
    for index, row in enumerate(rows):
        foot = index == len(rows) - 1
        line = Line(f" {label:<{_LABEL - 13}}" if foot else " " * (_LABEL - 12), theme.base)
        line.add(f"{figure:>10}  " if foot else " " * 12, theme.style(bold=True))
        lines.append(line.join(_toned(row, tone, theme)))
    return lines


def _toned(row: Line, tone: str, theme: Theme) -> Line:
    """Return a row drawn in the tone of allocated memory in another tone."""
    if tone == "allocated" or theme.plain_graphs:
        return row
    solid, ground = theme.style("text", "allocated"), theme.style("allocated")
    line = Line()
    for text, style in row.parts:
        if style is solid:
            style = theme.style("text", tone)
        elif style is ground:
            style = theme.style(tone)
        line.add(text, style)
    return line


def pooled(values: Sequence[int], width: int) -> list[int]:
    """Return at most ``width`` values, each the highest of its neighbours."""
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [max(values[begin:end]) for begin, end in pairwise(edges)]


def stretched(values: Sequence[int], width: int) -> list[int]:
    """Repeat each value over as many cells as fill most of ``width``, at most eight."""
    cells = max(1, min(8, width // max(1, len(values))))
    return [value for value in values for _ in range(cells)]


def rank_lines(ranks: Sequence[RankModel], selected: int, height: int, theme: Theme) -> list[Line]:
    """Draw a line per rank, the selected one in view: last sampled step, retries, unused memory."""
    if len(ranks) < 2 or height < 3:
        return []
    head = f"   rank{'step':>9}{'allocations':>13}{'allocated':>12}{'grew':>12}{'retries':>9}{'unused':>8}"
    lines = [Line(), Line(head, theme.style("dim"))]
    room = height - 2
    position = next((index for index, rank in enumerate(ranks) if rank.rank == selected), 0)
    first = max(0, min(position - room // 2, len(ranks) - room))
    for rank in ranks[first : first + room]:
        chosen = rank.rank == selected
        style = theme.style("text", "raised" if chosen else "background", bold=chosen)
        mark = theme.glyphs.selected if chosen else " "
        last, share = rank.allocator.last, unused_share(rank)
        text = f" {mark}{rank.rank:>5}"
        if last is None:
            text += f"{'-':>9}{'-':>13}{'-':>12}{'-':>12}"
        else:
            text += f"{last.step:>9,}{allocations(last):>13,}{gib_words(allocated_bytes(last)):>12}"
            text += f"{_grown(segment_bytes(last)):>12}"
        text += f"{rank.allocator.retries or 0:>9,}{'-' if share is None else f'{share * 100:.0f} %':>8}"
        lines.append(Line(text, style))
    return lines
