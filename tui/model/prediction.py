"""Compares a rank's measured peaks with the predicted ones."""

from msgspec.structs import replace

from ...protocol.analysis.estimates.time import Compared, compared, predicted
from ...protocol.messages.memory import Composition, PredictedPhase, Prediction
from ...protocol.messages.telemetry import STEP_PHASES
from ...protocol.recording.results import PeakMark, size_of
from .rank import RankModel
from .run import RunModel

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
    return replace(found, parts=best.parts, parts_step=0 if of_itself else best.parts_step)


def _of_composition(rank: RankModel, prediction: Prediction, taken: Composition | None, phase: str) -> Compared | None:
    if taken is None or taken.measure != "cuda" or taken.step < _STEADY_STEPS:
        return None
    peak = next((one for one in taken.phases if one.name == phase), None)
    if peak is None:
        return None
    found = compared(prediction, rank.rank, phase, peak.peak_bytes, _elements(rank, taken.step), peak.parts)
    return replace(found, parts_step=taken.step) if found is not None else None


def _elements(rank: RankModel, step: int) -> int:
    for one in rank.steps:
        if one.step == step:
            return size_of(one.batch_shape)
    sizes = {mark.size for mark in rank.memory.marks}  # all batches alike: then so was that step's
    return sizes.pop() if len(sizes) == 1 else 0
