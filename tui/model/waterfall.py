"""The composition of a peak as a waterfall, where each part begins where the previous one ends; and predicted peaks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import msgspec

from ...protocol.analysis.estimates.time import Compared, compared, predicted
from ...protocol.analysis.memory.leak import footprint
from ...protocol.analysis.words import PART_LABELS
from ...protocol.messages.memory import PARTS, Composition, PhaseComposition, PredictedPhase, Prediction
from ...protocol.messages.telemetry import PHASES, STEP_PHASES, DeviceSample, MemoryMeasure
from ...protocol.recording.results import PeakMark, size_of
from .rank import RankModel
from .run import RunModel

LABELS = PART_LABELS | {"other": "other, held by torch", "untraced": "not attributed"}

REASONS = {
    "first": "one of the first steps",
    "periodic": "captured periodically",
    "asked": "asked for",
    "spike": "after a spike",
    "leak": "after a leak",
    "oom": "at an out-of-memory error",
}

CPU_LABELS = {"other": "other, in the process"}
UNTRACED = "untraced"  # the part `unattributed` on a CPU, where it is the usual case instead of a gap in a trace

UNTRACED_WORDS = (
    "Not attributed: on the CPU the allocator is glibc's malloc, whose allocations are not traced. This is code and "
    "libraries, the heap of Python and others, and freed memory that malloc keeps."
)


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the waterfall; bytes."""

    name: str
    label: str
    bytes: int
    begin: int  # start of its bar: the sum of the rows above


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The composition of one phase's peak, of one step of one rank."""

    rank: int
    step: int
    phase: str
    measure: MemoryMeasure
    peak: int
    parts: tuple[Part, ...]  # parts of allocated memory (CPU: resident memory); they add up to `peak`
    standing: tuple[tuple[str, int], ...]  # every phase of the step with its peak, the highest first
    unused: int | None = None  # reserved by the allocator and not allocated at the peak; None on a CPU
    context: int | None = None
    """CUDA context, NCCL and other memory of the process outside PyTorch; None if NVML has no figure."""
    others: int | None = None
    unexplained: int | None = None  # used memory according to NVML that belongs to none of the other parts
    used: int | None = None  # used memory of the device in NVML's last sample
    since: int = 0  # growth of reserved memory from the peak to that sample
    total: int = 0
    ended: bool = False  # whether the rank has ended, so that its device's current use is unrelated to the peak
    taken_apart: bool = True  # whether the parts are known; otherwise only the peak itself is

    @property
    def next(self) -> tuple[str, int] | None:
        """The highest of the other phases."""
        return next(((name, peak) for name, peak in self.standing if name != self.phase), None)

    @property
    def extent(self) -> int:
        """End of the last bar: the sum of everything drawn."""
        return self.peak + (self.unused or 0) + (self.context or 0) + (self.others or 0)


def phases_of(composition: Composition) -> list[PhaseComposition]:
    """List the phases of an analysed step, the one with the highest peak first."""
    return sorted(composition.phases, key=lambda phase: -phase.peak_bytes)


def waterfall(rank: RankModel, composition: Composition, phase: str, sample: DeviceSample | None) -> Waterfall | None:
    """Return the waterfall of one phase.

    A phase that the step does not have selects the highest. None for a composition without phases.
    """
    ordered = phases_of(composition)
    if not ordered:
        return None
    chosen = next((each for each in ordered if each.name == phase), ordered[0])
    shown = {name for each in ordered for name, count in each.parts.items() if count} | {"unattributed"}
    on_cpu = composition.measure == "glibc"
    standing = tuple((each.name, each.peak_bytes) for each in ordered)
    parts, measure = tuple(_parts(chosen.parts, shown, on_cpu)), composition.measure
    made = Waterfall(rank.rank, composition.step, chosen.name, measure, chosen.peak_bytes, parts, standing)
    reserved = max(chosen.reserved_bytes, chosen.peak_bytes)
    return made if on_cpu else _on_device(made, rank, reserved, sample)


def unanalysed(rank: RankModel, phase: str, sample: DeviceSample | None) -> Waterfall | None:
    """Return a waterfall without parts, before any step was analysed: the last step's peaks; None before the first."""
    step = rank.read or rank.last
    if step is None or not step.phases:
        return None
    standing = tuple(sorted(((each.name, each.peak_span.peak) for each in step.phases), key=lambda each: -each[1]))
    chosen = phase if any(phase == name for name, _ in standing) else standing[0][0]
    peak = dict(standing)[chosen]
    record = step.phase(chosen)
    assert record is not None
    on_cpu = rank.on_cpu or record.resident is not None
    parts = (Part(UNTRACED if on_cpu else "unattributed", "not analysed", peak, 0),)
    measure = "glibc" if on_cpu else "cuda"
    made = Waterfall(rank.rank, step.step, chosen, measure, peak, parts, standing, taken_apart=False)
    return made if on_cpu else _on_device(made, rank, record.reserved.peak, sample)


def next_phase(known: Collection[str], phase: str, direction: int) -> str:
    """Return the next (or previous) phase, in the order of phases, wrapping at the ends."""
    names = [name for name in PHASES if name in known] + sorted(set(known) - set(PHASES))
    if not names:
        return phase
    return names[(names.index(phase) + direction) % len(names)] if phase in names else names[0]


def _parts(parts: dict[str, int], shown: set[str], on_cpu: bool) -> Iterable[Part]:
    begin = 0
    # A part unknown to this version is shown under its own name, so that the sum is correct.
    for name in (*PARTS, *sorted(set(parts) - set(PARTS))):
        if name in shown:
            size = parts.get(name, 0)
            label = (CPU_LABELS.get(name) if on_cpu else None) or LABELS.get(name, name)
            yield Part(UNTRACED if on_cpu and name == "unattributed" else name, label, size, begin)
            begin += size


def _on_device(made: Waterfall, rank: RankModel, reserved: int, sample: DeviceSample | None) -> Waterfall:
    peak = made.peak
    made = replace(made, unused=max(0, reserved - peak), total=rank.capacity_bytes, ended=not rank.alive)
    if sample is None or sample.kind != "gpu" or made.ended:
        return made
    made = replace(made, used=sample.used_bytes, total=sample.total_bytes)
    # The sample is current, not from the peak: memory outside PyTorch is used minus currently reserved memory.
    now = footprint(rank.reserved_bytes, sample, rank.rank)
    if now is None:
        return made
    unexplained, since = now.unexplained + min(0, now.context), rank.reserved_bytes - max(reserved, peak)
    return replace(made, context=max(0, now.context), others=now.others, unexplained=unexplained, since=since)


@dataclass(frozen=True, slots=True)
class RankBar:
    """One rank's bar: the composition of its peak."""

    rank: int
    step: int
    phase: str
    parts: tuple[tuple[str, int], ...]
    """Parts and bytes from the bottom up; the last may be ``unused``, reserved but not allocated."""
    peak: int


def rank_bars(ranks: Iterable[RankModel], phase: str) -> list[RankBar]:
    """Return a bar for each rank that has finished a step; an empty ``phase`` selects each rank's highest."""
    found: list[RankBar] = []
    for rank in ranks:
        composition = rank.memory.latest
        made = waterfall(rank, composition, phase, None) if composition is not None else None
        made = made or unanalysed(rank, phase, None)
        if made is not None:
            parts = [(part.name, part.bytes) for part in made.parts if part.bytes > 0]
            parts += [("unused", made.unused)] if made.unused else []
            found.append(RankBar(made.rank, made.step, made.phase, tuple(parts), made.peak))
    return found


_STEADY_STEPS = 2  # predictions apply from this step on: the first step begins without the optimizer's states


def comparable(rank: RankModel, prediction: Prediction | None) -> bool:
    """Return whether a rank's peaks may be compared with the prediction."""
    return prediction is not None and not prediction.refused and not rank.on_cpu and rank.step >= _STEADY_STEPS


def compared_phases(rank: RankModel, prediction: Prediction | None) -> list[Compared]:
    """Return the highest peak of each phase with its prediction, in the order of phases; empty without a prediction."""
    if prediction is None or not comparable(rank, prediction):
        return []
    ranking = rank.memory.ranking
    marks = {mark.phase: mark for mark in ranking.standing} if ranking is not None else {}
    found = [_of_mark(rank, prediction, marks[name]) for name in STEP_PHASES if name in marks]
    return [one for one in found if one is not None]


def predicted_phase(
    rank: RankModel, prediction: Prediction | None, composition: Composition | None, step: int, phase: str
) -> PredictedPhase | None:
    """Return the prediction for one phase of one step; None if there is none, or if the step's batch is unknown."""
    if prediction is None or not comparable(rank, prediction):
        return None
    elements = _elements(rank, step)
    found = predicted(prediction, rank.rank, phase, elements)
    if found is None or (composition is not None and composition.measure != "cuda"):
        return None
    return found


def highest_prediction(model: RunModel) -> Compared | None:
    """Return the phase with the run's highest peak, with its prediction; None if there is none."""
    peak, prediction = model.peak, model.prediction
    rank = model.ranks.get(peak.rank) if peak is not None else None
    if peak is None or rank is None or prediction is None or not comparable(rank, prediction):
        return None
    ranking = rank.memory.ranking
    if ranking is None or ranking.first.bytes < peak.bytes * 0.99:  # the peak is of a phase without a prediction
        return None
    return _of_mark(rank, prediction, ranking.first)


def _of_mark(rank: RankModel, prediction: Prediction, mark: PeakMark) -> Compared | None:
    found = compared(prediction, rank.rank, mark.phase, mark.bytes, mark.size)
    if found is None or not found.parted:
        return found
    taken = [_of_composition(rank, prediction, one, mark.phase) for one in (rank.memory.highest, rank.memory.latest)]
    of_itself = next((one for one in taken if one is not None and one.measured_bytes == mark.bytes), None)
    # The composition of another step is sufficient: a prediction's error does not depend on the batch.
    best = of_itself or max(filter(None, taken), key=lambda one: one.by_bytes * found.by_bytes, default=None)
    if best is None or not best.parts or best.by_bytes * found.by_bytes < 0:
        return found
    return msgspec.structs.replace(found, parts=best.parts, parts_step=0 if of_itself else best.parts_step)


def _of_composition(rank: RankModel, prediction: Prediction, taken: Composition | None, phase: str) -> Compared | None:
    if taken is None or taken.measure != "cuda" or taken.step < _STEADY_STEPS:
        return None
    peak = next((one for one in taken.phases if one.name == phase), None)
    if peak is None:
        return None
    found = compared(prediction, rank.rank, phase, peak.peak_bytes, _elements(rank, taken.step), peak.parts)
    return msgspec.structs.replace(found, parts_step=taken.step) if found is not None else None


def _elements(rank: RankModel, step: int) -> int:
    for one in rank.steps:
        if one.step == step:
            return size_of(one.batch_shape)
    sizes = {mark.size for mark in rank.memory.marks}  # all batches alike: then so was that step's
    return sizes.pop() if len(sizes) == 1 else 0
