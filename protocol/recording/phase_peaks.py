"""Highest peak of each phase of a rank, by size of batch: the few steps that set a mark, out of all steps.

A peak that does not rise by more than noise sets no mark, so a run of a million steps has some dozens of them. What
follows from the marks (which phase makes the peak, at which lengths, since when) is in ``ftmon.tui.model.peak_phase``.
"""

from math import log2, prod

import msgspec

from ..messages.telemetry import Step

RISE_SHARE = 0.002
RISE_BYTES = 2**20
"""A mark is set by a peak higher than the last one by both of these."""

BUCKETS_AN_OCTAVE = 16
"""Batches whose sizes differ by less than a sixteenth of an octave (4 %) count as one size."""


class PeakMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phase came higher than ever before with batches of this size."""

    rank: int
    step: int
    phase: str
    bytes: int
    """Peak of ``allocated``, or of the resident set on a CPU."""
    shape: list[int] = []
    """Shape of the step's largest micro-batch; empty where it is not known."""

    @property
    def size(self) -> int:
        """Elements of that batch; 0 where it is not known."""
        return size_of(self.shape)


def size_of(shape: list[int]) -> int:
    """Count the elements of a batch; 0 for an unknown shape, or one that makes no sense."""
    return max(0, prod(shape)) if shape else 0


def bucket_of(shape: list[int]) -> int:
    """Number the size of a batch; sizes next to each other share a number. -1 where it is not known."""
    size = size_of(shape)
    return int(log2(size) * BUCKETS_AN_OCTAVE) if size > 0 else -1


class PhasePeaks:
    """The marks of one rank. Steps in order; a later mark of a size and phase stands for the earlier ones."""

    __slots__ = ("_highest", "_of_shape", "_shape", "marks")

    def __init__(self) -> None:
        self.marks: list[PeakMark] = []
        """In the order they were set."""
        self._highest: dict[int, dict[str, int]] = {}
        """By bucket and phase: what the next peak must exceed."""
        self._shape: list[int] | None = None
        self._of_shape: dict[str, int] = {}

    def see(self, step: Step) -> list[PeakMark]:
        """Add a step; return the marks that it sets, mostly none."""
        if step.batch_shape != self._shape:
            self._shape, self._of_shape = step.batch_shape, self._highest_of(step.batch_shape)
        highest = self._of_shape
        found: list[PeakMark] = []
        for record in step.phases:
            peak = (record.resident or record.allocated).peak
            if peak > highest.get(record.name, 0):
                found.append(PeakMark(step.rank, step.step, record.name, peak, step.batch_shape))
        for mark in found:
            self.put(mark)
        return found

    def put(self, mark: PeakMark) -> None:
        """Add a mark that was set elsewhere."""
        highest = self._highest_of(mark.shape)
        limit = max(int(mark.bytes * (1 + RISE_SHARE)), mark.bytes + RISE_BYTES)
        highest[mark.phase] = max(highest.get(mark.phase, 0), limit)
        self.marks.append(mark)

    def _highest_of(self, shape: list[int]) -> dict[str, int]:
        return self._highest.setdefault(bucket_of(shape), {})
