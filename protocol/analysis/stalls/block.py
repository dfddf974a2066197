"""Compares each rank's own work with the other ranks' over a block of steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from .work import Work

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
