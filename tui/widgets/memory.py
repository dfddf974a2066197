"""Draws the memory of ranks: composition of a peak, bars of all ranks, allocator activity, table of phases."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...protocol.analysis.words import comparison_sentences, percent
from ...protocol.messages.memory import Cause, Composition, Prediction
from ...protocol.messages.telemetry import DeviceSample, PhaseRecord
from ...protocol.text import gib as gib_words
from ...protocol.text import sanitize
from ..model.oom import SpikeVerdict, innermost
from ..model.peaks import phase_words, ranking_sentences
from ..model.rank import PhaseRates, RankModel, allocated_bytes, allocations, phase_rates, segment_bytes
from ..model.timeline import EMPTY
from ..model.waterfall import (
    LABELS,
    REASONS,
    UNTRACED,
    UNTRACED_WORDS,
    RankBar,
    Waterfall,
    compared_phases,
    predicted_phase,
    unanalysed,
    waterfall,
)
from .alerts import cause_lines
from .drawing import (
    GIB_UNIT,
    MIB_UNIT,
    Line,
    Theme,
    Unit,
    count,
    fitting,
    gib,
    gib_signed,
    marked,
    milliseconds,
    ruled,
    spread,
    wrap,
)
from .header import time_of_day
from .plots import SHORT, Column, Scale, memory_graph, size_words, unit_of, waterfall_lines
from .state import nice_top

_LABEL = 33


def title_line(rank: RankModel, name: str, width: int, theme: Theme) -> Line:
    """Draw the rule with the rank and the latest sampled step."""
    right = Line()
    last = rank.allocator.last
    if last is not None:
        cost = f", read in {milliseconds(last.read_us)} ms" if last.read_us and width >= 100 else ""
        right.add(f" step {last.step:,}: {last.entries:,} entries{cost} ", theme.style("dim"))
    return _title("allocator", name, right, width, theme)


def phase_lines(rank: RankModel, width: int, theme: Theme) -> list[Line]:
    """Draw the table of the last sampled step: a head, a line per phase, and the whole step."""
    last = rank.allocator.last
    if last is None:
        return []
    wide = width >= 100
    head = f" {'phase':<11}{'allocations':>12}{'a second':>10}{'GiB/s':>9}{'largest':>13}{'reserved grew':>15}"
    head += f"{'frees':>10}{'allocated':>13}{'segments':>10}" if wide else ""
    lines = [Line(head, theme.style("dim"))]
    for row in phase_rates(last):
        name = row.phase.name
        line = Line(" ", theme.base).add(" ", theme.style("text", theme.phase(name)))
        line.add(f" {sanitize(name, 9):<9}", theme.style(bold=True))
        lines.append(_figures(line, row, wide, theme))
    line = Line(f" {'step':<11}", theme.style("dim"))
    line.add(f"{allocations(last):>12,}{'':>10}{'':>9}{'':>13}", theme.style("dim"))
    line.add(f"{_grown(segment_bytes(last)):>15}", theme.style("dim"))
    line.add(f"{'':>10}{gib_words(allocated_bytes(last)):>13}" if wide else "", theme.style("dim"))
    return [*lines, line]


def _figures(line: Line, row: PhaseRates, wide: bool, theme: Theme) -> Line:
    rate = "-" if row.allocations_per_second is None else count(row.allocations_per_second)
    speed = "-" if row.bytes_per_second is None else f"{row.bytes_per_second / 2**30:.1f}"
    phase = row.phase
    line.add(f"{phase.allocations:>12,}{rate:>10}{speed:>9}{gib_words(row.largest):>13}", theme.base)
    line.add(f"{_grown(phase.segment_bytes):>15}", theme.style("warning" if phase.segment_bytes else "dim"))
    segments = phase.segment_allocations - phase.segment_frees
    words = f"{segments:+,}" if segments else "0"
    more = f"{phase.frees:>10,}{gib_words(phase.allocated_bytes):>13}{words:>10}" if wide else ""
    return line.add(more, theme.style("dim"))


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
    shown = stretched(pooled(values, room), room)
    rows = memory_graph([Column(value, 0) for value in shown], len(shown), height, Scale(max(1, top)), theme, tone)
    lines = [Line()] if height > 2 else []
    for index, row in enumerate(rows):
        foot = index == len(rows) - 1
        line = Line(f" {label:<{_LABEL - 13}}" if foot else " " * (_LABEL - 12), theme.base)
        line.add(f"{figure:>10}  " if foot else " " * 12, theme.style(bold=True))
        lines.append(line.join(row))
    return lines


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


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """The user's selections."""

    phase: str = ""  # Empty: the phase with the highest peak
    highest: bool = False  # whether to show the analysed step with the run's highest peak instead of the latest
    unfolded: bool = False  # whether to show all stacks of the cause, with all frames


def composition_of(rank: RankModel, choice: MemoryChoice) -> Composition | None:
    """Return the composition of the visible step."""
    return rank.memory.highest if choice.highest else rank.memory.latest


def fall_of(rank: RankModel, choice: MemoryChoice, sample: DeviceSample | None) -> Waterfall | None:
    """Return the visible waterfall; None before the first step."""
    composition = composition_of(rank, choice)
    made = waterfall(rank, composition, choice.phase, sample) if composition is not None else None
    return made or unanalysed(rank, choice.phase, sample)


def cause_of(rank: RankModel, phase: str) -> Cause | None:
    """Return the cause to show with a phase: its own, else that of the largest transient."""
    return rank.memory.causes.get(phase) or rank.memory.cause


def head_lines(rank: RankModel, fall: Waterfall, choice: MemoryChoice, width: int, theme: Theme) -> list[Line]:
    """Draw the step's peak, the next phase, and the selection of phases."""
    dim, base = theme.style("dim"), theme.base
    top, highest = fall.standing[0]
    at_top = fall.phase == top
    left = Line(" peak of ", dim) if at_top else Line(f" {phase_words(fall.phase)} of ", dim)
    left.add(f"step {fall.step:,}", theme.style(bold=True)).add(": ", dim)
    left.add(f"{size_words(fall, fall.peak)} {unit_of(fall)}", theme.style("peak", bold=True))
    left.add(f" in {phase_words(fall.phase)}" if at_top else "", base)
    right = Line()
    words, other = ("next: ", fall.next) if at_top else ("the peak: ", (top, highest))
    if other is not None:
        right.add(words, dim).add(f"{other[0]} {size_words(fall, other[1])} ", base)
        right.add(f"({_signed(fall, other[1] - fall.peak, theme)}) ", dim)
    return [spread(left, right, width, base), _tabs(rank, fall, choice, width, theme)]


def _signed(fall: Waterfall, size: int, theme: Theme) -> str:
    return ("+" if size > 0 else theme.glyphs.minus if size < 0 else "") + size_words(fall, abs(size))


def _tabs(rank: RankModel, fall: Waterfall, choice: MemoryChoice, width: int, theme: Theme) -> Line:
    line = Line(" ", theme.base)
    for name, peak in fall.standing:
        chosen = name == fall.phase
        style = theme.style("on_color", theme.phase(name), bold=True, reverse=not theme.color) if chosen else None
        line.add(f" {sanitize(SHORT.get(name, name), 16)} {size_words(fall, peak)} ", style or theme.style("dim"))
    composition = composition_of(rank, choice)
    if composition is None or not fall.taken_apart:
        return line
    when = f"{time_of_day(composition.time)}, {REASONS.get(composition.reason, composition.reason)} "
    which = "highest so far, " if choice.highest else ""
    right = Line(which + when, theme.style("dim"))
    return spread(line, right, width, theme.base) if line.width + right.width < width else line


def body_lines(
    rank: RankModel,
    fall: Waterfall,
    choice: MemoryChoice,
    verdict: SpikeVerdict | None,
    why: str,
    width: int,
    theme: Theme,
    prediction: Prediction | None = None,
) -> list[Line]:
    """Draw the scrolling part: the waterfall, its limits, the lead in words, and the cause of the last spike.

    ``why``: reason why no step was analysed yet; shown in that case only.
    """
    cause = cause_of(rank, fall.phase)
    own = cause is not None and cause.phase == fall.phase and cause.groups
    note = innermost(own[0]) if own else ""
    composition = composition_of(rank, choice) if fall.taken_apart else None
    expected = predicted_phase(rank, prediction, composition, fall.step, fall.phase)
    error = prediction.error if prediction is not None else 0.0
    parted = [one for one in compared_phases(rank, prediction) if one.parted]
    most = max(parted, key=lambda one: abs(one.share), default=None)
    warning = f"{theme.glyphs.warning} {most.phase} {percent(most.share)}" if most is not None else ""
    lines = waterfall_lines(fall, width, theme, note, expected, error, warning)
    texts = [] if fall.taken_apart else [(why, "accent")]
    composition = composition_of(rank, choice)
    if fall.taken_apart and any(part.name == UNTRACED and part.bytes for part in fall.parts):
        texts.append((UNTRACED_WORDS, "dim"))
    if composition is not None and composition.note:
        texts.append((f"note: {composition.note}", "dim"))
    elif fall.measure == "glibc":
        text = "On a CPU a peak is of the resident set: there is no device allocator, and nothing is reserved."
        texts.append((text, "dim"))
    lines += [Line(" " + row, theme.style(tone)) for text, tone in texts for row in wrap(text, width - 2)]
    lines += _predicted_lines(rank, prediction, width, theme)
    ranking = rank.memory.ranking
    for index, sentence in enumerate(ranking_sentences(ranking) if ranking is not None else []):
        mark = theme.glyphs.dot if index else theme.glyphs.selected
        lines += marked(f" {mark} ", theme.style("accent"), sentence, width - 1, theme.base)
    if cause is not None:
        lines += cause_lines(cause, verdict, width, theme, choice.unfolded)
    return lines


def _predicted_lines(rank: RankModel, prediction: Prediction | None, width: int, theme: Theme) -> list[Line]:
    if prediction is None:
        return []
    found = compared_phases(rank, prediction)
    sentences = comparison_sentences(found, prediction.error) if found else []
    if prediction.refused:
        sentences = [f"no prediction to compare: {sanitize(prediction.refused, 400)}"]
    elif not found and rank.step:
        sentences = ["the prediction is of later steps, or of batches of other lengths: nothing to compare yet"]
    parted = any(one.parted for one in found)
    lines: list[Line] = []
    for index, sentence in enumerate(sentences):
        warn = parted and index > 0
        style = theme.style("warning" if warn else "dim" if not found else "text")
        mark = theme.glyphs.warning if warn else theme.glyphs.dot
        lines += marked(f" {mark} ", theme.style("warning" if warn else "accent"), sentence, width - 1, style)
    return lines


def memory_title_line(rank: RankModel, name: str, width: int, theme: Theme) -> Line:
    """Draw the rule with the rank."""
    right = Line(" resident set, on the CPU ", theme.style("warning")) if rank.on_cpu else Line()
    return _title("memory", name, right, width, theme)


def _title(what: str, name: str, right: Line, width: int, theme: Theme) -> Line:
    line = Line(f" {what} of ", theme.style("dim"))
    return ruled(line.add(theme.cut(name, width // 2) + " ", theme.style(bold=True)), right, width, theme)


PART_FILLS = {
    "parameters": "P", "gradients": "G", "optimizer_states": "O", "master_copies": "M", "partitions": "Z",
    "buckets": "B", "activations": "A", "temporaries": "T", "other": "o", "unattributed": "?", "untraced": "?",
    "unused": "-",
}  # fmt: skip

_AXIS = 8
_WIDEST = 20


def peak_bars(
    bars: Sequence[RankBar], phase: str, selected: int, capacity: int, width: int, height: int, theme: Theme
) -> list[Line]:
    """Draw the bars with an axis at the left, the ranks below, and the parts' colours at the bottom.

    An empty ``phase`` is each rank's highest. ``capacity``: of the smallest device, bytes, for the text; 0: not known.
    """
    groups = grouped(bars, max(1, width - _AXIS - 1))
    legend = _legend(bars, width, theme)
    rows = max(1, height - len(legend) - 3)
    extent = max((sum(size for _, size in bar.parts) for bar in bars), default=0)
    top = nice_top(extent)
    cell = max(1, min(_WIDEST, (width - _AXIS) // len(groups)))
    gap = 1 if cell >= 3 else 0
    # A group is represented by the rank with the highest peak.
    shown = [max(group, key=lambda bar: bar.peak) for group in groups]
    fills = [_fill(bar, top, rows, theme.plain_graphs) for bar in shown]
    lines = [_scale_line(phase, top, capacity, bars, groups, theme)]
    lines += [_row(fills, row, rows, cell - gap, gap, top, theme) for row in reversed(range(rows))]
    lines += [_ranks_line(groups, selected, cell, theme), _figures_line(groups, selected, cell, theme)]
    return [*lines, *legend][:height]


def grouped(bars: Sequence[RankBar], columns: int) -> list[Sequence[RankBar]]:
    """Return ranks in at most ``columns`` groups of neighbours, all but the last of equal size."""
    size = max(1, -(-len(bars) // max(1, columns)))
    return [bars[at : at + size] for at in range(0, len(bars), size)]


def _fill(bar: RankBar, top: int, rows: int, plain: bool) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    at = total = 0
    for name, size in bar.parts:
        total += size
        end = round(total / top * rows * 8) if top else 0
        end = round(end / 8) * 8 if plain else end
        if end > at:
            found.append((name, at, end))
            at = end
    return found


def _row(
    fills: Sequence[list[tuple[str, int, int]]], row: int, rows: int, cell: int, gap: int, top: int, theme: Theme
) -> Line:
    marked = row in (rows - 1, rows // 2, 0)
    value = top * (row + 1) / rows if row else 0
    line = Line(f"{gib(value, True) if marked and value else '0' if marked else '':>{_AXIS - 2}} ", theme.style("dim"))
    line.add(theme.glyphs.bar, theme.style("rule"))
    for parts in fills:
        inside = [part for part in parts if part[1] < row * 8 + 8 and part[2] > row * 8]
        _cells(line, inside, row, cell, theme)
        line.add(" " * gap, theme.base)
    return line


def _cells(line: Line, inside: list[tuple[str, int, int]], row: int, cell: int, theme: Theme) -> None:
    if not inside:
        line.add(" " * cell, theme.base)
        return
    if theme.plain_graphs:
        line.add(PART_FILLS.get(inside[0][0], "?") * cell, theme.base)
        return
    largest = sorted(inside, key=lambda part: -(min(part[2], row * 8 + 8) - max(part[1], row * 8)))[:2]
    lower = min(largest, key=lambda part: part[1])
    upper = next((part for part in largest if part is not lower), None)
    end = min(8, lower[2] - row * 8)
    if end >= 8:
        line.add(" " * cell, theme.style("text", theme.part(lower[0])))
        return
    behind = theme.part(upper[0]) if upper is not None else "background"
    line.add(theme.glyphs.eighths[max(1, end)] * cell, theme.style(theme.part(lower[0]), behind))


def _scale_line(
    phase: str, top: int, capacity: int, bars: Sequence[RankBar], groups: Sequence[Sequence[RankBar]], theme: Theme
) -> Line:
    line = Line(f" {sanitize(phase, 16) or 'highest phase'}", theme.style(bold=True))
    steps = {bar.step for bar in bars}
    until = f" to {max(steps):,}" if len(steps) > 1 else ""
    device = f" (the device has {gib(capacity)})" if capacity else ""
    line.add(f" of step {min(steps):,}{until}, 0 to {gib(top, True)} GiB{device}", theme.style("dim"))
    if len(groups) < len(bars):
        line.add(f"; a column: the highest of {len(groups[0])} ranks", theme.style("warning"))
    return line


def _ranks_line(groups: Sequence[Sequence[RankBar]], selected: int, cell: int, theme: Theme) -> Line:
    line = Line(" " * (_AXIS - 1) + theme.glyphs.cross, theme.style("rule"))
    every = max(1, -(-5 // cell)) if cell < 4 else 1
    written = 0
    for index, group in enumerate(groups):
        chosen = any(bar.rank == selected for bar in group)
        at = _AXIS + index * cell
        if line.width > at:
            continue
        line.pad(at, theme.base)
        text = f"{theme.glyphs.selected if chosen else ''}{group[0].rank}"
        if chosen or index - written >= every or index == 0:
            fitted = text if len(text) < cell or cell < 4 else text[:cell]
            line.add(fitted, theme.style("accent" if chosen else "dim", bold=chosen))
            written = index
    return line


def _figures_line(groups: Sequence[Sequence[RankBar]], selected: int, cell: int, theme: Theme) -> Line:
    bars = [bar for group in groups for bar in group]
    if cell >= 6 and len(groups) == len(bars):
        line = Line(f"{'GiB':>{_AXIS - 2}}  ", theme.style("dim"))
        for bar in bars:
            chosen = bar.rank == selected
            line.add(gib(bar.peak, True)[: cell - 1].ljust(cell), theme.style("peak" if chosen else "dim", bold=chosen))
        return line
    line = Line(" ", theme.base)
    mine = next((bar for bar in bars if bar.rank == selected), None)
    if mine is not None:
        line.add(f"rank {mine.rank} ", theme.style("accent", bold=True))
        line.add(f"{gib(mine.peak)} in {mine.phase}", theme.style("peak"))
    low, high = min(bars, key=lambda bar: bar.peak), max(bars, key=lambda bar: bar.peak)
    words = f"   highest rank {high.rank} {gib(high.peak)}   lowest rank {low.rank} {gib(low.peak)} GiB"
    return line.add(words, theme.style("dim"))


def _legend(bars: Sequence[RankBar], width: int, theme: Theme) -> list[Line]:
    names = dict.fromkeys(name for bar in bars for name, _ in bar.parts)
    order = [name for name in PART_FILLS if name in names] + [name for name in names if name not in PART_FILLS]
    lines = [Line(" ", theme.base)]
    for name in order:
        label = "unused but reserved" if name == "unused" else LABELS.get(name, name)
        if lines[-1].width + len(label) + 5 > width:
            lines.append(Line(" ", theme.base))
        if theme.plain_graphs:
            lines[-1].add(PART_FILLS.get(name, "?") * 2, theme.style(bold=True))
        else:
            lines[-1].add("  ", theme.style("text", theme.part(name)))
        lines[-1].add(f" {label}  ", theme.style("dim"))
    return lines


_SMALL = 2 * 2**30


def phase_table(table: Sequence[PhaseRecord], width: int, theme: Theme) -> list[Line]:
    """Draw the table: a head and a line per phase; the phase with the step's peak is marked."""
    dim = theme.style("dim")
    resident = any(row.resident is not None for row in table)
    device = any(row.device_us is not None for row in table)
    wide = width >= 100
    top = max((row.peak_span.peak for row in table), default=0)
    unit = GIB_UNIT if top >= _SMALL else MIB_UNIT
    head = Line(f" {f'phase, {unit.name}':<12}{'device ms' if device else 'host ms':>9}", dim)
    if wide:
        head.add(f"{'host ms' if device else '':>10}{'wait ms':>10}", dim)
    behind = "resident" if resident else "reserved"
    head.add(f"{'start':>9}{'end':>9}{'peak':>9}{'growth':>9}{'transient':>10}{behind:>10}", dim)
    head.add(f"{'allocs':>9}{'collectives':>13}" if wide else "", dim)
    return [head, *(_line(row, top, unit, device, wide, theme) for row in table)]


def _line(row: PhaseRecord, top: int, unit: Unit, device: bool, wide: bool, theme: Theme) -> Line:
    measured = row.peak_span
    span = row.resident if row.resident is not None else row.allocated
    behind = row.resident.end if row.resident is not None else row.reserved.end
    base, dim = theme.base, theme.style("dim")
    line = Line(" ", base).add(" ", theme.style("text", theme.phase(row.name)))
    line.add(f" {row.name:<10}", theme.style(bold=True))
    main = row.device_us if device and row.device_us is not None else row.host_us
    line.add(f"{milliseconds(main):>9}", base)
    if wide:
        line.add(f"{milliseconds(row.host_us) if device else '':>10}", dim)
        line.add(f"{milliseconds(row.collective_us) if row.collectives else '':>10}", dim)
    line.add(f"{unit.size(span.start):>9}{unit.size(span.end):>9}", base)
    line.add(f"{unit.size(measured.peak):>9}", theme.style("peak", bold=measured.peak == top))
    line.add(f"{unit.change(measured.growth):>9}", base if abs(measured.growth) >= 2**20 else dim)
    much = measured.transient >= top * 0.02
    line.add(f"{unit.change(measured.transient):>10}", theme.style("warning" if much else "dim"))
    line.add(f"{unit.size(behind):>10}", dim)
    if wide:
        line.add(f"{row.allocations or '':>9}{row.collectives or '':>13}", dim)
    if measured.peak == top:
        line.add(f"  {theme.glyphs.back} peak", theme.style("peak"))
    return line
