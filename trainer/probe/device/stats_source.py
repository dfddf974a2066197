"""Samples of the CUDA caching allocator's statistics, by the cheaper of two ways."""

from collections.abc import Callable
from functools import partial
from time import monotonic

from .. import guard
from . import allocator_stats
from .allocator_stats import Layout, Place, Stats

SEARCH_EVERY = 8
"""Samples between two attempts to find the allocator's numbers, or to verify them."""
ATTEMPTS = 12
PROOFS = 3
"""Number of times they must equal PyTorch's dictionary before they replace it."""
CHECK_SECONDS = 20.0
"""Seconds between comparisons of the two from then on."""

Sample = Stats | bytes


class StatsSource:
    """Samples PyTorch's nested dictionary at first, and copies the numbers behind it once they are found."""

    def __init__(self, official: Callable[[int], Stats], device: int, devices: int) -> None:
        self.read: Callable[[], Sample] = self._read_searching
        """Returns a sample; for the training thread."""
        self.layout: Layout | None = None
        """Layout of the numbers once they are found, which is before samples are copies of them."""
        self._official = official
        self._device = device
        self._devices = devices
        self._reads = self._proofs = 0
        self._copy: Callable[[], bytes] | None = None
        self._checked = monotonic()
        self._compared: tuple[bytes, Stats, bytes] | None = None
        """A copy, the dictionary, and another copy, to be compared."""

    def check(self) -> None:
        """Compare a copy with the dictionary now and then, and go back to that where they differ; for the publisher.

        It does not read the dictionary: the allocator's lock, for which the interpreter's is not released, may be held
        by a training thread that is stuck in the driver. The training thread does, with its next sample.
        """
        now, copy, layout = monotonic(), self._copy, self.layout
        if copy is None or layout is None or self.read is not copy:
            return
        compared, self._compared = self._compared, None
        if compared is not None:
            self._compare(layout, *compared)
        elif now - self._checked > CHECK_SECONDS:
            self._checked = now
            self.read = partial(self._read_both, copy)

    def _read_both(self, copy: Callable[[], bytes]) -> bytes:
        """Return a copy, and keep what ``check`` compares."""
        before, stats, after = copy(), self._official(self._device), copy()
        self._compared = before, stats, after
        self.read = copy
        return after

    def _compare(self, layout: Layout, copy_before: bytes, stats: Stats, copy_after: bytes) -> None:
        totals = [place for place in layout.places if place[2] in ("allocated", "freed")]
        pick = layout.picker(totals)
        # Other threads may have allocated meanwhile: the dictionary's totals lie between those of the two copies.
        before, after = pick(copy_before), pick(copy_after)
        official = [allocator_stats.value_of(stats, place) for place in totals]
        known = layout.places.keys() >= set(allocator_stats.peaks_in(stats))  # private pools may have been added
        if not known or not all(low <= value <= high for low, value, high in zip(before, official, after, strict=True)):
            self.read = self._read_official
            guard.log("the allocator's numbers are not those that PyTorch returns: its dictionary is read again")

    def _read_official(self) -> Stats:
        return self._official(self._device)

    def _read_searching(self) -> Stats:
        """Return PyTorch's dictionary; at some samples, search for its source."""
        stats = self._official(self._device)
        self._reads += 1
        if self._reads % SEARCH_EVERY:
            return stats
        if self.layout is None or self._copy is None:
            self.layout = allocator_stats.locate(stats, self._device, self._devices)
            self._copy = None if self.layout is None else self.layout.reader()
        elif self._equal(self.layout, self._copy(), stats):
            self._proofs += 1
        if self._proofs >= PROOFS and self._copy is not None:
            self.read = self._copy
        elif self._reads >= ATTEMPTS * SEARCH_EVERY:
            self.read = self._read_official
        return stats

    @staticmethod
    def _equal(layout: Layout, sample: bytes, stats: Stats) -> bool:
        places: list[Place] = list(layout.places)
        return list(layout.picker(places)(sample)) == [allocator_stats.value_of(stats, place) for place in places]
