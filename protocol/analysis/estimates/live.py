"""Compares a live run's peaks with the predicted ones."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from ...messages.prediction import PredictedPhase, PredictedPoint, Prediction

FLOOR_BYTES = 8 << 20
"""Differences below this are ignored: workspaces of libraries, rounding."""
_MAIN_SHARE = 0.2
"""Minimum share of a difference for a part to be named."""
_MOST_PARTS = 2


class Compared(msgspec.Struct, frozen=True):
    """One phase of one rank: the highest peak, and the prediction for a batch of that size."""

    phase: str
    measured_bytes: int
    predicted_bytes: int
    allowed_bytes: float
    """Allowed difference: the expected error."""
    parts: tuple[tuple[str, int], ...] = ()
    """The parts with most of the difference, measured minus predicted, if it exceeds the allowed one and a step was
    analysed.
    """
    parts_step: int = 0
    """The step of ``parts``, if it is not that of the peak."""

    @property
    def by_bytes(self) -> int:
        """Measured minus predicted."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def share(self) -> float:
        """The difference as a share of the prediction."""
        return self.by_bytes / self.predicted_bytes if self.predicted_bytes else 0.0

    @property
    def parted(self) -> bool:
        """Whether they differ by more than the expected error."""
        return abs(self.by_bytes) > self.allowed_bytes


def predicted(prediction: Prediction, rank: int, phase: str, elements: int) -> PredictedPhase | None:
    """Return the prediction for a phase with batches of a given size.

    Args:
        rank: the rank; for a rank without a prediction the nearest one is used.
        elements: elements of the largest micro-batch: sequences times their length.

    Returns:
        None if the phase has no prediction, or none for batches of this size.
    """
    points = _points(prediction.points, rank)
    if not points or prediction.micro_batch < 1 or elements < 1:
        return None
    length = elements / prediction.micro_batch
    for point in points:
        if point.sequence_length == length:
            return _phase(point, phase)
    for below, above in pairwise(points):
        if below.sequence_length < length < above.sequence_length:
            share = (length - below.sequence_length) / (above.sequence_length - below.sequence_length)
            first, second = _phase(below, phase), _phase(above, phase)
            return _between(first, second, share) if first is not None and second is not None else None
    return None


def compared(
    prediction: Prediction,
    rank: int,
    phase: str,
    measured_bytes: int,
    elements: int,
    parts: Mapping[str, int] | None = None,
) -> Compared | None:
    """Return a phase's peak with its prediction; None if there is no prediction.

    Args:
        parts: composition of the peak, if it was analysed.
    """
    found = predicted(prediction, rank, phase, elements)
    if found is None or found.allocated_peak_bytes <= 0:
        return None
    expected = found.allocated_peak_bytes
    allowed = max(FLOOR_BYTES, prediction.error * expected)
    result = Compared(phase, measured_bytes, expected, allowed)
    if not result.parted or parts is None:
        return result
    return msgspec.structs.replace(result, parts=tuple(_main_parts(differences(parts, found.parts), result.by_bytes)))


def differences(measured: Mapping[str, int], expected: Mapping[str, int]) -> dict[str, int]:
    """Return each part's bytes, measured minus predicted."""
    return {name: measured.get(name, 0) - expected.get(name, 0) for name in {**measured, **expected}}


def _main_parts(by_part: Mapping[str, int], by: int) -> Sequence[tuple[str, int]]:
    """Return the parts with most of a difference, the largest first."""
    same = [(name, size) for name, size in by_part.items() if size * by > 0 and abs(size) >= _MAIN_SHARE * abs(by)]
    return sorted(same, key=lambda one: -abs(one[1]))[:_MOST_PARTS]


def _points(points: Sequence[PredictedPoint], rank: int) -> list[PredictedPoint]:
    """Return the points of the nearest rank, by length."""
    nearest = min((point.rank for point in points), key=lambda one: (abs(one - rank), one), default=None)
    mine = [point for point in points if point.rank == nearest]
    return sorted(mine, key=lambda point: point.sequence_length)


def _phase(point: PredictedPoint, name: str) -> PredictedPhase | None:
    return next((phase for phase in point.phases if phase.name == name), None)


def _between(first: PredictedPhase, second: PredictedPhase, share: float) -> PredictedPhase:
    def on_line(low: int, high: int) -> int:
        return round(low + (high - low) * share)

    names = {**first.parts, **second.parts}
    return PredictedPhase(
        first.name,
        on_line(first.allocated_peak_bytes, second.allocated_peak_bytes),
        on_line(first.reserved_peak_bytes, second.reserved_peak_bytes),
        {name: on_line(first.parts.get(name, 0), second.parts.get(name, 0)) for name in names},
    )
