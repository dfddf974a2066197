"""Marks: the steps in which a phase of a rank reached a new highest peak for its batch size.

A rise within the noise sets no mark, so a run of a million steps has some dozens of marks.
``ftmon.tui.model.peak_phase`` derives from them which phase makes the peak, at which lengths, since when.
"""

from math import log2, prod

import msgspec

from ..messages.telemetry import Step

RISE_SHARE = 0.002
RISE_BYTES = 2**20
"""A mark is set by a peak higher than the last mark by both of these."""

BUCKETS_AN_OCTAVE = 16
"""Batches whose sizes differ by less than a sixteenth of an octave (4 %) count as one size."""


class PeakMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phase reached a new highest peak with batches of this size."""

    rank: int
    step: int
    phase: str
    bytes: int
    """Peak of ``allocated``, or of the resident set on a CPU."""
    shape: list[int] = []
    """Shape of the step's largest micro-batch; empty: unknown."""

    @property
    def size(self) -> int:
        """Elements of that batch; 0: unknown."""
        return size_of(self.shape)


def size_of(shape: list[int]) -> int:
    """Return the number of elements of a batch; 0 for an unknown or invalid shape."""
    return max(0, prod(shape)) if shape else 0


def bucket_of(shape: list[int]) -> int:
    """Return the bucket number of a batch's size, which similar sizes share; -1: unknown."""
    size = size_of(shape)
    return int(log2(size) * BUCKETS_AN_OCTAVE) if size > 0 else -1


class PhasePeaks:
    """The marks of one rank. Steps are added in order; a later mark of a size and phase replaces the earlier ones."""

    __slots__ = ("_highest", "_of_shape", "_shape", "marks")

    def __init__(self) -> None:
        self.marks: list[PeakMark] = []
        """In the order they were set."""
        self._highest: dict[int, dict[str, int]] = {}
        """The bytes that the next mark must exceed, by bucket and phase."""
        self._shape: list[int] | None = None
        self._of_shape: dict[str, int] = {}

    def see(self, step: Step) -> list[PeakMark]:
        """Add a step; return the marks it sets, usually none."""
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
