"""A training step on the allocator in miniature, with the marks the probe would have left and its counters' figures."""

from caching_allocator import CachingAllocator
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.phases.tracker import Mark


class SimulatedStep(CachingAllocator):
    """Times are microseconds since the epoch on both clocks, so a mark's offset is zero."""

    def __init__(self, expandable: bool = False) -> None:
        super().__init__(expandable)
        self.marks: list[Mark] = []
        self.peaks: dict[str, int] = {}  # what was allocated at the highest, by phase
        self._since = 0

    @property
    def now_us(self) -> int:
        return 1_000_000 + len(self.trace)

    def mark(self, phase: str) -> None:
        """End the phase under way, if there is one, and begin the next; the last mark's phase is never looked at."""
        now = self.now()
        peak = max([now.allocated, *(figure.allocated for figure in self.figures[self._since :])])
        if self.marks and self.marks[-1].phase:
            name = self.marks[-1].phase
            peak = max(peak, self.marks[-1].memory.allocated)
            self.peaks[name] = max(self.peaks.get(name, 0), peak)
        self._since = len(self.figures)
        figure = Reading(now.allocated, peak, now.reserved, now.reserved)
        self.marks.append(Mark(phase, self.now_us * 1000 - 500, figure, None, 0, 0))


def same(reading: Reading) -> Reading:
    """Read a mark's figures: they are a ``Reading`` already."""
    return reading
