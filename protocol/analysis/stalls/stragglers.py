"""Finds stragglers, ranks that work while the others wait for them, from each rank's own work.

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

**Own work.** Collectives make the wall time of a step equal on all ranks; a slow rank works while the others wait. On
the CPU a phase's own work is its host time without the time inside collectives. Time between phases (``idle``: logging,
Python code of the loop, a batch read without a DataLoader) is work too.

On a GPU, waiting happens on the device, and the host waits for the device wherever the script reads a value. Therefore
device time is used: the time between CUDA events at a phase's ends, including gaps without kernels, minus the time for
which the stream waited for other ranks. If that wait was measured (DDP's reducer: ``PhaseRecord.waited_us``), all
phases count. Otherwise (DeepSpeed, FSDP, a script's own collectives) only the phases before the first collective of the
step count, because they include no waiting; the duration of phases with collectives is an upper bound of the waiting.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Literal

import msgspec

from ...messages.telemetry import Step

NOT_WORK = ("init",)  # phases outside steps
NOT_COMPARED = ("eval", "checkpoint")
"""Steps with one of these phases on any rank are not compared: often one rank runs them and the others wait."""
_SPECIAL = frozenset((*NOT_WORK, *NOT_COMPARED))
BATCH = "batch"  # own work in the phase `data` outside the dataloader: on a batch, before its forward
FRONT = ("idle", "data", "forward")  # the phases between an update and the backward after it


class Work(msgspec.Struct, frozen=True):
    """One step of one rank. Times are microseconds."""

    own: dict[str, int] = {}  # its own work, by phase; that of `data` is time in the dataloader, the rest is `BATCH`
    waited: int = 0
    measured: bool = True
    """False: ``own`` covers only the phases before the first collective, and ``waited`` is the duration of the phases
    with collectives."""
    wall: int = 0  # duration of the whole step, on the same clock as `own`
    micro_steps: int = 1
    tokens: int = 0  # tokens of the step, including padding
    cpu: int = 0  # CPU time of the training thread; 0: not measured
    comparable: bool = True  # False: it has an evaluation or a checkpoint, or work and waiting cannot be separated


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
        host = record.host_us
        inside = min(host, record.collective_us)
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


PART_STEPS = 8  # steps of a block that are compared by phase
EXCESS_US = 2000
EXCESS_SHARE = 0.10
FINE_RATIO = 1.15


@dataclass(slots=True)
class Block:
    """Figures of a rank and of the others over a block of steps: means per step, microseconds."""

    excess: float  # median over the steps of its own work minus the others'
    own: float
    others: float
    wall: float
    waited: float
    others_waited: float
    least: float  # the shortest waiting of any rank
    steps: int  # steps of the block, including those not compared
    off_cpu: float = 0.0
    others_off_cpu: float = 0.0
    tokens: float = 0.0
    others_tokens: float = 0.0
    parts: dict[str, float] = field(default_factory=dict[str, float])
    others_parts: dict[str, float] = field(default_factory=dict[str, float])
    uneven: bool = False  # its steps last longer or shorter than the others', so their steps do not run in parallel

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
        middle, wall = median_high(excess), walls[rank]
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

    def compared(figure: Callable[[Work], int]) -> tuple[float, float]:
        means = {rank: sum(figure(works[rank]) for works in recent) / len(recent) for rank in recent[0]}
        return means.pop(number), median_high(means.values())

    for name in {name for works in recent for work in works.values() for name in work.own}:
        mine, theirs = compared(lambda work, name=name: work.own.get(name, 0))
        block.parts[name], block.others_parts[name] = mine, theirs
    block.tokens, block.others_tokens = compared(lambda work: work.tokens)
    if all(work.cpu for work in recent[-1].values()):
        off = compared(lambda work: max(0, sum(work.own.values()) - work.cpu))
        block.off_cpu, block.others_off_cpu = off


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
BLOCK_STEPS = 64  # number of steps compared per block; a block of very short steps has more
RATIO = 1.4
RATIO_DEVICE = 1.25  # `RATIO` for device times, which are less noisy: ranks do not share a device as they share cores
FAST_BLOCKS = 8
FAST_RATIO = 1.7
GROSS_BLOCKS = 4
GROSS_RATIO = 2.0
GROSS_SHARE = 0.4
GROSS_ALIKE = 1.5  # `ALIKE` for the own work of the rank and of the others: fewer blocks must differ less
LONG_BLOCKS = 24
LONGEST_BLOCKS = 384
HISTORY = 128
ALIKE = 2.0  # excesses within this factor of their median are similar
LIGHTER_SHARE = 0.05
UPDATE_S = 60.0
UPDATE_CHANGE = 1.25
PENDING_STEPS = 256

EVERYWHERE = "everywhere"


class StragglerFacts(msgspec.Struct, frozen=True):
    """Figures of a finding: means per step over the window, microseconds."""

    rank: int
    step: int
    steps: int
    own_us: int
    others_us: int  # the median rank's own work among the others
    waited_us: int
    others_waited_us: int
    step_us: int
    slow_at: str  # the phase with most of the excess; `everywhere` if there is none
    phases_us: dict[str, int]
    others_phases_us: dict[str, int]
    device: bool = False  # whether times are the device's instead of the host's
    measured: bool = True  # false: waiting is only bounded, by the phases with collectives
    tokens: int = 0
    others_tokens: int = 0
    off_cpu_us: int = 0  # the part of its own work in which its training thread used no CPU; 0 on a device
    others_off_cpu_us: int = 0


class StragglerFinding(msgspec.Struct, frozen=True):
    """A rank became a straggler, its figures changed, or it is resolved (with the last ``facts``)."""

    facts: StragglerFacts
    state: Literal["raised", "updated", "resolved"] = "raised"


class _Rank:
    def __init__(self) -> None:
        self.blocks: deque[Block] = deque(maxlen=LONG_BLOCKS)
        self.counted: deque[bool] = deque(maxlen=LONGEST_BLOCKS)  # whether each block counts against the rank
        self.excesses: deque[float] = deque(maxlen=HISTORY)
        self.facts: StragglerFacts | None = None
        self.reported_at = 0.0

    def add(self, block: Block, ratio: float) -> None:
        self.blocks.append(block)
        self.counted.append(block.counts(ratio))
        self.excesses.append(block.excess)


class Stragglers:
    """Judges the ranks of one run. Times of ``step`` are passed in."""

    def __init__(self, device: bool = False) -> None:
        self.device = device
        self._ranks: dict[int, _Rank] = {}
        self._pending: dict[int, dict[int, Work]] = {}
        self._done = 0  # number of steps that all ranks have finished
        self._block: list[tuple[int, dict[int, Work]]] = []
        self._block_us = 0.0
        self._block_count = 0
        self._ended = 0  # number of findings that were resolved

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
        facts = self.standing.get(rank)
        self._ranks.pop(rank, None)
        self._restart()
        return StragglerFinding(facts, "resolved") if facts is not None else None

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
        works = pending.setdefault(number, {})
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
        self._pending.clear()
        self._block, self._block_us, self._block_count = [], 0.0, 0
        for rank in self._ranks.values():
            for kept in (rank.blocks, rank.counted, rank.excesses):
                kept.clear()

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
        mine, theirs = _mean_parts([block.parts for block in window]), _mean_parts([b.others_parts for b in window])
        compared = ("own", "others", "waited", "others_waited", "off_cpu", "others_off_cpu")
        return StragglerFacts(
            rank=number,
            step=step,
            steps=sum(block.steps for block in window),
            step_us=_mean(window, "wall"),
            slow_at=_slow_at(mine, theirs, sum(block.excess for block in window) / len(window)),
            phases_us={name: round(us) for name, us in mine.items()},
            others_phases_us={name: round(us) for name, us in theirs.items()},
            device=self.device,
            measured=measured,
            tokens=_mean(window, "tokens"),
            others_tokens=_mean(window, "others_tokens"),
            **{f"{name}_us": _mean(window, name) for name in compared},
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


def _mean_parts(blocks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    filled = [parts for parts in blocks if parts]
    names = dict.fromkeys(name for parts in filled for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in filled) / len(filled) for name in names}


def _mean(window: Sequence[Block], name: str) -> int:
    return round(sum(getattr(block, name) for block in window) / len(window))
