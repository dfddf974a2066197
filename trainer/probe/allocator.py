"""The allocator's own trace as numbers, read now and then, never for more than its share of the time.

PyTorch keeps a ring of every allocation and free (``_record_memory_history``, without stacks: 0.4 % of a 55 ms step,
measured on an H200). Reading costs 0.6 us an entry and holds the interpreter's lock, so the publisher reads right
after a step, and the next time only when that has cost less than ``TIME_SHARE`` of what has passed since.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...protocol import wire
from ...protocol.telemetry import AllocatorEvents, AllocatorPhase
from . import guard
from .raw import Mark, StepRaw
from .recording import Recording
from .redirect import read_options

if TYPE_CHECKING:
    from .probe import Probe

TIME_SHARE = 0.002
LARGEST = 5
MIN_SECONDS = 1.0


class AllocatorWatch:
    """Reads the trace of one step at a time, when the budget allows; for the publisher thread."""

    def __init__(self, probe: "Probe", recording: Recording, send: Callable[[wire.Message], None]) -> None:
        self._probe = probe
        self._recording = recording
        self._send = send
        self._wanted = read_options().get("allocator_events", True) is not False
        self._next = 0.0
        self._latest: StepRaw | None = None

    def note(self, raw: StepRaw) -> None:
        """A step's message has been sent; its trace may be read next."""
        self._latest = raw

    def tick(self) -> None:
        """Record numbers once there is a CUDA allocator; read them when it is due and a step has just ended."""
        recording = self._recording
        if not self._wanted or recording.by_script or recording.mode == "stacks":
            return
        try:
            if recording.mode == "off":
                if self._probe.device.memory.measure == "cuda" and recording.numbers():
                    self._next = time.monotonic() + MIN_SECONDS
            elif self._latest is not None and time.monotonic() >= self._next:
                raw, self._latest = self._latest, None
                self._read(raw)
        except Exception as error:
            self._wanted = False
            guard.log_error("allocator events", error)

    def _read(self, raw: StepRaw) -> None:
        start = time.perf_counter_ns()
        trace = self._recording.read(self._probe.device.memory.device_index)
        # Mark times are perf_counter's, entry times the epoch's; a step knows its end on both clocks.
        offset_ns = round(raw.ended * 1e9) - raw.marks[-1].ns
        phases = attribute(trace, raw.marks, offset_ns)
        spent = time.perf_counter_ns() - start
        self._next = time.monotonic() + max(MIN_SECONDS, spent / 1e9 / TIME_SHARE)
        if phases:
            rank = self._probe.about.rank
            self._send(AllocatorEvents(rank, raw.number, time.time(), phases, len(trace), spent // 1000))


def attribute(trace: list[dict[str, Any]], marks: list[Mark], offset_ns: int) -> list[AllocatorPhase]:
    """Sum up a trace's entries by the phase they fell into.

    Args:
        trace: entries with ``action``, ``size`` and ``time_us`` (microseconds since the epoch), oldest first.
        marks: the step's marks; entries before the first and after the last belong to other steps.
        offset_ns: what to add to a mark's time to get nanoseconds since the epoch.

    Returns:
        The phases that had entries. Empty when the ring no longer reaches back to the step's beginning.
    """
    borders = [(mark.ns + offset_ns) // 1000 for mark in marks]
    names: list[str] = []
    for mark in marks:
        names.append(mark.phase or names[-1])
    if not trace or trace[0].get("time_us", 0) > borders[1 if len(borders) > 2 else 0]:
        return []
    sums: dict[str, _Sums] = {}
    for entry in reversed(trace):
        place = bisect_right(borders, entry["time_us"]) - 1
        if place < 0:
            break
        if place < len(borders) - 1:
            sums.setdefault(names[place], _Sums()).add(entry["action"], entry["size"])
    return [sums[name].phase(name) for name in dict.fromkeys(names) if name in sums]


class _Sums:
    def __init__(self) -> None:
        self.allocations = self.frees = self.allocated = self.freed = 0
        self.segment_allocations = self.segment_frees = self.segment_bytes = 0
        self.sizes: list[int] = []

    def add(self, action: str, size: int) -> None:
        if action == "alloc":
            self.allocations += 1
            self.allocated += size
            self.sizes.append(size)
        elif action == "free_completed":
            self.frees += 1
            self.freed += size
        elif action == "segment_alloc":
            self.segment_allocations += 1
            self.segment_bytes += size
        elif action == "segment_free":
            self.segment_frees += 1
            self.segment_bytes -= size

    def phase(self, name: str) -> AllocatorPhase:
        largest = sorted(self.sizes, reverse=True)[:LARGEST]
        return AllocatorPhase(
            name,
            self.allocations,
            self.frees,
            self.allocated,
            self.freed,
            largest,
            self.segment_allocations,
            self.segment_frees,
            self.segment_bytes,
        )
