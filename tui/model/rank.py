"""The state of one rank: a fold over its messages, with its phase shares, stacks, memory and allocator history."""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...protocol.analysis.stalls import evidence
from ...protocol.host.machine import peak_flops
from ...protocol.messages import telemetry
from ...protocol.messages.control import RankState, RankStateName
from ...protocol.messages.memory import Cause, Composition
from ...protocol.recording.results import PeakMark, PhasePeaks
from ...protocol.text import ranks_counted, sanitize
from .peaks import PeakRanking, rank_phases
from .timeline import EMPTY, Timeline


class RankMemory:
    """The explanations of one rank's memory."""

    __slots__ = ("_past", "_peaks", "_step", "causes", "highest", "latest")

    def __init__(self) -> None:
        self.latest: Composition | None = None
        self.highest: Composition | None = None
        self.causes: dict[str, Cause] = {}
        self._peaks = PhasePeaks()
        self._past: Sequence[PeakMark] = ()  # marks of the whole run, also those after this state; filtered when used
        self._step = 0

    def on_step(self, step: telemetry.Step) -> None:
        self._step = max(self._step, step.step)
        self._peaks.see(step)

    def on_composition(self, composition: Composition) -> None:
        if self.latest is None or composition.step >= self.latest.step:
            self.latest = composition
        if self.highest is None or highest_bytes(composition) > highest_bytes(self.highest):
            self.highest = composition

    def on_cause(self, cause: Cause) -> None:
        known = self.causes.get(cause.phase)
        if known is None or cause.step >= known.step:
            self.causes[cause.phase] = cause

    def adopt(self, marks: Sequence[PeakMark]) -> None:
        """Add the marks of the whole run, in order, from before the steps that were applied here."""
        self._past = marks

    @property
    def marks(self) -> list[PeakMark]:
        """All marks up to this state."""
        return [*(mark for mark in self._past if mark.step <= self._step), *self._peaks.marks]

    @property
    def ranking(self) -> PeakRanking | None:
        """Ranking of the phases by their peaks so far; None before the first step."""
        return rank_phases(self.marks)

    @property
    def cause(self) -> Cause | None:
        """The cause of the largest transient with a known cause."""
        return max(self.causes.values(), key=lambda cause: cause.transient_bytes, default=None)


def highest_bytes(composition: Composition) -> int:
    """Return the highest peak of an analysed step."""
    return composition.peak_phase.peak_bytes if composition.peak_phase is not None else 0


_OWN_SHARE = (*telemetry.STEP_PHASES, "generate")
SHARE_NAMES: tuple[str, ...] = (*(name for name in telemetry.PHASES if name in _OWN_SHARE), "wait", "other")
"""The parts of a step, in the order they are drawn; ``wait`` is time inside collective calls."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a step's time; fractions that add up to 1 (all 0 if unknown)."""

    clock: Literal["device", "host"]  # the device's clock if every step has device times, else the host's
    step_ms: float  # mean duration of these steps, milliseconds
    parts: dict[str, float]
    """Fraction of the step for each name of ``SHARE_NAMES``. On the device's clock collectives run inside the phases'
    kernels and cannot be separated from them, so ``wait`` is 0 there.
    """


def shares(steps: Iterable[telemetry.Step]) -> Shares:
    """Return the shares of these steps' phases, in device time if all steps have it, else in host time.

    Where the device's times are taken in some steps only, their shares are returned. In host time, time inside
    collective calls is subtracted from its phase and counted as ``wait``. The record of
    ``init`` in the first step is excluded, because it lies before that step.
    """
    chosen = list(steps)
    if any(step.memory_every > 1 for step in chosen):
        chosen = [step for step in chosen if _on_device(step)] or chosen
    clock: Literal["device", "host"] = "device" if chosen and all(_on_device(step) for step in chosen) else "host"
    parts = dict.fromkeys(SHARE_NAMES, 0.0)
    total = 0.0
    for step in chosen:
        known = 0
        for record in step.phases:
            if record.name == "init":
                continue
            wait = 0 if clock == "device" else min(record.collective_us, record.host_us)
            time = record.device_us if clock == "device" and record.device_us is not None else record.host_us
            parts[record.name if record.name in _OWN_SHARE else "other"] += time - wait
            parts["wait"] += wait
            known += time
        whole = max(known, (step.device_us if clock == "device" else step.host_us) or 0)
        parts["other"] += whole - known
        total += whole
    if total:
        parts = {name: time / total for name, time in parts.items()}
    return Shares(clock, total / len(chosen) / 1000 if chosen else 0.0, parts)


def _on_device(step: telemetry.Step) -> bool:
    within = [record for record in step.phases if record.name != "init"]
    return bool(within) and all(record.device_us is not None for record in within)


RowKind = Literal["group", "frame", "thread", "native"]


class Row(NamedTuple):
    """One line. ``ranks`` are the ranks of its group."""

    kind: RowKind
    text: str
    ranks: tuple[int, ...]


def rows(
    stacks: Mapping[int, telemetry.Stacks],
    native: Mapping[int, telemetry.Stacks] | None = None,
    unfolded: Collection[int] = (),
) -> list[Row]:
    """Return the rows: a head for each group, then its training thread's frames, innermost first.

    Ranks of ``unfolded`` are shown with all threads, and py-spy's native frames if available, instead of their group's
    frames.
    """
    found: list[Row] = []
    for group in evidence.group({rank: (one.text, one.thread) for rank, one in stacks.items()}):
        ranks = tuple(group.ranks)
        what = group.place.text or "no Python frames"
        by_signal = any(stacks[rank].taken_by == "signal" for rank in ranks)
        held = " (could not answer: native code holds Python's lock)" if by_signal else ""
        found.append(Row("group", f"{ranks_counted(group.ranks)}: {what}{held}", ranks))
        if not set(ranks) & set(unfolded):
            found += [Row("frame", f"{frame.place}  {frame.function}", ranks) for frame in group.frames]
            continue
        for rank in sorted(set(ranks) & set(unfolded)):
            found += _whole(rank, stacks[rank], (native or {}).get(rank), ranks)
    return found


def _whole(rank: int, stacks: telemetry.Stacks, native: telemetry.Stacks | None, ranks: tuple[int, ...]) -> list[Row]:
    found = [Row("thread", f"rank {rank}, all threads", ranks)]
    found += _lines("frame", stacks.text, ranks)
    if native is not None:
        found.append(Row("thread", f"rank {rank}, native frames by py-spy", ranks))
        found += _lines("native", native.text, ranks)
    return found


def _lines(kind: RowKind, text: str, ranks: tuple[int, ...]) -> list[Row]:
    return [Row(kind, sanitize(line), ranks) for line in text.splitlines() if line.strip()]


KEPT = 240


class PhaseRates(NamedTuple):
    """Allocator activity in one phase of a sampled step, with rates per second of the phase.

    The rates are None if the phase's duration is unknown.
    """

    phase: telemetry.AllocatorPhase
    allocations_per_second: float | None
    bytes_per_second: float | None

    @property
    def largest(self) -> int:
        """The largest single allocation, bytes."""
        return max(self.phase.largest, default=0)


class AllocatorHistory:
    """The sampled steps of one rank, oldest first, and its retries."""

    __slots__ = ("_past", "_recent", "_step", "last", "retries", "retry_steps")

    def __init__(self) -> None:
        self._recent: deque[telemetry.AllocatorEvents] = deque(maxlen=KEPT)
        self._past: Sequence[telemetry.AllocatorEvents] = ()  # samples of the whole run, also those after this state
        self.last: telemetry.AllocatorEvents | None = None
        self.retries: int | None = None
        """cudaMalloc retries, each a flush of the allocator's cache, since the process began; None before a step."""
        self.retry_steps: deque[tuple[int, int]] = deque(maxlen=64)
        """Steps with retries and their number, since every step was folded."""
        self._step = 0

    def on_step(self, step: telemetry.Step) -> None:
        before, self.retries = self.retries, step.retries
        follows, self._step = step.step == self._step + 1, step.step
        # If steps are missing in between (after a seek), it is unknown in which step the retries occurred.
        if before is not None and step.retries > before and follows:
            self.retry_steps.append((step.step, step.retries - before))

    def on_events(self, events: telemetry.AllocatorEvents) -> None:
        if self.last is None or events.step >= self.last.step:
            self.last = events
        if not self._recent or events.step > self._recent[-1].step:
            self._recent.append(events)

    def adopt(self, samples: Sequence[telemetry.AllocatorEvents]) -> None:
        """Add samples of the whole run, by step, before those that were applied here."""
        self._past = samples

    @property
    def samples(self) -> list[telemetry.AllocatorEvents]:
        """All samples up to this state, oldest first, at most ``KEPT``."""
        recent = list(self._recent)
        if not self._past or not recent:
            return recent
        before = bisect_left(self._past, recent[0].step, key=lambda events: events.step)
        return [*self._past[max(0, before - KEPT) : before], *recent][-KEPT:]


def allocations(events: telemetry.AllocatorEvents) -> int:
    """Count the blocks allocated in a sampled step."""
    return sum(phase.allocations for phase in events.phases)


def allocated_bytes(events: telemetry.AllocatorEvents) -> int:
    """Return the bytes allocated in a sampled step, including those freed again."""
    return sum(phase.allocated_bytes for phase in events.phases)


def segment_bytes(events: telemetry.AllocatorEvents) -> int:
    """Return the growth of reserved memory in a sampled step, bytes."""
    return sum(phase.segment_bytes for phase in events.phases)


def phase_rates(events: telemetry.AllocatorEvents) -> list[PhaseRates]:
    """Return the allocator activity in each phase of a sampled step, in the order of phases."""
    order = {name: index for index, name in enumerate(telemetry.PHASES)}
    found: list[PhaseRates] = []
    for phase in sorted(events.phases, key=lambda phase: order.get(phase.name, len(order))):
        time, amounts = phase.host_us, (phase.allocations, phase.allocated_bytes)
        found.append(PhaseRates(phase, *(amount * 1e6 / time if time > 0 else None for amount in amounts)))
    return found


RECENT_STEPS = 240  # number of steps kept in full for tables and charts
SHARE_STEPS = 8  # number of steps over which phase shares are averaged, so that the bar is steady


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest memory of a run so far (allocated on CUDA, resident on the CPU)."""

    bytes: int
    phase: str
    step: int
    time: float  # when the phase began, seconds since the epoch, on the rank's clock
    rank: int
    after: bool = False
    """Whether it was after ``step``, the last one of the rank: in a final evaluation, a save, an export."""

    @property
    def place(self) -> str:
        """Its place, such as ``backward of step 12`` or ``eval after step 30``."""
        return f"{self.phase} {'after' if self.after else 'of'} step {self.step:,}"


class RankModel:
    """State of one rank."""

    def __init__(self, rank: int, keep_steps: int = RECENT_STEPS) -> None:
        self.rank = rank
        self.hello: telemetry.Hello | None = None
        self.state: RankStateName = "starting"
        self.state_text = ""
        self.state_since = 0.0  # when the state began, seconds since the epoch; 0 while unknown
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.beat: telemetry.Heartbeat | None = None
        self.last: telemetry.Step | None = None
        self.read: telemetry.Step | None = None  # the last one whose memory was read at each boundary of phases
        self.steps: deque[telemetry.Step] = deque(maxlen=keep_steps)
        self.peak: Peak | None = None
        self.reserved_peak = 0
        self.timeline = Timeline()
        self.memory = RankMemory()
        self.allocator = AllocatorHistory()
        self.oom: telemetry.Oom | None = None
        self.failure: telemetry.Failure | None = None
        self.goodbye: telemetry.Goodbye | None = None
        self.stacks: telemetry.Stacks | None = None  # the latest stacks, as written by faulthandler
        self.native_stacks: telemetry.Stacks | None = None  # the latest stacks read by py-spy
        self.snapshots: deque[telemetry.SnapshotTaken] = deque(maxlen=50)
        self.allocated_bytes = self.reserved_bytes = 0
        self.resident_bytes = 0  # latest known resident set size; 0 on CUDA
        self.dropped = 0
        self.clock_offset = 0.0  # seconds to add to its host's times for the hub's time
        self.peak_flops: float | None = None  # Data-sheet peak of its device for its data type, FLOP/s; None: not known
        self._shares: tuple[tuple[int, int], Shares] | None = None

    @property
    def step(self) -> int:
        """The last finished step's number; 0 before the first."""
        return max(self.last.step if self.last else 0, self.beat.step - 1 if self.beat else 0)

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
    def phases(self) -> list[telemetry.PhaseRecord]:
        """The phases of the last step whose memory was read in each, in the order they ran."""
        step = self.read or self.last
        return sorted(step.phases, key=lambda record: record.start_us) if step is not None else []

    def begin_job(self, now: float) -> None:
        """Reset for another job of the run; memory over time and snapshots are kept."""
        self.state, self.state_text, self.state_since = "starting", "", now
        self.exit_code = self.signal = None
        self.hello = self.beat = self.last = self.read = self.goodbye = self.oom = self.failure = None
        self.stacks = self.native_stacks = self.peak = None
        self.steps.clear()
        self.reserved_peak = 0
        self.memory = RankMemory()
        self.allocator = AllocatorHistory()

    def on_step(self, step: telemetry.Step) -> bool:
        """Fold a finished step; False: it is already known and changes nothing."""
        last = self.last
        if last is not None and step.step <= last.step and any(known.started == step.started for known in self.steps):
            return False
        self._fold_phases(step)
        if step.phases:
            end = step.phases[-1]
            self._now(end.allocated.end, end.reserved.end, end.resident.end if end.resident is not None else 0)
        self.memory.on_step(step)
        self.allocator.on_step(step)
        self.steps.append(step)
        self.dropped = step.dropped
        self.last = step
        if not any(record.coarse for record in step.phases):
            self.read = step
        if self.state == "starting":
            self.state, self.state_since = "training", step.started + self.clock_offset
        return True

    def on_closing(self, closing: telemetry.Closing) -> None:
        """Fold the rank's record after its last step; it counts for memory but not as a step."""
        self._fold_phases(closing)

    def _fold_phases(self, of: telemetry.Step | telemetry.Closing) -> None:
        started, after = of.started + self.clock_offset, isinstance(of, telemetry.Closing)
        for record in of.phases:
            allocated, reserved, resident = record.allocated, record.reserved, record.resident
            begin = started + record.start_us * 1e-6
            highs = allocated.peak, reserved.peak, EMPTY if resident is None else resident.peak
            true = highs[0] if resident is None else highs[2]
            if self.peak is None or true > self.peak.bytes:
                top = (record.coarse and not isinstance(of, telemetry.Closing) and of.peak_phase) or record
                self.peak = Peak(true, top.name, of.step, started + top.start_us * 1e-6, self.rank, after)
            self.timeline.add_range(int(begin), int(begin + record.host_us * 1e-6), *highs)
            self.reserved_peak = max(self.reserved_peak, highs[1])

    def on_hello(self, hello: telemetry.Hello) -> None:
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

    def on_beat(self, beat: telemetry.Heartbeat) -> None:
        self.beat = beat
        self.dropped = beat.dropped
        if beat.reserved or beat.allocated:
            self._now(beat.allocated, beat.reserved, beat.resident)
            self.timeline.add(beat.time + self.clock_offset, beat.allocated, beat.reserved, beat.resident or EMPTY)

    def on_state(self, state: RankState) -> None:
        self.state, self.state_text, self.state_since = state.state, state.text, state.since or state.time
        self.exit_code, self.signal = state.exit_code, state.signal
        if not self.alive:
            self.timeline.current = (EMPTY, EMPTY, EMPTY)

    def _now(self, allocated: int, reserved: int, resident: int) -> None:
        self.allocated_bytes, self.reserved_bytes, self.resident_bytes = allocated, reserved, resident
        self.timeline.current = (allocated, reserved, resident or EMPTY)


TIGHT_FRACTION = 0.92  # above this share of the device a run is called tight: fragmentation alone can then end it
STEADY_STEPS = 2  # steps after which a peak is representative: the first optimizer step creates Adam's states


class Fit(NamedTuple):
    """The verdict, and the rank nearest to its device's capacity."""

    verdict: Literal["unknown", "fits", "tight", "failed"]
    """``unknown``: too few steps, or no capacity; ``failed``: a rank ran out of memory."""
    rank: int | None = None
    capacity_bytes: int = 0


def fit(ranks: Iterable[RankModel]) -> Fit:
    """Judge whether the run fits, by the rank whose peak is the largest share of its device."""
    ranks = list(ranks)
    known = [(rank.peak.bytes / rank.capacity_bytes, rank) for rank in ranks if rank.peak and rank.capacity_bytes]
    fraction, nearest = max(known, key=lambda one: one[0], default=(0.0, None))
    where = (nearest.rank, nearest.capacity_bytes) if nearest is not None else (None, 0)
    if any(rank.oom is not None for rank in ranks):
        return Fit("failed", *where)
    if nearest is None or all(rank.step < STEADY_STEPS for rank in ranks):
        return Fit("unknown", *where)
    return Fit("tight" if fraction > TIGHT_FRACTION else "fits", *where)
