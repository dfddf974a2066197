"""Draws the memory of one rank: the composition of a step's peak, the leading phase, the cause of the last spike."""

from dataclasses import dataclass

from ....protocol.analysis.text.prediction import comparison_sentences, percent
from ....protocol.messages.memory import Cause, Composition
from ....protocol.messages.prediction import Prediction
from ....protocol.messages.telemetry import DeviceSample
from ....protocol.text import sanitize
from ...model.cause import SpikeVerdict, innermost
from ...model.peak_phase import phase_words, ranking_sentences
from ...model.prediction import compared_phases, predicted_phase
from ...model.rank import RankModel
from ...model.waterfall import REASONS, UNTRACED, UNTRACED_WORDS, Waterfall, unanalysed, waterfall
from ..drawing.line import Line, spread
from ..drawing.theme import Theme, ruled
from ..lines.alert_lines import wrap
from ..lines.cause_lines import cause_lines
from ..lines.scrubber import time_of_day
from ..plots.phase_bar import SHORT
from ..plots.waterfall import size_words, unit_of, waterfall_lines


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """The user's selections."""

    phase: str = ""
    """Empty: the phase with the highest peak."""
    highest: bool = False
    """Whether to show the analysed step with the run's highest peak instead of the latest."""
    unfolded: bool = False
    """Whether to show all stacks of the cause, with all frames."""


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
    following = fall.next
    if at_top and following is not None:
        right.add("next: ", dim).add(f"{following[0]} {size_words(fall, following[1])} ", base)
        right.add(f"({_signed(fall, following[1] - fall.peak, theme)}) ", dim)
    elif not at_top:
        right.add("the peak: ", dim).add(f"{top} {size_words(fall, highest)} ", base)
        right.add(f"({_signed(fall, highest - fall.peak, theme)}) ", dim)
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
    note = ""
    if cause is not None and cause.phase == fall.phase and cause.groups:
        note = innermost(cause.groups[0])
    composition = composition_of(rank, choice) if fall.taken_apart else None
    expected = predicted_phase(rank, prediction, composition, fall.step, fall.phase)
    error = prediction.error if prediction is not None else 0.0
    parted = [one for one in compared_phases(rank, prediction) if one.parted]
    most = max(parted, key=lambda one: abs(one.share), default=None)
    warning = f"{theme.glyphs.warning} {most.phase} {percent(most.share)}" if most is not None else ""
    lines = waterfall_lines(fall, width, theme, note, expected, error, warning)
    if not fall.taken_apart:
        lines += [Line(" " + row, theme.style("accent")) for row in wrap(why, width - 2)]
    composition = composition_of(rank, choice)
    if fall.taken_apart and any(part.name == UNTRACED and part.bytes for part in fall.parts):
        lines += [Line(" " + row, theme.style("dim")) for row in wrap(UNTRACED_WORDS, width - 2)]
    if composition is not None and composition.note:
        lines += [Line(" " + row, theme.style("dim")) for row in wrap(f"note: {composition.note}", width - 2)]
    elif fall.measure == "glibc":
        text = "On a CPU a peak is of the resident set: there is no device allocator, and nothing is reserved."
        lines += [Line(" " + row, theme.style("dim")) for row in wrap(text, width - 2)]
    lines += _predicted_lines(rank, prediction, width, theme)
    ranking = rank.memory.ranking
    for index, sentence in enumerate(ranking_sentences(ranking) if ranking is not None else []):
        first, *rest = wrap(sentence, width - 4)
        mark = theme.glyphs.dot if index else theme.glyphs.selected
        lines.append(Line(f" {mark} ", theme.style("accent")).add(first, theme.base))
        lines += [Line("   " + row, theme.base) for row in rest]
    if cause is not None:
        lines += cause_lines(cause, verdict, width, theme, choice.unfolded)
    return lines


def _predicted_lines(rank: RankModel, prediction: Prediction | None, width: int, theme: Theme) -> list[Line]:
    """Draw the phases' peaks with the prediction, or the reason why they cannot be compared."""
    if prediction is None:
        return []
    found = compared_phases(rank, prediction)
    if prediction.refused:
        sentences = [f"no prediction to compare: {sanitize(prediction.refused, 400)}"]
    elif found:
        sentences = comparison_sentences(found, prediction.error)
    elif rank.step:
        sentences = ["the prediction is of later steps, or of batches of other lengths: nothing to compare yet"]
    else:
        sentences = []
    parted = any(one.parted for one in found)
    lines: list[Line] = []
    for index, sentence in enumerate(sentences):
        first, *rest = wrap(sentence, width - 4)
        warn = parted and index > 0
        style = theme.style("warning") if warn else theme.style("dim") if not found else theme.base
        mark = theme.glyphs.warning if warn else theme.glyphs.dot
        lines.append(Line(f" {mark} ", theme.style("warning" if warn else "accent")).add(first, style))
        lines += [Line("   " + row, style) for row in rest]
    return lines


def title_line(rank: RankModel, name: str, width: int, theme: Theme) -> Line:
    """Draw the rule with the rank."""
    line = Line(" memory of ", theme.style("dim"))
    line.add(theme.cut(name, width // 2) + " ", theme.style(bold=True))
    right = Line()
    if rank.on_cpu:
        right.add(" resident set, on the CPU ", theme.style("warning"))
    return ruled(line, right, width, theme)
