"""Finds stragglers, ranks that work while the others wait for them, from each rank's own work (``work``).

Steps are grouped into blocks of at least ``BLOCK_US``; a longer step is a block by itself. A rank's excess in a block
is the median over its steps of its own work minus the median of the other ranks' work. A block counts against a rank if

- the excess is at least ``EXCESS_SHARE`` of the step and ``EXCESS_US``, and its own work ``RATIO`` times the others';
- the others waited longer than it by at least half of the excess, so that the figures show that they wait for it. Ranks
  whose waiting is not measurable, or that are not in step with each other, are not compared;
- no rank waited less than it by half of the excess: with two slow ranks, the others wait for the slower one.

It is a straggler in each of these cases:

- ``FAST_BLOCKS`` consecutive blocks count against it, with similar excesses and own work ``FAST_RATIO`` times the
  others', and it was rarely that much faster than them before;
- the same for ``GROSS_BLOCKS`` blocks or more that together last as long as ``FAST_BLOCKS`` of the shortest, if the
  excess is ``GROSS_SHARE`` of each step, its own work ``GROSS_RATIO`` times the others', both are steady, and hardly
  any block counted before, or counts now against another rank: random lengths of a few values are steady for 4 steps;
- all but one of ``LONG_BLOCKS`` count.

Ranks with batches of random length rarely reach any of these, because the sign of their excess is random. The finding
is resolved if all but one of ``FAST_BLOCKS`` blocks do not count, or less than half of ``LONG_BLOCKS`` do. After each
end the long window doubles, up to ``LONGEST_BLOCKS``, and after the second end only the long condition applies, so that
ranks that are slow by turns raise only a few alerts in a long run.

Ranks with different numbers of micro-steps are also compared by the work of one micro-step, and the smaller excess
counts, because more micro-steps are not slowness.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any, Literal

import msgspec

from ...messages import control
from ...messages.control import Alert, Result
from ...messages.telemetry import DeviceSample, Hello, Step
from ...text import duration
from ..findings.alerts import Action, DiagnosticRequests
from ..findings.finding import Finding, Kind, Resolution, ResolvedWhy, Shown
from ..words import Words
from . import evidence
from .evidence import Place

# Finds reasons in NVML's samples why a rank's device computes slowly: throttling, lower clocks, other processes.


CLOCK_SHARE = 0.92
"""An SM clock below this share of the other ranks' clocks is a reason."""
_NO_REASON = ("application clocks", "sync boost", "display clocks")
"""Limits set by a user on purpose."""


class DeviceFacts(msgspec.Struct, frozen=True):
    """Possible reasons why a rank's device is slow."""

    host: str
    index: int
    throttle_reasons: list[str]
    own_reasons: list[str]
    """Those that do not apply to all other ranks' devices too."""
    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    """None: not compared."""
    others_sm_clock_mhz: int | None = None
    """Median of the other ranks' devices."""
    strangers: list[int] = []
    """Pids of processes on it that are of no rank."""

    @property
    def is_clocked_lower(self) -> bool:
        """Whether its clock is clearly lower than the others'."""
        own, others = self.sm_clock_mhz, self.others_sm_clock_mhz
        return own is not None and others is not None and own < CLOCK_SHARE * others

    @property
    def is_slow(self) -> bool:
        """Whether any reason was found."""
        return bool(self.own_reasons or self.strangers) or self.is_clocked_lower


class SlowDevices:
    """Keeps the latest sample of every rank's device."""

    def __init__(self) -> None:
        self._devices: dict[int, tuple[str, str, int]] = {}
        self._samples: dict[tuple[str, str], DeviceSample] = {}
        self._by_index: dict[tuple[str, int], DeviceSample] = {}

    def hello(self, hello: Hello) -> None:
        """Record the device of a rank."""
        if hello.device.kind == "cuda":
            self._devices[hello.rank] = hello.host, hello.device.uuid, hello.device.index

    def sample(self, sample: DeviceSample) -> None:
        """Keep a sample of a GPU."""
        if sample.kind == "gpu":
            self._samples[sample.host, sample.uuid] = sample
            self._by_index[sample.host, sample.index] = sample

    def why(self, rank: int) -> DeviceFacts | None:
        """Return why a rank's device may be slower than the other ranks'; None without a sample of it."""
        mine = self._of(rank)
        if mine is None:
            return None
        others = [one for other in self._devices if other != rank and (one := self._of(other)) is not None]
        reasons = [reason for reason in mine.throttle_reasons if reason not in _NO_REASON]
        # A limit that applies to all devices does not explain why this one is slower.
        own = [reason for reason in reasons if not all(reason in one.throttle_reasons for one in others) or not others]
        clocks = sorted(one.sm_clock_mhz for one in others if one.sm_clock_mhz)
        compared = bool(mine.sm_clock_mhz and clocks)
        return DeviceFacts(
            mine.host,
            mine.index,
            reasons,
            own,
            mine.temperature_c,
            mine.sm_clock_mhz if compared else None,
            clocks[len(clocks) // 2] if compared else None,
            [process.pid for process in mine.processes if process.rank is None],
        )

    def _of(self, rank: int) -> DeviceSample | None:
        host, uuid, index = self._devices.get(rank, ("", "", -1))
        return self._samples.get((host, uuid)) if uuid else self._by_index.get((host, index))


# Splits a rank's step into own work and waiting for others, the figures by which stragglers are found.
#
# Collectives make the wall time of a step equal on all ranks; a slow rank works while the others wait.
#
# On the CPU a phase's own work is its host time without the time inside collectives. Time between phases (``idle``:
# logging, Python code of the loop, a batch read without a DataLoader) is work too.
#
# On a GPU, waiting happens on the device, and the host waits for the device wherever the script reads a value.
# Therefore device time is used: the time between CUDA events at a phase's ends, including gaps without kernels, minus
# the time for which the stream waited for other ranks. If that wait was measured (DDP's reducer:
# ``PhaseRecord.waited_us``), all phases count. Otherwise (DeepSpeed, FSDP, a script's own collectives) only the
# phases before the first collective of the step count, because they include no waiting; the duration of phases with
# collectives is an upper bound of the waiting.


NOT_WORK = ("init",)
"""Phases outside steps."""
NOT_COMPARED = ("eval", "checkpoint")
"""Steps with one of these phases on any rank are not compared: often one rank runs them and the others wait."""
_SPECIAL = frozenset((*NOT_WORK, *NOT_COMPARED))
BATCH = "batch"
"""Own work in the phase ``data`` outside the dataloader: on a batch, before its forward."""
FRONT = ("idle", "data", "forward")
"""The phases between an update and the backward after it."""


class Work(msgspec.Struct, frozen=True):
    """One step of one rank. Times are microseconds."""

    own: dict[str, int] = {}
    """Its own work, by phase; that of ``data`` is the time in the dataloader, the rest is ``BATCH``."""
    waited: int = 0
    """Time for which it waited for others."""
    measured: bool = True
    """False: ``own`` covers only the phases before the first collective, and ``waited`` is the duration of the phases
    with collectives."""
    wall: int = 0
    """Duration of the whole step, on the same clock as ``own``."""
    micro_steps: int = 1
    tokens: int = 0
    """Tokens of the step, including padding."""
    cpu: int = 0
    """CPU time of the training thread; 0: not measured."""
    comparable: bool = True
    """False: the step has an evaluation or a checkpoint, or work and waiting cannot be separated."""


def work_of(step: Step, device: bool) -> Work:
    """Split a step into own work and waiting."""
    if device:
        return _on_device(step)
    own: dict[str, int] = {}
    within = waited = 0
    comparable = True
    for record in step.phases:
        name = record.name
        if name in _SPECIAL:
            if name in NOT_WORK:
                continue
            comparable = False
        host, inside = record.host_us, record.collective_us
        if inside > host:
            inside = host
        within += host
        waited += inside
        own[name] = own.get(name, 0) + host - inside
    if step.host_us > within:
        own["idle"] = own.get("idle", 0) + step.host_us - within
    _split_data(own, step)
    return Work(own, waited, True, step.host_us, step.micro_steps, step.padded_tokens, step.cpu_us, comparable)


def _on_device(step: Step) -> Work:
    total = step.device_us
    if total is None:
        return Work(comparable=False)
    own: dict[str, int] = {}
    data = idle = None
    front = bound = 0
    comparable, measured, early = True, False, False
    for record in step.phases:  # this runs for every step of every rank
        name, us = record.name, record.device_us or 0
        if name in _SPECIAL:
            if name in NOT_WORK:
                continue
            comparable = False
        if record.waited_us is not None:
            measured = True
        # The beginning of ``data`` has no event of its own: its device time is included in that of ``idle``.
        if name == "data":
            data = record
            front += us
        elif name == "idle":
            idle = record
            front += us
            continue
        else:
            own[name] = us
        if record.collectives:
            if name in FRONT:
                early = True
            else:
                bound += us
    front = max(front, total - sum(own.values()))
    in_data = min(front, data.host_us) if data is not None else 0
    if measured:
        own["data"], own["idle"] = in_data, front - in_data
        _split_data(own, step)
        waited = _subtract_waiting(step, own)
        return Work(own, waited, True, total, step.micro_steps, step.padded_tokens, 0, comparable)
    before = {"data": in_data}
    _split_data(before, step)
    if idle is not None and idle.collectives:
        bound += front - in_data
    else:
        before["idle"] = front - in_data
    if "forward" in own:
        before["forward"] = own["forward"]
    comparable = comparable and not early and bound > 0
    return Work(before, bound, False, total, step.micro_steps, step.padded_tokens, 0, comparable)


def _split_data(own: dict[str, int], step: Step) -> None:
    """Separate the time in the dataloader from the script's own work on the batch."""
    fetch, data = step.fetch_us, own.get("data", 0)
    if fetch is not None and fetch < data:
        own["data"], own[BATCH] = fetch, data - fetch


def _subtract_waiting(step: Step, own: dict[str, int]) -> int:
    """Return how long the device waited for other ranks, us, and subtract that from ``own``."""
    waited = 0
    for record in step.phases:
        if record.waited_us and record.name not in NOT_WORK:
            waited += record.waited_us
            own[record.name] = max(0, own[record.name] - record.waited_us)
    return waited


# Compares each rank's own work with the other ranks' over a block of steps.


PART_STEPS = 8
"""Steps of a block that are compared by phase."""
EXCESS_US = 2000
EXCESS_SHARE = 0.10
FINE_RATIO = 1.15


@dataclass(slots=True)
class Block:
    """Figures of a rank and of the others over a block of steps: means per step, microseconds."""

    excess: float
    """Median over the steps of its own work minus the others'."""
    own: float
    others: float
    wall: float
    """Duration of the step."""
    waited: float
    others_waited: float
    least: float
    """The shortest waiting of any rank."""
    steps: int
    """Steps of the block, including those not compared."""
    off_cpu: float = 0.0
    others_off_cpu: float = 0.0
    tokens: float = 0.0
    others_tokens: float = 0.0
    parts: dict[str, float] | None = None
    others_parts: dict[str, float] | None = None
    uneven: bool = False
    """Its steps last longer or shorter than the others', so their steps do not run in parallel."""

    def counts(self, ratio: float) -> bool:
        """Return whether the block counts against the rank: its own work is at least ``ratio`` times the others'."""
        half = self.excess / 2
        return (
            self.excess >= max(EXCESS_US, EXCESS_SHARE * self.wall)
            and self.own >= ratio * self.others
            and self.others_waited - self.waited >= half
            and self.waited - self.least <= half
            and not self.uneven
        )

    def fine(self) -> bool:
        """Return whether the rank's excess is small."""
        return self.excess < max(EXCESS_US, EXCESS_SHARE * self.wall) / 2 or self.own < FINE_RATIO * self.others


def compare(steps: Sequence[Mapping[int, Work]], count: int) -> dict[int, Block]:
    """Compare each rank with the others over the steps of a block."""
    excesses: dict[int, list[float]] = {rank: [] for rank in steps[0]}
    owns = dict.fromkeys(steps[0], 0.0)
    others = dict.fromkeys(steps[0], 0.0)
    for works in steps:
        totals = {rank: float(sum(work.own.values())) for rank, work in works.items()}
        usual = _Others(totals.values())
        micro_steps = {work.micro_steps for work in works.values()}
        each, usual_each = totals, None
        if len(micro_steps) > 1:
            fewest = min(micro_steps)
            each = {rank: totals[rank] * fewest / max(1, works[rank].micro_steps) for rank in works}
            usual_each = _Others(each.values())
        for rank, own in totals.items():
            excess = own - usual.median(own)
            if usual_each is not None:
                excess = min(excess, each[rank] - usual_each.median(each[rank]))
            excesses[rank].append(excess)
            owns[rank] += own
            others[rank] += own - excess
    length = len(steps)
    waits = {rank: sum(works[rank].waited for works in steps) / length for rank in steps[0]}
    walls = {rank: sum(works[rank].wall for works in steps) / length for rank in steps[0]}
    usual_wait, usual_wall = _Others(waits.values()), _Others(walls.values())
    least = min(waits.values())
    found: dict[int, Block] = {}
    for rank, excess in excesses.items():
        middle = median_high(excess)
        wall = walls[rank]
        found[rank] = Block(
            excess=middle,
            own=owns[rank] / length,
            others=others[rank] / length,
            wall=wall,
            waited=waits[rank],
            others_waited=usual_wait.upper(waits[rank]),
            least=least,
            steps=count,
            # Steps of different duration do not run in parallel.
            uneven=abs(wall - usual_wall.median(wall)) > max(0.5 * middle, 0.0),
        )
    return found


def add_parts(block: Block, number: int, steps: Sequence[Mapping[int, Work]]) -> None:
    """Add where and why a rank is slow; only for candidates, because it costs more."""
    recent = steps[-PART_STEPS:]
    names = {name for works in recent for work in works.values() for name in work.own}
    sums = {
        rank: {name: sum(works[rank].own.get(name, 0) for works in recent) / len(recent) for name in names}
        for rank in recent[0]
    }
    block.parts = sums.pop(number)
    block.others_parts = {name: median_high([parts[name] for parts in sums.values()]) for name in names}
    tokens = {rank: sum(works[rank].tokens for works in recent) / len(recent) for rank in recent[0]}
    block.tokens = tokens.pop(number)
    block.others_tokens = median_high(list(tokens.values()))
    if all(work.cpu for work in recent[-1].values()):
        off = {
            rank: sum(max(0, sum(works[rank].own.values()) - works[rank].cpu) for works in recent) / len(recent)
            for rank in recent[0]
        }
        block.off_cpu = off.pop(number)
        block.others_off_cpu = median_high(list(off.values()))


class _Others:
    """Medians of values without one of them; the values are sorted once."""

    __slots__ = ("_at", "_high", "_low", "_upper_at", "_upper_high", "_upper_low")

    def __init__(self, values: Iterable[float]) -> None:
        ordered = sorted(values)
        lower, upper = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
        self._at, self._low, self._high = ordered[lower], ordered[lower + 1], ordered[lower]
        self._upper_at, self._upper_low, self._upper_high = ordered[upper], ordered[upper + 1], ordered[upper]

    def median(self, value: float) -> float:
        """Return the median of the values other than ``value``; of an even number, the mean of the middle two."""
        lower = self._high if value > self._at else self._low
        return (lower + (self._upper_high if value > self._upper_at else self._upper_low)) / 2

    def upper(self, value: float) -> float:
        """Return the upper median of the values other than ``value``."""
        return self._upper_high if value > self._upper_at else self._upper_low


WARM_UP_STEPS = 2
BLOCK_US = 300_000
BLOCK_STEPS = 64
"""Number of steps compared per block; a block of very short steps has more."""
RATIO = 1.4
RATIO_DEVICE = 1.25
"""``RATIO`` for device times, which are less noisy: ranks do not share a device as they share cores."""
FAST_BLOCKS = 8
FAST_RATIO = 1.7
GROSS_BLOCKS = 4
GROSS_RATIO = 2.0
GROSS_SHARE = 0.4
GROSS_ALIKE = 1.5
"""``ALIKE`` for the own work of the rank and of the others: fewer blocks must differ less."""
LONG_BLOCKS = 24
LONGEST_BLOCKS = 384
HISTORY = 128
"""Number of blocks whose excesses are kept."""
ALIKE = 2.0
"""Excesses within this factor of their median are similar."""
LIGHTER_SHARE = 0.05
UPDATE_S = 60.0
UPDATE_CHANGE = 1.25
PENDING_STEPS = 256

EVERYWHERE = "everywhere"


class StragglerFacts(msgspec.Struct, frozen=True):
    """Figures of a finding: means per step over the window, microseconds."""

    rank: int
    step: int
    """The last step of the window."""
    steps: int
    """Number of steps of the window."""
    own_us: int
    others_us: int
    """The median rank's own work among the others."""
    waited_us: int
    others_waited_us: int
    step_us: int
    slow_at: str
    """The phase with most of the excess; ``everywhere`` if there is none."""
    phases_us: dict[str, int]
    others_phases_us: dict[str, int]
    device: bool = False
    """Whether times are the device's instead of the host's."""
    measured: bool = True
    """False: waiting is only bounded, by the phases with collectives."""
    tokens: int = 0
    others_tokens: int = 0
    off_cpu_us: int = 0
    """The part of its own work in which its training thread used no CPU; 0 on a device."""
    others_off_cpu_us: int = 0


class StragglerFinding(msgspec.Struct, frozen=True):
    """A rank became a straggler, its figures changed, or it is resolved (with the last ``facts``)."""

    facts: StragglerFacts
    state: Literal["raised", "updated", "resolved"] = "raised"


class _Rank:
    def __init__(self) -> None:
        self.blocks: deque[Block] = deque(maxlen=LONG_BLOCKS)
        self.counted: deque[bool] = deque(maxlen=LONGEST_BLOCKS)
        """Whether each block counts against the rank."""
        self.excesses: deque[float] = deque(maxlen=HISTORY)
        self.facts: StragglerFacts | None = None
        self.reported_at = 0.0

    def add(self, block: Block, ratio: float) -> None:
        """Add a block."""
        self.blocks.append(block)
        self.counted.append(block.counts(ratio))
        self.excesses.append(block.excess)

    def clear(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()
        self.counted.clear()
        self.excesses.clear()


class Stragglers:
    """Judges the ranks of one run. Times of ``step`` are passed in."""

    def __init__(self, device: bool = False) -> None:
        self.device = device
        self._ranks: dict[int, _Rank] = {}
        self._pending: dict[int, dict[int, Work]] = {}
        self._done = 0
        """Number of steps that all ranks have finished."""
        self._block: list[tuple[int, dict[int, Work]]] = []
        self._block_us = 0.0
        self._block_count = 0
        self._ended = 0
        """Number of findings that were resolved."""

    @property
    def standing(self) -> dict[int, StragglerFacts]:
        """The current stragglers as last reported."""
        return {number: rank.facts for number, rank in self._ranks.items() if rank.facts is not None}

    def add(self, rank: int) -> None:
        """Add a rank to the comparison."""
        if rank not in self._ranks:
            self._ranks[rank] = _Rank()
            self._restart()

    def remove(self, rank: int) -> StragglerFinding | None:
        """Remove a rank from the comparison; return its resolved findings."""
        gone = self._ranks.pop(rank, None)
        self._restart()
        return StragglerFinding(gone.facts, "resolved") if gone is not None and gone.facts is not None else None

    def reset(self) -> list[StragglerFinding]:
        """Forget all ranks because other processes train from now on; return the resolved findings."""
        ended = [StragglerFinding(facts, "resolved") for facts in self.standing.values()]
        self.__init__(self.device)
        return ended

    def restore(self, facts: StragglerFacts) -> None:
        """Restore a standing finding from the recording, so that it can end."""
        self.add(facts.rank)
        self._ranks[facts.rank].facts = facts

    def step(self, t: float, rank: int, number: int, work: Work) -> list[StragglerFinding]:
        """Process one step of one rank; judge once the last rank has sent it and a block is full."""
        if rank not in self._ranks:
            self.add(rank)
        pending = self._pending
        works = pending.get(number)
        if works is None:
            works = pending[number] = {}
        works[rank] = work
        if len(works) < len(self._ranks):
            if len(pending) > PENDING_STEPS:
                del pending[min(pending)]
            return []
        del pending[number]
        if len(pending) > 1:
            # All ranks have finished this step: an earlier step without a rank's message was lost.
            self._pending = {later: found for later, found in pending.items() if later > number}
        self._done += 1
        if len(works) < 2 or self._done <= WARM_UP_STEPS:
            return []
        wall = 0
        for one in works.values():
            if not one.comparable or one.measured != work.measured:
                return []
            if one.wall > wall:
                wall = one.wall
        self._block_us += wall
        self._block_count += 1
        if len(self._block) < BLOCK_STEPS:
            self._block.append((number, works))
        return self._close(t) if self._block_us >= BLOCK_US else []

    def _restart(self) -> None:
        """Discard collected steps because the set of compared ranks has changed."""
        self._pending.clear()
        self._block, self._block_us, self._block_count = [], 0.0, 0
        for rank in self._ranks.values():
            rank.clear()

    def _close(self, t: float) -> list[StragglerFinding]:
        steps, count = self._block, self._block_count
        self._block, self._block_us, self._block_count = [], 0.0, 0
        blocks = compare([works for _, works in steps], count)
        findings: list[StragglerFinding] = []
        for number, block in blocks.items():
            rank = self._ranks[number]
            if not block.fine():
                add_parts(block, number, [works for _, works in steps])
            rank.add(block, RATIO_DEVICE if self.device else RATIO)
        for number in blocks:
            findings += self._judge(t, steps[-1][0], number, self._ranks[number], steps[-1][1][number].measured)
        return findings

    def _judge(self, t: float, step: int, number: int, rank: _Rank, measured: bool) -> list[StragglerFinding]:
        if rank.facts is None:
            window = _plain_blocks(rank, self._ranks.values()) if self._ended < 2 else []
            if not window and _is_lasting(rank, LONG_BLOCKS << self._ended):
                window = list(rank.blocks)[-FAST_BLOCKS:]
            if window:
                rank.facts, rank.reported_at = self._facts(number, step, window, measured), t
                rank.counted.clear()  # its end is judged by what follows
                return [StragglerFinding(rank.facts)]
            return []
        if _is_over(rank):
            ended, rank.facts = rank.facts, None
            self._ended += 1
            for one in self._ranks.values():
                one.excesses.clear()  # excesses during the resolved finding are explained
            return [StragglerFinding(msgspec.structs.replace(ended, step=step), "resolved")]
        window = list(rank.blocks)[-FAST_BLOCKS:]
        if t - rank.reported_at >= UPDATE_S and sum(list(rank.counted)[-FAST_BLOCKS:]) == FAST_BLOCKS:
            facts = self._facts(number, step, window, measured)
            if _changed(rank.facts, facts):
                rank.facts, rank.reported_at = facts, t
                return [StragglerFinding(facts, "updated")]
        return []

    def _facts(self, number: int, step: int, window: Sequence[Block], measured: bool) -> StragglerFacts:
        mine, theirs = _mean_parts(window)
        excess = sum(block.excess for block in window) / len(window)
        own = _mean([block.own for block in window])
        return StragglerFacts(
            rank=number,
            step=step,
            steps=sum(block.steps for block in window),
            own_us=own,
            others_us=_mean([block.others for block in window]),
            waited_us=_mean([block.waited for block in window]),
            others_waited_us=_mean([block.others_waited for block in window]),
            step_us=_mean([block.wall for block in window]),
            slow_at=_slow_at(mine, theirs, excess),
            phases_us={name: round(us) for name, us in mine.items()},
            others_phases_us={name: round(us) for name, us in theirs.items()},
            device=self.device,
            measured=measured,
            tokens=_mean([block.tokens for block in window]),
            others_tokens=_mean([block.others_tokens for block in window]),
            off_cpu_us=_mean([block.off_cpu for block in window]),
            others_off_cpu_us=_mean([block.others_off_cpu for block in window]),
        )


def _plain_blocks(rank: _Rank, ranks: Iterable[_Rank]) -> list[Block]:
    """Return the last blocks if they are sufficiently many and similar, or gross (the fast condition); else empty."""
    window = list(rank.blocks)[-FAST_BLOCKS:]
    if len(window) < FAST_BLOCKS or not all(block.counts(FAST_RATIO) for block in window):
        window = _gross_blocks(window)
        if window and not _is_first_to_count(rank, ranks):
            return []
    if not window:
        return []
    excesses = [block.excess for block in window]
    middle = median_high(excesses)
    rarely_faster = sum(excess < -middle / 2 for excess in rank.excesses) <= LIGHTER_SHARE * len(rank.excesses)
    return window if rarely_faster and _are_alike(excesses, ALIKE) else []


def _gross_blocks(window: Sequence[Block]) -> list[Block]:
    """Return the last ``GROSS_BLOCKS`` blocks or more if the rank is grossly and steadily slow in them; else empty."""
    least_us = FAST_BLOCKS * BLOCK_US
    for count in range(GROSS_BLOCKS, len(window) + 1):
        last = list(window[-count:])
        if sum(block.wall * block.steps for block in last) >= least_us:
            break
    else:
        return []
    gross = all(block.counts(GROSS_RATIO) and block.excess >= GROSS_SHARE * block.wall for block in last)
    steady = all(_are_alike([getattr(block, name) for block in last], GROSS_ALIKE) for name in ("own", "others"))
    return last if gross and steady else []


def _is_first_to_count(rank: _Rank, ranks: Iterable[_Rank]) -> bool:
    """Return whether blocks rarely counted against any rank before those that now count against this one in a row."""
    count = total = 0
    for one in ranks:
        counted = list(one.counted)[-HISTORY:]
        while one is rank and counted and counted[-1]:
            counted.pop()
        count += sum(counted)
        total += len(counted)
    return count <= LIGHTER_SHARE * total


def _are_alike(values: Sequence[float], factor: float) -> bool:
    middle = median_high(values)
    return all(middle / factor <= value <= middle * factor for value in values)


def _is_lasting(rank: _Rank, length: int) -> bool:
    """Return whether all but one of the last ``length`` blocks, including the last, count against a rank."""
    length = min(length, LONGEST_BLOCKS)
    if len(rank.counted) < length or not rank.counted[-1]:
        return False
    return sum(list(rank.counted)[-length:]) >= length - 1


def _is_over(rank: _Rank) -> bool:
    last = list(rank.blocks)[-FAST_BLOCKS:]
    if len(last) == FAST_BLOCKS and sum(block.fine() for block in last) >= FAST_BLOCKS - 1:
        return True
    longer = list(rank.counted)[-LONG_BLOCKS:]
    return len(longer) == LONG_BLOCKS and sum(longer) < LONG_BLOCKS / 2


def _changed(old: StragglerFacts, new: StragglerFacts) -> bool:
    before, after = max(1, old.own_us - old.others_us), max(1, new.own_us - new.others_us)
    return old.slow_at != new.slow_at or not before / UPDATE_CHANGE <= after <= before * UPDATE_CHANGE


def _slow_at(mine: Mapping[str, float], theirs: Mapping[str, float], excess: float) -> str:
    """Return the phase with most of the excess; ``everywhere`` if all phases are similarly slow."""
    more = {name: us - theirs.get(name, 0.0) for name, us in mine.items()}
    if not more:
        return EVERYWHERE
    worst = max(more, key=lambda name: more[name])
    slow = [name for name, us in mine.items() if us > 1.3 * theirs.get(name, 0.0) and more[name] >= 0.1 * excess]
    return EVERYWHERE if more[worst] < 0.6 * excess and len(slow) >= 3 else worst


def _mean_parts(window: Sequence[Block]) -> tuple[dict[str, float], dict[str, float]]:
    mine: dict[str, float] = {}
    theirs: dict[str, float] = {}
    filled = [block for block in window if block.parts is not None and block.others_parts is not None]
    for block in filled:
        for target, parts in ((mine, block.parts), (theirs, block.others_parts)):
            for name, us in (parts or {}).items():
                target[name] = target.get(name, 0.0) + us / len(filled)
    return mine, theirs


def _mean(values: Sequence[float]) -> int:
    return round(sum(values) / len(values)) if values else 0


# Finds the line at which a straggler spends its excess time, from samples of its training thread's stack.


SAMPLES = 10
FEWEST = 3
_WAITING = ("collective", "exiting")
_IN_BACKWARD = ("backward",)


def usual_place(places: Sequence[Place], slow_at: str, share: float) -> str:
    """Return the most frequent line of the samples outside collectives; empty if none stands out.

    Args:
        places: positions of the samples, which are taken independently of the steps.
        slow_at: the slow phase: a sample inside ``backward`` is not evidence for another phase.
        share: the excess as a share of a step: the responsible line is in about that share of the samples.
    """
    other = () if slow_at in ("backward", "everywhere") else _IN_BACKWARD
    seen = Counter(place.text for place in places if place.text and place.doing not in (*_WAITING, *other))
    if not seen:
        return ""
    text, count = seen.most_common(1)[0]
    return text if count >= max(FEWEST, 0.5 * share * len(places)) else ""


# Finds stragglers (``stragglers``), reasons for slow devices, and the line of code at which a rank is slow.
#
# After a straggler was found, its stack is sampled for some time to name the line.


_NOT_THE_DEVICE = ("data", BATCH, "idle")
"""Phases that a slow device does not explain."""


class SlowRankFacts(msgspec.Struct, frozen=True):
    """A straggler with its reasons."""

    straggler: StragglerFacts
    device: DeviceFacts | None = None
    """State of its device; None: unknown, or its device does not explain it."""
    line: str = ""
    """The most frequent line of its training thread; empty: unknown yet."""
    samples: int = 0


class SlowDetector:
    """Passes steps to ``Stragglers``, and adds reasons and lines to its findings."""

    def __init__(self, asks: DiagnosticRequests) -> None:
        self._asks = asks
        self._found: dict[int, Finding] = {}
        """The latest finding of each straggler."""
        self._samples: dict[int, list[evidence.Place]] = {}
        """Sampled lines of each straggler that is being located."""
        self._awaited: set[int] = set()
        """Ranks whose samples have been requested and have not arrived."""
        self._judge = Stragglers()
        self._processes: dict[int, tuple[str, int, int, int]] = {}
        self._hindered = SlowDevices()

    def sample(self, sample: DeviceSample) -> None:
        """Record a sample of a device, as a possible reason for slowness."""
        self._hindered.sample(sample)

    def hello(self, hello: Hello) -> list[Finding]:
        """Register a rank; a new process of a known rank, or a new world size, resets all comparisons."""
        self._hindered.hello(hello)
        process = (hello.host, hello.pid, hello.start_ticks, hello.world_size)
        known = self._processes.get(hello.rank)
        findings: list[Finding] = []
        if (known is not None and known != process) or any(
            other[3] != hello.world_size for other in self._processes.values()
        ):
            self._processes.clear()
            findings = self._findings(self._judge.reset(), "restarted")
        self._processes[hello.rank] = process
        self._judge.device = hello.device.kind == "cuda"
        self._judge.add(hello.rank)
        return findings

    def drop(self, rank: int) -> list[Finding]:
        """Stop comparing with a rank that ended; return its resolved findings."""
        self._processes.pop(rank, None)
        ended = self._judge.remove(rank)
        return self._findings([ended] if ended is not None else [], "rank_ended")

    def forget(self, rank: int) -> None:
        """Stop comparing with a rank, without a finding."""
        self._processes.pop(rank, None)
        self._judge.remove(rank)

    def step(self, t: float, step: Step) -> list[Finding]:
        """Process one step; the ranks are judged once the last of them has sent it."""
        found = self._judge.step(t, step.rank, step.step, work_of(step, self._judge.device))
        return self._findings(found) if found else []

    def tick(self) -> None:
        """Request samples from the stragglers that are being located."""
        for rank in self._samples:
            if rank not in self._awaited:
                self._awaited.add(rank)
                self._asks.add(Action(control.Stacks(quiet=True), (rank,), "the line at which a rank is slow"))

    def stacks(self, asked: Iterable[int], answers: Mapping[int, Result]) -> list[Finding]:
        """Process sampled stacks of stragglers; names the line once there are enough samples."""
        findings: list[Finding] = []
        self._awaited.difference_update(asked)
        for rank, answer in answers.items():
            places = self._samples.get(rank)
            if places is None or not answer.ok:
                continue
            threads = evidence.parse(str(answer.data.get("text", "")))
            thread = evidence.training_thread(threads, str(answer.data.get("thread", "")))
            places.append(evidence.where(thread.frames if thread is not None else ()))
            if len(places) >= SAMPLES:
                findings += self._place(rank, places)
        return findings

    def _place(self, rank: int, places: list[evidence.Place]) -> list[Finding]:
        del self._samples[rank]
        facts, known = self._judge.standing.get(rank), self._found.get(rank)
        if facts is None or known is None:
            return []
        line = usual_place(places, facts.slow_at, (facts.own_us - facts.others_us) / max(1, facts.step_us))
        if not line:
            return []
        found = msgspec.structs.replace(known.facts, line=line, samples=len(places))
        self._found[rank] = msgspec.structs.replace(known, facts=found)
        return [msgspec.structs.replace(known, facts=found, state="explained")]

    def restore(self, finding: Finding) -> None:
        """Restore a standing finding from the recording, so that it can end."""
        if finding.state != "resolved":
            self._judge.restore(finding.facts.straggler)

    def _findings(self, judged: list[StragglerFinding], why: ResolvedWhy = "calm") -> list[Finding]:
        findings: list[Finding] = []
        for one in judged:
            rank = one.facts.rank
            if one.state == "resolved":
                self._samples.pop(rank, None)
                self._found.pop(rank, None)
                findings.append(
                    Finding("straggler", Resolution(why, one.facts.step), "resolved", rank=rank, ranks=(rank,))
                )
            else:
                self._found[rank] = found = self._finding(one.facts)
                self._samples[rank] = []
                findings.append(found)
        return findings

    def _finding(self, facts: StragglerFacts) -> Finding:
        device = self._hindered.why(facts.rank) if facts.slow_at not in _NOT_THE_DEVICE else None
        return Finding("straggler", SlowRankFacts(facts, device), ranks=(facts.rank,), step=facts.step, rank=facts.rank)


_AT = {"idle": "between phases", BATCH: "between a batch and its forward", EVERYWHERE: "everywhere"}
_CAUSES = {
    "data": "Its data loading is slow: check its disk, its dataloader workers, and the size of its samples.",
    BATCH: "That is the loop's own work on a batch that the dataloader has delivered: collating, tokenizing, or moving "
    "it to the device.",
    "forward": "Its forward is slow: check clocks and throttle reasons, other processes on its device or cores, and "
    "whether its batches are longer than the others'.",
    "backward": "Its backward is slow: check clocks and throttle reasons, and other processes on its device or cores.",
    "optimizer": "Its optimizer step is slow: check offload (memory bandwidth, cores) and other processes there.",
    "idle": "That is code of the loop outside data, forward, backward and optimizer: logging, Python work, or batches "
    "that are read without a DataLoader.",
    EVERYWHERE: "All its phases are slow alike: check what else runs on its cores or device, a CPU quota, and clocks.",
}
_LONGER_BATCHES = 1.15
_MOST = 0.7


def _words(finding: Finding) -> Words:
    facts: SlowRankFacts = finding.facts
    why = _hindrance(facts.device)
    parts = [_title(facts.straggler), why, f"in {facts.line}" if facts.line else ""]
    line = f" It was seen most at {facts.line}." if facts.line else ""
    return Words("; ".join(filter(None, parts)), _text(facts.straggler, why) + line)


def _evidence(finding: Finding) -> dict[str, Any]:
    """Return the figures as plain values."""
    facts: SlowRankFacts = finding.facts
    device = {"device": _device(facts.device)} if facts.device is not None else {}
    line = {"at": facts.line, "samples": facts.samples} if facts.line else {}
    return {**_figures(facts.straggler), **device, **line}


def _hindrance(device: DeviceFacts | None) -> str:
    """Return the reason why a device is slow, as a clause; empty: none found."""
    if device is None or not device.is_slow:
        return ""
    reasons: list[str] = []
    if device.own_reasons:
        reasons.append(f"throttled: {', '.join(device.own_reasons)}")
    if device.is_clocked_lower:
        reasons.append(f"clocked at {device.sm_clock_mhz} MHz, others {device.others_sm_clock_mhz}")
    if device.strangers:
        count = len(device.strangers)
        reasons.append(f"shared with {count} process{'es' if count > 1 else ''} of others")
    return f"its GPU is {'; '.join(reasons)}"


def _device(device: DeviceFacts) -> dict[str, Any]:
    """Return the figures of a device as plain values."""
    found: dict[str, Any] = {
        "device": f"{device.host} GPU {device.index}",
        "throttle_reasons": device.throttle_reasons,
    }
    if device.sm_clock_mhz is not None:
        found |= {"sm_clock_mhz": device.sm_clock_mhz, "others_sm_clock_mhz": device.others_sm_clock_mhz}
    if device.strangers:
        found["other_processes"] = device.strangers[:8]
    if device.temperature_c is not None:
        found["temperature_c"] = device.temperature_c
    return found


def _facts(alert: Alert) -> SlowRankFacts:
    """Return facts from an alert's evidence, sufficient to detect that it is resolved."""
    own, others, step = (round(1e3 * float(alert.evidence.get(name, 0))) for name in ("own_ms", "others_ms", "step_ms"))
    at = str(alert.evidence.get("slow_at", EVERYWHERE))
    return SlowRankFacts(StragglerFacts(alert.rank or 0, alert.step or 0, 0, own, others, 0, 0, step, at, {}, {}))


def _title(facts: StragglerFacts) -> str:
    """Return the title for lists: rank, phase and the two figures that differ."""
    at = _AT.get(facts.slow_at, f"at {facts.slow_at}")
    mine, theirs = _compared(facts)
    return f"rank {facts.rank} is slow {at}: {duration(mine * 1e-6)} a step, others {duration(theirs * 1e-6)}"


def _text(facts: StragglerFacts, why: str = "") -> str:
    """Return the meaning and what to check; ``why`` is a clause with a known cause."""
    step = duration(facts.step_us * 1e-6)
    own, others = duration(facts.own_us * 1e-6), duration(facts.others_us * 1e-6)
    clock = " of device time" if facts.device else ""
    if facts.measured:
        sentence = (
            f"Of a step of {step} rank {facts.rank} works {own}{clock} and waits {duration(facts.waited_us * 1e-6)} "
            f"for other ranks; the others work {others} and wait {duration(facts.others_waited_us * 1e-6)} "
            f"(over {facts.steps} steps)."
        )
    else:
        sentence = (
            f"Of a step of {step} rank {facts.rank} takes {own}{clock} up to its first collective, the others "
            f"{others}; their phases with collectives last {duration(facts.others_waited_us * 1e-6)}, its own "
            f"{duration(facts.waited_us * 1e-6)} (over {facts.steps} steps)."
        )
    return " ".join([sentence, *_causes(facts, why)])


def _figures(facts: StragglerFacts) -> dict[str, Any]:
    """Return the figures, milliseconds."""
    found: dict[str, Any] = {
        "own_ms": _ms(facts.own_us),
        "others_ms": _ms(facts.others_us),
        "ratio": round(facts.own_us / max(1, facts.others_us), 3),
        "waited_ms": _ms(facts.waited_us),
        "others_waited_ms": _ms(facts.others_waited_us),
        "step_ms": _ms(facts.step_us),
        "slow_at": facts.slow_at,
        "own_ms_by_phase": {name: _ms(us) for name, us in facts.phases_us.items()},
        "others_ms_by_phase": {name: _ms(us) for name, us in facts.others_phases_us.items()},
        "window_steps": facts.steps,
        "clock": "device" if facts.device else "host",
        "waiting": "measured" if facts.measured else "bounded",
    }
    if facts.tokens and facts.others_tokens:
        found |= {"tokens": facts.tokens, "others_tokens": facts.others_tokens}
    if facts.off_cpu_us or facts.others_off_cpu_us:
        found |= {"off_cpu_ms": _ms(facts.off_cpu_us), "others_off_cpu_ms": _ms(facts.others_off_cpu_us)}
    return found


def _compared(facts: StragglerFacts) -> tuple[int, int]:
    if facts.slow_at == EVERYWHERE:
        return facts.own_us, facts.others_us
    return facts.phases_us.get(facts.slow_at, 0), facts.others_phases_us.get(facts.slow_at, 0)


def _causes(facts: StragglerFacts, why: str) -> list[str]:
    found = [f"{why[0].upper()}{why[1:]}."] if why else []
    if facts.tokens and facts.tokens > _LONGER_BATCHES * facts.others_tokens > 0:
        found.append(f"Its batches hold {facts.tokens} tokens, the others' {facts.others_tokens}.")
    if facts.off_cpu_us - facts.others_off_cpu_us > _MOST * (facts.own_us - facts.others_us):
        found.append(
            f"Its training thread used no CPU for {duration(facts.off_cpu_us * 1e-6)} of that: it slept, or waited for "
            "a disk, the network, a lock or a CPU."
        )
    return found if why else [*found, _CAUSES.get(facts.slow_at, "")]


def _ms(us: int) -> float:
    return round(us / 1e3, 3)


_SHOWN: dict[str, Shown] = {
    "own_ms": Shown("own time per step", "ms"),
    "others_ms": Shown("the others' (median)", "ms"),
    "ratio": Shown("relative to usual", "times"),
    "waited_ms": Shown("waited for others", "ms"),
    "others_waited_ms": Shown("the others waited", "ms"),
    "slow_at": Shown("slow in"),
    "own_ms_by_phase": Shown("own time by phase", "ms"),
    "others_ms_by_phase": Shown("the others' by phase", "ms"),
    "clock": Shown("clock of"),
    "tokens": Shown("tokens per step"),
    "others_tokens": Shown("the others' tokens"),
    "off_cpu_ms": Shown("not on a processor", "ms"),
    "others_off_cpu_ms": Shown("the others not on one", "ms"),
    "samples": Shown("stacks seen there"),
    "other_processes": Shown("other processes on it"),
    "throttle_reasons": Shown("slowed by"),
}

KINDS = (
    Kind(
        "straggler",
        SlowRankFacts,
        _words,
        "slow",
        "own-work",
        evidence=_evidence,
        shown=_SHOWN,
        resolved={
            "calm": "As fast as the others again at step {0}.",
            "rank_ended": "The rank ended.",
            "restarted": "The ranks started anew.",
        },
        limits={
            "own work, of the others'": f"{RATIO:g} times",
            "excess": f"{EXCESS_SHARE:.0%} of the step, and {EXCESS_US / 1000:g} ms",
            "blocks in a row": f"{FAST_BLOCKS} of {BLOCK_US / 1e6:g} s at {FAST_RATIO:g} times",
            "or in all": f"{LONG_BLOCKS} but one",
        },
        restore=_facts,
    ),
)
