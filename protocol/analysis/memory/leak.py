"""Leaks: memory that grows step over step at the same point of the step, separated from noise by a test.

**What is measured**: bytes allocated (never reserved) at the start of a step's forward, or at the step's end if no
forward is known; on the CPU the resident set. Where memory is read by phase in some steps only, it is the end of the
optimizer's phase, which is read in each. Excluded are the first ``FIRST`` steps of a rank, steps with a
checkpoint, and steps with an evaluation unless ``REGULAR`` in a row have one (a policy that acts in evaluation mode).

**The test**, on three windows: 64, 256 and 1,024 steps, each as 16 blocks represented by their minimum, because memory
that a script keeps from a longer batch, such as an output, is temporary. A window shows a leak if, twice in a row,

- Mann-Kendall's S (the pairs of values in which the later one is larger, minus those in which it is smaller) is at
  least 96 of 120: without a trend, of values of any distribution, its probability is 6e-7 per test (exact, by counting
  permutations);
- no single rise is more than 0.3 of the whole, and the median rises by at least 0.1 of it from each quarter of the
  window to the next: a level that changed once or twice is not a leak;
- the rise is at least 16 MiB and 0.02 % of the device; on the CPU 64 MiB and 0.5 % of the host's memory (512 MiB always
  suffice), and glibc's own count of used memory rises by at least half of that, because the resident set alone also
  grows by fragmentation;
- at least half of the rise lies above all levels before the window. Levels that wander or fall again (garbage collected
  at intervals) fail this, unless their first rise is longer than a window;
- the batches do not grow too: S of their sizes is below 56, otherwise outputs kept from them cannot be distinguished
  from a leak.

Values that are correlated over about ten steps make false alarms more likely: 2 in 2,500 runs of 2,500 steps, measured
with autoregressive noise of coefficient 0.9.

**The rate** is the median of all pairs' slopes (Theil-Sen). The device is full when the highest peak of the last step,
growing at that rate, reaches its capacity. One alert for all ranks; a warning, or information if the run's plan ends
before. A leak has stopped if, twice in a row, the last eight blocks grow at less than a fifth of the rate.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median, median_high
from typing import NamedTuple

import msgspec

from ...messages.memory import Cause
from ...messages.telemetry import STEP_PHASES, DeviceSample, Hello, PhaseRecord, Plan, Step
from ..findings.alerts import RANKS_LISTED, DiagnosticRequests
from ..findings.finding import Finding, Resolution
from .causes import LeakFacts, place_of

LENGTH = 16
SURE = 96  # S of a trend; 120 if every pair rises
LIKELY = 56  # S of a possible trend (1 in 175 by chance)
JUMP = 0.3  # maximum share of a trend's rise between two consecutive values
QUARTER = 0.1  # minimum share of a trend's rise between the medians of consecutive quarters
SIZES = (4, 16, 64)  # steps per block of each series
_JOINED = 4
RECENT = 8
STOPPED_SHARE = 0.2
NEW_SHARE = 0.5  # least share of a leak's rise above all levels before the window, unlike that of a wandering level
MIB = 2**20
FIRST = 5
REGULAR = 32
FLOORS, CPU_FLOORS = (16 * MIB, 0.0002), (64 * MIB, 0.005)
"""Least rise of a leak: bytes, and share of the device's memory."""
MOST_FLOOR = 512 * MIB
ORDINARY = len(STEP_PHASES)
_RETOLD_BLOCKS = 8


def mann_kendall(values: Sequence[float]) -> int:
    """Return S of a series; pairs of equal values count as 0."""
    return sum((late > early) - (late < early) for early, late in combinations(values, 2))


def theil_sen(values: Sequence[float]) -> float:
    """Return the median slope of all pairs, in units of the values per position."""
    pairs = combinations(enumerate(values), 2)
    return median([(late - early) / (place - first) for (first, early), (place, late) in pairs])


def climbs(values: Sequence[float]) -> bool:
    """Return whether the whole series rises, as opposed to a level that changed once or twice."""
    whole = max(values) - min(values)
    if whole <= 0 or max(late - early for early, late in pairwise(values)) > JUMP * whole:
        return False
    size = len(values) // 4
    middles = [median_high(values[place : place + size]) for place in range(0, 4 * size, size)]
    return all(late - early >= QUARTER * whole for early, late in pairwise(middles))


class Series:
    """The last blocks of one size: memory level, a second figure that must grow with it, and the batch before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.levels: deque[int] = deque(maxlen=LENGTH)
        self.seconds: deque[int] = deque(maxlen=LENGTH)
        self.batches: deque[int] = deque(maxlen=LENGTH)
        self.highest = 0  # the highest level of all blocks that have left the series
        self.sure = 0  # number of consecutive checks at which it grew

    def add(self, level: int, second: int, batch: int) -> None:
        if len(self.levels) == LENGTH:
            self.highest = max(self.highest, self.levels[0])
        self.levels.append(level)
        self.seconds.append(second)
        self.batches.append(batch)

    def grows(self, floor: int) -> bool:
        """Return whether the series is a trend for the second consecutive time."""
        levels = self.levels
        rise = levels[-1] - levels[0]
        # The cheap test first: it usually fails.
        new_high = levels[-1] - self.highest >= NEW_SHARE * rise
        trend = len(levels) == LENGTH and rise >= floor and new_high and self._is_trend(rise)
        self.sure = self.sure + 1 if trend else 0
        return self.sure > 1

    def _is_trend(self, rise: int) -> bool:
        levels = list(self.levels)
        if mann_kendall(levels) < SURE or not climbs(levels):
            return False
        if self.seconds[-1] >= 0 and self.seconds[-1] - self.seconds[0] < rise // 2:
            return False
        return mann_kendall(list(self.batches)) < LIKELY

    @property
    def rate(self) -> float:
        """Bytes per step: the median of all slopes."""
        return theil_sen(list(self.levels)) / self.size

    def goes_on(self, rate: float) -> bool:
        """Return whether the last blocks still grow at ``STOPPED_SHARE`` of ``rate`` (bytes per step)."""
        recent = list(self.levels)[-RECENT:]
        least = STOPPED_SHARE * rate * self.size
        if len(recent) < RECENT or recent[-1] - recent[0] >= 2 * least * (RECENT - 1):
            return True
        return theil_sen(recent) >= least


class Levels:
    """The series of one rank."""

    def __init__(self) -> None:
        self.series = tuple(Series(size) for size in SIZES)
        self._steps = 0
        self._level = self._second = self._batch = 0

    def add(self, level: int, second: int, batch: int) -> int:
        """Add one step; return the number of series with a new block.

        ``second`` is another figure that a leak raises too (negative: none), ``batch`` the positions of the previous
        batch, whose outputs may still be referenced.
        """
        steps = self._steps
        if steps & 3 == 0 or level < self._level:
            self._level, self._second, self._batch = level, second, batch
        self._steps = steps = steps + 1
        if steps & 3:
            return 0
        self.series[0].add(self._level, self._second, self._batch)
        count = 1
        while count < len(SIZES) and steps % SIZES[count] == 0:
            finer = self.series[count - 1]
            lowest = min(range(-_JOINED, 0), key=finer.levels.__getitem__)
            self.series[count].add(finer.levels[lowest], finer.seconds[lowest], finer.batches[lowest])
            count += 1
        return count


def _level(record: PhaseRecord, *, at_start: bool) -> tuple[int, int]:
    """Return the level at one end of a phase, and the second figure of ``Levels.add``."""
    allocated = record.allocated.start if at_start else record.allocated.end
    if record.resident is None:
        return allocated, -1
    return record.resident.start if at_start else record.resident.end, allocated


@dataclass
class _Open:
    """A leak of one rank."""

    series: Series
    rate: float
    blocks: int = 0
    slow: int = 0  # number of consecutive checks at which it had stopped


class _Rank:
    def __init__(self) -> None:
        self.seen = 0
        self.levels, self.after_updates = Levels(), Levels()
        """At the start of the forward; at the end of the optimizer's phase, which coarse steps have, too."""
        self.batch = 0
        self.capacity = 0
        self.cpu = False
        self.host = ""
        self.phases = self.place = 0  # number of phases of its steps, and the index of the measured one
        self.evaluated = 0  # number of its last steps with an evaluation, without a checkpoint
        self.name = ""
        self.floor = 64 * MIB
        self.open: _Open | None = None


class LeakDetector:
    """Finds leaks (rules: this module's docstring). Pure: all times are passed in."""

    def __init__(self, asks: DiagnosticRequests) -> None:
        self._asks = asks
        self._ranks = defaultdict[int, _Rank](_Rank)
        self._total_steps = 0
        self._place = ""
        self._cause: Cause | None = None
        self._latest: Finding | None = None

    def hello(self, hello: Hello) -> None:
        rank = self._ranks[hello.rank]
        rank.capacity = hello.device.capacity_bytes
        rank.cpu = hello.memory_measure != "cuda"
        rank.host = hello.host
        low, share = CPU_FLOORS if rank.cpu else FLOORS
        rank.floor = min(MOST_FLOOR, max(low, int(share * rank.capacity)))

    def plan(self, plan: Plan) -> None:
        self._total_steps = plan.total_steps

    def step(self, step: Step) -> list[Finding]:
        rank = self._ranks[step.rank]
        rank.seen += 1
        batch = rank.batch
        shape = step.batch_shape
        rank.batch = shape[0] * shape[1] if len(shape) > 1 else 0
        if rank.seen <= FIRST or not step.phases:
            return []
        phases = step.phases
        # Steps of four phases or fewer are usually alike, so the previous step's index is tried first.
        if len(phases) != rank.phases or phases[rank.place].name != rank.name:
            rank.phases = len(phases) if len(phases) <= ORDINARY else 0
            names = [record.name for record in phases]
            evaluates, saves = "eval" in names, "checkpoint" in names
            rank.evaluated = rank.evaluated + 1 if evaluates and not saves else 0
            if saves or (evaluates and rank.evaluated <= REGULAR):
                rank.phases = 0
                return []
            rank.place = names.index("forward") if "forward" in names else len(names) - 1
            rank.name = names[rank.place]
        record, new = phases[rank.place], 0
        updating = next((each for each in phases if each.name == "optimizer" and not each.coarse), None)
        if updating is not None:
            new = rank.after_updates.add(*_level(updating, at_start=False), batch)
        if step.memory_every > 1 and updating is not None and rank.open is None:
            rank.levels = rank.after_updates
        if rank.levels is not rank.after_updates:
            if record.coarse:
                return []
            new = rank.levels.add(*_level(record, at_start=rank.name == "forward"), batch)
        return self._check(step, rank, new) if new else []

    def cause(self, cause: Cause) -> list[Finding]:
        """Process a cause: stacks of the blocks that whole steps left allocated."""
        known = self._latest
        if cause.reason != "leak" or known is None:
            return []
        self._cause = cause
        if cause.groups and cause.groups[0].frames and not self._place:
            self._place = place_of(cause.groups[0].frames)
        facts = msgspec.structs.replace(known.facts, cause=cause, place=self._place)
        self._latest = msgspec.structs.replace(known, facts=facts)
        return [msgspec.structs.replace(known, facts=facts, state="explained")]

    def restore(self, finding: Finding) -> None:
        """Restore a leak from the recording, so that it is updated and not raised twice."""
        facts: LeakFacts | None = finding.facts
        if facts is None or finding.state == "resolved":
            return
        self._place = facts.place
        self._latest = finding
        size = facts.block_steps
        for number in finding.ranks:
            rank = self._ranks[number]
            series = rank.levels.series[SIZES.index(size) if size in SIZES else 0]
            rank.open = _Open(series, float(facts.bytes_per_step))

    def drop(self, number: int) -> list[Finding]:
        """Resolve the leak of a rank that has ended."""
        rank = self._ranks.get(number)
        return self._close(rank, Resolution("rank_ended")) if rank is not None and rank.open is not None else []

    def _check(self, step: Step, rank: _Rank, new: int) -> list[Finding]:
        opened = rank.open
        if opened is not None:
            # A wider window measures the rate better, but detects its end later.
            if opened.series not in rank.levels.series[:new]:
                return []
            opened.blocks += 1
            opened.slow = 0 if opened.series.goes_on(opened.rate) else opened.slow + 1
            if opened.slow > 1:
                return self._close(rank, Resolution("calm", step.step))
            if opened.blocks % _RETOLD_BLOCKS or len(opened.series.levels) < 2:
                return []
            opened.rate = opened.series.rate
            return [self._finding(step, rank, opened)]
        for series in rank.levels.series[:new]:
            if series.grows(rank.floor):
                rank.open = _Open(series, series.rate)
                self._asks.leak(step.rank)
                return [self._finding(step, rank, rank.open)]
        return []

    def _close(self, rank: _Rank, why: Resolution) -> list[Finding]:
        rank.open = None
        for series in rank.levels.series:
            series.sure = 0
        if any(other.open is not None for other in self._ranks.values()):
            return []
        return [Finding("leak", why, "resolved")]

    def _finding(self, step: Step, rank: _Rank, opened: _Open) -> Finding:
        growing = {number: other.open.rate for number, other in self._ranks.items() if other.open is not None}
        listed = sorted(growing)[:RANKS_LISTED]
        rate = max(opened.rate, 1.0)
        peak = step.peak_phase.peak_span.peak if step.peak_phase is not None else opened.series.levels[-1]
        # The host's memory is shared by the ranks on it, a device is its rank's own.
        sharing = sum(1 for other in self._ranks.values() if other.host == rank.host) if rank.cpu else 1
        left = max(0, rank.capacity - peak * sharing)
        full = step.step + int(left / (rate * sharing)) if rank.capacity else 0
        in_time = bool(full and self._total_steps and full > self._total_steps)
        levels = opened.series.levels
        facts = LeakFacts(
            bytes_per_step=round(rate),
            full_at_step=full,
            window_steps=(len(levels) - 1) * opened.series.size,
            block_steps=opened.series.size,
            rise_bytes=levels[-1] - levels[0],
            level_bytes=levels[-1],
            peak_bytes=peak,
            capacity_bytes=rank.capacity,
            measure="resident" if rank.cpu else "allocated",
            bytes_per_step_by_rank={str(key): round(growing[key]) for key in listed},
            latest_rank=step.rank,
            ends_at_step=self._total_steps if in_time else 0,
            place=self._place,
            cause=self._cause,
        )
        severity = "info" if in_time else "warning"
        self._latest = Finding("leak", facts, severity=severity, ranks=tuple(listed), step=step.step)
        return self._latest


class Footprint(NamedTuple):
    """Parts of a device's used memory outside of what PyTorch reserved for a rank, in bytes; with that they add up.

    NVML reports processes, PyTorch's allocator reports tensors. They are read at different moments, so ``context`` or
    ``unexplained`` may be negative; they are not clipped, so that the figures always add up.
    """

    context: int  # the process's used (NVML) minus reserved: the CUDA context, its modules, buffers of NCCL and cuBLAS
    others: int  # memory of other processes on the device (NVML)
    unexplained: int  # used (NVML, of the device) minus all processes: the driver's own


def footprint(reserved: int, sample: DeviceSample, rank: int) -> Footprint | None:
    """Combine the reserved bytes of a rank's allocator with NVML's sample of its device.

    None if NVML lists no process of that rank (in a container it may not see any).
    """
    own = sum(process.used_bytes for process in sample.processes if process.rank == rank)
    others = sum(process.used_bytes for process in sample.processes if process.rank != rank)
    return Footprint(own - reserved, others, sample.used_bytes - own - others) if own else None
