"""The state of one rank: a fold over its messages."""

from collections import deque
from dataclasses import dataclass

from ...protocol.messages.control import RankState, RankStateName
from ...protocol.messages.telemetry import (
    Closing,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    Oom,
    PhaseRecord,
    SnapshotTaken,
    Stacks,
    Step,
)
from ...protocol.messages.throughput import peak_flops
from .events import AllocatorHistory
from .memory import RankMemory
from .phases import Shares, shares
from .timeline import EMPTY, Timeline

RECENT_STEPS = 240
"""Number of steps kept in full for tables and charts."""

SHARE_STEPS = 8
"""Number of steps over which phase shares are averaged, so that the bar is steady."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest memory of a run so far (allocated on CUDA, resident on the CPU)."""

    bytes: int
    phase: str
    step: int
    time: float
    """When the phase began, seconds since the epoch, on the rank's clock."""
    rank: int
    after: bool = False
    """Whether it was after ``step``, the last one of the rank: in a final evaluation, a save, an export."""

    @property
    def place(self) -> str:
        """Its place, such as ``backward of step 12`` or ``eval after step 30``."""
        return f"{self.phase} {'after' if self.after else 'of'} step {self.step:,}"


class RankModel:
    """State of one rank; ``version`` is incremented with every change."""

    def __init__(self, rank: int, keep_steps: int = RECENT_STEPS) -> None:
        self.rank = rank
        self.hello: Hello | None = None
        self.state: RankStateName = "starting"
        self.state_text = ""
        """Reason of its state, in a few words."""
        self.state_since = 0.0
        """When the state began, seconds since the epoch; 0 while unknown."""
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.beat: Heartbeat | None = None
        """The latest heartbeat; None in a replay, which has none."""
        self.last: Step | None = None
        """The last finished step."""
        self.steps: deque[Step] = deque(maxlen=keep_steps)
        """Recent finished steps, oldest first."""
        self.peak: Peak | None = None
        """The run's peak on this rank."""
        self.reserved_peak = 0
        """Highest reserved bytes of the run."""
        self.timeline = Timeline()
        self.memory = RankMemory()
        """Explanations of its memory."""
        self.allocator = AllocatorHistory()
        """Allocator activity in the sampled steps."""
        self.oom: Oom | None = None
        self.failure: Failure | None = None
        self.goodbye: Goodbye | None = None
        self.stacks: Stacks | None = None
        """The latest stacks, as written by faulthandler."""
        self.native_stacks: Stacks | None = None
        """The latest stacks read by py-spy."""
        self.snapshots: deque[SnapshotTaken] = deque(maxlen=50)
        self.allocated_bytes = 0
        """Latest known allocated bytes."""
        self.reserved_bytes = 0
        self.resident_bytes = 0
        """Latest known resident set size; 0 on CUDA."""
        self.dropped = 0
        """Number of messages that its probe has dropped."""
        self.clock_offset = 0.0
        """Seconds to add to its host's times for the hub's time."""
        self.version = 0
        self.peak_flops: float | None = None
        """Data-sheet peak of its device for its data type, FLOP/s; None: not known."""
        self._shares: tuple[tuple[int, int], Shares] | None = None

    @property
    def step(self) -> int:
        """The last finished step's number; 0 before the first."""
        last = self.last
        beat = self.beat
        return max(last.step if last else 0, beat.step - 1 if beat else 0)

    @property
    def phase(self) -> str:
        """Its phase in the latest heartbeat; empty if unknown."""
        return self.beat.phase if self.beat else ""

    @property
    def capacity_bytes(self) -> int:
        """Memory of its device, the scale of memory graphs; 0 before its ``Hello``."""
        return self.hello.device.capacity_bytes if self.hello else 0

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on the CPU, where figures are glibc's and peaks are of the resident set."""
        return self.hello is not None and self.hello.memory_measure == "glibc"

    @property
    def alive(self) -> bool:
        """Whether its process is alive according to the hub."""
        return self.state not in ("gone", "finished")

    @property
    def shares(self) -> Shares:
        """Shares of the step's time by phase, over the last few steps."""
        recent = self.steps
        known_for = (id(self.last), len(recent))
        if self._shares is None or self._shares[0] != known_for:
            last = (recent[index] for index in range(max(0, len(recent) - SHARE_STEPS), len(recent)))
            self._shares = known_for, shares(last)
        return self._shares[1]

    @property
    def phases(self) -> list[PhaseRecord]:
        """The phases of the last finished step, in the order they ran."""
        return sorted(self.last.phases, key=lambda record: record.start_us) if self.last is not None else []

    def begin_job(self, now: float) -> None:
        """Reset for another job of the run; memory over time and snapshots are kept."""
        self.state, self.state_text, self.state_since = "starting", "", now
        self.exit_code = self.signal = None
        self.hello = None
        self.beat = self.last = self.goodbye = self.oom = self.failure = None
        self.stacks = self.native_stacks = None
        self.steps.clear()
        self.peak = None
        self.reserved_peak = 0
        self.memory = RankMemory()
        self.allocator = AllocatorHistory()
        self.version += 1

    def on_step(self, step: Step) -> bool:
        """Fold a finished step; False: it is already known and changes nothing."""
        last = self.last
        if last is not None and step.step <= last.step and any(known.started == step.started for known in self.steps):
            return False
        started = step.started + self.clock_offset
        highest = self.peak.bytes if self.peak is not None else -1
        # Fast path, since this runs for every step of every rank: most steps are in one column.
        column = int(started)
        at_once = column == int(started + step.host_us * 1e-6)
        allocated_peak = reserved_peak = resident_peak = EMPTY
        allocated = reserved = resident = None
        for record in step.phases:
            allocated, reserved, resident = record.allocated, record.reserved, record.resident
            highs = allocated.peak, reserved.peak, EMPTY if resident is None else resident.peak
            true = highs[0] if resident is None else highs[2]
            if true > highest:
                highest = true
                self.peak = Peak(true, record.name, step.step, started + record.start_us * 1e-6, self.rank)
            if not at_once:
                begin = started + record.start_us * 1e-6
                self.timeline.add_range(int(begin), int(begin + record.host_us * 1e-6), *highs)
            if highs[0] > allocated_peak:
                allocated_peak = highs[0]
            if highs[1] > reserved_peak:
                reserved_peak = highs[1]
            if highs[2] > resident_peak:
                resident_peak = highs[2]
        if at_once and allocated is not None:
            self.timeline.add_range(column, column, allocated_peak, reserved_peak, resident_peak)
        if reserved_peak > self.reserved_peak:
            self.reserved_peak = reserved_peak
        if allocated is not None and reserved is not None:
            self._now(allocated.end, reserved.end, 0 if resident is None else resident.end)
        self.memory.on_step(step)
        self.allocator.on_step(step)
        self.steps.append(step)
        self.dropped = step.dropped
        self.last = step
        if self.state == "starting":
            self.state = "training"
            self.state_since = started
        self.version += 1
        return True

    def on_closing(self, closing: Closing) -> None:
        """Fold the rank's record after its last step; it counts for memory but not as a step."""
        started = closing.started + self.clock_offset
        for record in closing.phases:
            allocated, reserved, resident = record.allocated, record.reserved, record.resident
            begin = started + record.start_us * 1e-6
            highs = allocated.peak, reserved.peak, EMPTY if resident is None else resident.peak
            true = highs[0] if resident is None else highs[2]
            if self.peak is None or true > self.peak.bytes:
                self.peak = Peak(true, record.name, closing.step, begin, self.rank, after=True)
            self.timeline.add_range(int(begin), int(begin + record.host_us * 1e-6), *highs)
            self.reserved_peak = max(self.reserved_peak, highs[1])
        self.version += 1

    def on_hello(self, hello: Hello) -> None:
        """Fold a ``Hello``; that of a new process resets the rank but keeps its history."""
        before = self.hello
        if before is not None and (before.pid, before.start_ticks) != (hello.pid, hello.start_ticks):
            self.state, self.state_text, self.state_since = "starting", "", hello.time
            self.exit_code = self.signal = None
            self.beat = self.goodbye = self.oom = self.failure = None
        self.hello = hello
        self.peak_flops = peak_flops(hello.device.name, hello.matmul_precision)
        if not self.state_since:
            self.state_since = hello.time
        self.version += 1

    def on_beat(self, beat: Heartbeat) -> None:
        """Fold a heartbeat."""
        self.beat = beat
        self.dropped = beat.dropped
        if beat.reserved or beat.allocated:
            self._now(beat.allocated, beat.reserved, beat.resident)
            self.timeline.add(beat.time + self.clock_offset, beat.allocated, beat.reserved, beat.resident or EMPTY)
        self.version += 1

    def on_state(self, state: RankState) -> None:
        """Fold a state determined by the hub."""
        self.state = state.state
        self.state_text = state.text
        self.state_since = state.since or state.time
        self.exit_code = state.exit_code
        self.signal = state.signal
        if not self.alive:
            self.timeline.current = (EMPTY, EMPTY, EMPTY)
        self.version += 1

    def forget_steps(self) -> None:
        """Drop the recent steps, and keep their results: peaks, the last step, the timeline."""
        self.steps.clear()
        self.version += 1

    def remember_step(self, step: Step) -> None:
        """Restore one of the dropped steps."""
        self.steps.append(step)
        self.version += 1

    def _now(self, allocated: int, reserved: int, resident: int) -> None:
        self.allocated_bytes = allocated
        self.reserved_bytes = reserved
        self.resident_bytes = resident
        self.timeline.current = (allocated, reserved, resident or EMPTY)
