"""Allocator events of one rank over its run: rates by phase, the largest allocations, retries, fragmentation."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol.messages.telemetry import PHASES, AllocatorEvents, Step

KEPT = 240
"""Maximum number of sampled steps kept."""


@dataclass(frozen=True, slots=True)
class PhaseRates:
    """Allocator activity in one phase of a sampled step; rates are per second of the phase."""

    name: str
    allocations: int
    frees: int
    allocated_bytes: int
    largest: int
    """The largest single allocation, bytes."""
    segments: int
    """cudaMalloc calls minus cudaFree calls."""
    segment_bytes: int
    """Growth of reserved memory."""
    allocations_per_second: float | None
    """None if the phase's duration is unknown."""
    bytes_per_second: float | None


class AllocatorHistory:
    """The sampled steps of one rank, oldest first, and its retries."""

    __slots__ = ("_past", "_recent", "_step", "last", "retries", "retry_steps", "version")

    def __init__(self) -> None:
        self._recent: deque[AllocatorEvents] = deque(maxlen=KEPT)
        self._past: Sequence[AllocatorEvents] = ()
        """Samples of the whole run, also those after this state."""
        self.last: AllocatorEvents | None = None
        """The latest sampled step."""
        self.retries: int | None = None
        """cudaMalloc retries, each a flush of the allocator's cache, since the process began; None before a step."""
        self.retry_steps: deque[tuple[int, int]] = deque(maxlen=64)
        """Steps with retries and their number, since every step was folded."""
        self.version = 0
        self._step = 0

    def on_step(self, step: Step) -> None:
        """Fold a finished step."""
        before, self.retries = self.retries, step.retries
        follows, self._step = step.step == self._step + 1, step.step
        # If steps are missing in between (after a seek), it is unknown in which step the retries occurred.
        if before is not None and step.retries > before and follows:
            self.retry_steps.append((step.step, step.retries - before))
            self.version += 1

    def on_events(self, events: AllocatorEvents) -> None:
        """Fold a sampled step."""
        if self.last is None or events.step >= self.last.step:
            self.last = events
        if not self._recent or events.step > self._recent[-1].step:
            self._recent.append(events)
        self.version += 1

    def adopt(self, samples: Sequence[AllocatorEvents]) -> None:
        """Add samples of the whole run, by step, before those that were applied here."""
        self._past = samples
        self.version += 1

    @property
    def samples(self) -> list[AllocatorEvents]:
        """All samples up to this state, oldest first, at most ``KEPT``."""
        recent = list(self._recent)
        if not self._past or not recent:
            return recent
        before = bisect_left(self._past, recent[0].step, key=lambda events: events.step)
        return [*self._past[max(0, before - KEPT) : before], *recent][-KEPT:]


def allocations(events: AllocatorEvents) -> int:
    """Count the blocks allocated in a sampled step."""
    return sum(phase.allocations for phase in events.phases)


def allocated_bytes(events: AllocatorEvents) -> int:
    """Return the bytes allocated in a sampled step, including those freed again."""
    return sum(phase.allocated_bytes for phase in events.phases)


def segment_bytes(events: AllocatorEvents) -> int:
    """Return the growth of reserved memory in a sampled step, bytes."""
    return sum(phase.segment_bytes for phase in events.phases)


def phase_rates(events: AllocatorEvents, steps: Iterable[Step]) -> list[PhaseRates]:
    """Return the allocator activity in each phase of a sampled step, in the order of phases.

    ``steps``: recent ones, for probes that do not send phase durations with the sample.
    """
    order = {name: index for index, name in enumerate(PHASES)}
    step = next((step for step in steps if step.step == events.step), None)
    found: list[PhaseRates] = []
    for phase in sorted(events.phases, key=lambda phase: order.get(phase.name, len(order))):
        record = step.phase(phase.name) if step is not None else None
        time = phase.host_us
        if record is not None and not time:
            time = record.host_us if record.device_us is None else record.device_us
        found.append(
            PhaseRates(
                name=phase.name,
                allocations=phase.allocations,
                frees=phase.frees,
                allocated_bytes=phase.allocated_bytes,
                largest=max(phase.largest, default=0),
                segments=phase.segment_allocations - phase.segment_frees,
                segment_bytes=phase.segment_bytes,
                allocations_per_second=phase.allocations * 1e6 / time if time > 0 else None,
                bytes_per_second=phase.allocated_bytes * 1e6 / time if time > 0 else None,
            )
        )
    return found
