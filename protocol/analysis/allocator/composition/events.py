"""The allocator's events of one step, counted by phase from its trace, without stacks."""

from ....messages.telemetry import AllocatorPhase
from ....snapshot.model import ALLOC, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from ..snapshot.allocations import columns
from .timeline import Occurrence, Span, Timeline

LARGEST = 5


def count(timeline: Timeline, spans: list[Span], found: list[Occurrence]) -> list[AllocatorPhase]:
    """Count a step's entries by phase.

    Returns:
        The phases with entries, in order of first occurrence. Empty if the ring does not reach back to the start of
        the step's first phase.
    """
    if not spans or not spans[0].covered:
        return []
    sums: dict[str, _Sums] = {}
    for span, occurrence in zip(spans, found, strict=True):
        if span.name == "init":
            continue  # the recorder was started during it
        one = sums.setdefault(span.name, _Sums())
        one.host_us += occurrence.us
        one.add(timeline, span.begin, span.end)
    return [one.phase(name) for name, one in sums.items() if one.entries]


class _Sums:
    def __init__(self) -> None:
        self.host_us = 0
        self.entries = 0
        self.allocations = self.frees = self.allocated = self.freed = 0
        self.segment_allocations = self.segment_frees = self.segment_bytes = 0
        self.sizes: list[int] = []

    def add(self, timeline: Timeline, begin: int, end: int) -> None:
        trace = timeline.allocations.trace
        actions, sizes = bytes(trace.actions[begin:end]), columns(trace.sizes, "q")[begin:end]
        self.entries += end - begin
        asked = [size for action, size in zip(actions, sizes, strict=True) if action == ALLOC]
        self.allocations += len(asked)
        self.allocated += sum(asked)
        self.sizes += asked
        self.frees += actions.count(FREE_COMPLETED)
        self.freed += sum(size for action, size in zip(actions, sizes, strict=True) if action == FREE_COMPLETED)
        for action, size in zip(actions, sizes, strict=True):
            if action in (SEGMENT_ALLOC, SEGMENT_MAP):
                self.segment_allocations += 1
                self.segment_bytes += size
            elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
                self.segment_frees += 1
                self.segment_bytes -= size

    def phase(self, name: str) -> AllocatorPhase:
        return AllocatorPhase(
            name,
            self.allocations,
            self.frees,
            self.allocated,
            self.freed,
            sorted(self.sizes, reverse=True)[:LARGEST],
            self.segment_allocations,
            self.segment_frees,
            self.segment_bytes,
            self.host_us,
        )
