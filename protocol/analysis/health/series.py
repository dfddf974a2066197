"""The steps of all ranks as one series: joined by step number, and as levels (medians of blocks of steps)."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median_high

from ...messages.telemetry import Step
from ..findings.finding import Finding

LAG = 16  # a step is returned without waiting for more ranks once the newest step is this many steps ahead
REPEATS = 3  # if ranks send this many step numbers twice, rows of several engines or optimizers alternate
MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution in units of its median absolute deviation
BLOCK = 8
REFERENCE_BLOCKS = 48
KEPT_BLOCKS = 512
COMPARABLE = 1.5
"""Blocks whose learning rate was lower than the current one by more than this factor are no reference, because a loss
is lower at a lower rate, as with cycles and warm restarts."""


class Judge:
    """The base of a detector of one series, which has at most one active finding."""

    def __init__(self) -> None:
        self.standing: Finding | None = None

    def reset(self) -> list[Finding]:
        """Reset for another job; return the resolved finding, if any."""
        found = self._end()
        self.__init__()
        return found

    def _end(self) -> list[Finding]:
        standing, self.standing = self.standing, None
        return [standing.over()] if standing is not None else []


@dataclass(slots=True)
class JoinedStep:
    """One step of the run; a figure is None if no rank sent a finite one."""

    step: int
    loss: float | None = None  # mean over the ranks with a finite loss
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    overflow: bool = False
    rollout: bool = False  # whether the step generated its own training data (reinforcement learning)
    unlabelled: bool = False  # whether a micro-batch had no label: its part of the gradient is 0
    ranks: int = 0
    _losses: int = 0

    def add(self, step: Step) -> None:
        self.ranks += 1
        loss, norm = step.loss, step.grad_norm
        if loss is not None and isfinite(loss):
            self._losses += 1
            self.loss = loss if self.loss is None else self.loss + (loss - self.loss) / self._losses
        if norm is not None and isfinite(norm):
            self.grad_norm = norm if self.grad_norm is None else max(self.grad_norm, norm)
        self.lr = step.lr if step.lr is not None else self.lr
        self.loss_scale = step.loss_scale if step.loss_scale is not None else self.loss_scale
        self.overflow |= step.overflow
        self.unlabelled |= step.signs is not None and step.signs.unlabelled > 0
        self.rollout = self.rollout or "generate" in [record.name for record in step.phases]


class Join:
    """Joins the steps of ``ranks``."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.alternating = False
        """Whether several engines or optimizers train in one loop, so that their losses are not one series."""
        self._open: dict[int, JoinedStep] = {}
        self._last: dict[int, int] = {}
        self._repeats = 0
        self._passed = 0

    def add(self, step: Step) -> list[JoinedStep]:
        """Add one rank's step; return the steps that are complete now, ascending."""
        self.alternating = self.alternating or len(step.updates) > 1
        if self._last.get(step.rank) == step.step:
            self._repeats += 1
            self.alternating = self.alternating or self._repeats >= REPEATS
            return []
        self._last[step.rank] = step.step
        self.ranks.add(step.rank)
        if step.step <= self._passed:
            return []  # from a straggler whose step was returned without it
        row = self._open.get(step.step)
        if row is None:
            row = self._open[step.step] = JoinedStep(step.step)
        row.add(step)
        late, ranks = step.step - LAG, len(self.ranks)
        if row.ranks < ranks and min(self._open) > late:
            return []
        self._passed = max(number for number, one in self._open.items() if one.ranks >= ranks or number <= late)
        return [self._open.pop(number) for number in sorted(self._open) if number <= self._passed]

    def drop(self, rank: int) -> None:
        self.ranks.discard(rank)
        self._last.pop(rank, None)


def spread(values: Iterable[float], center: float = 0.0) -> float:
    """Return a robust standard deviation: the scaled median absolute deviation from ``center``."""
    return MAD_TO_SIGMA * median_high([abs(value - center) for value in values])


def tail(values: Sequence[float]) -> float:
    """Return the standard deviation of a normal distribution with the same 90th percentile of magnitudes."""
    return sorted([abs(value) for value in values])[len(values) * 9 // 10] / 1.645


class Block:
    """``BLOCK`` consecutive steps."""

    def __init__(self, values: list[float], step: int, end: int, lr: float | None) -> None:
        self.step = step  # number of its first step
        self.end = end  # number of values of the series up to the block's end
        self.level = median_high(values)
        self.residuals = [value - self.level for value in values]
        self.lr = lr
        self.largest_rise = 0.0
        """Largest rise of the series so far, from a block to a later one at most ``REFERENCE_BLOCKS`` apart."""

    def is_comparable(self, lr: float) -> bool:
        """Return whether its learning rate is not much lower."""
        return self.lr is None or self.lr * COMPARABLE >= lr


class Levels:
    """The blocks of one series, oldest first."""

    def __init__(self) -> None:
        self.blocks: deque[Block] = deque(maxlen=KEPT_BLOCKS)
        self.recent: deque[float] = deque(maxlen=BLOCK)  # the latest values, whether their block is complete or not
        self.count = 0
        self._open: list[float] = []
        self._open_step = 0
        self._latest: deque[Block] = deque(maxlen=REFERENCE_BLOCKS)

    def add(self, value: float, step: int, lr: float | None) -> None:
        self.recent.append(value)
        self.count += 1
        if not self._open:
            self._open_step = step
        self._open.append(value)
        if len(self._open) < BLOCK:
            return
        block, before = Block(self._open, self._open_step, self.count, lr), self._latest
        self._open = []
        if before:
            rise = block.level - min([one.level for one in before])
            block.largest_rise = max(before[-1].largest_rise, rise)
        self.blocks.append(block)
        before.append(block)

    def before(self) -> list[Block]:
        """Return the last ``REFERENCE_BLOCKS`` blocks before the recent values, oldest first."""
        # Only the last complete block overlaps the recent values.
        return list(self._latest)[:-1]

    def comparable(self, lr: float | None, fewest: int) -> list[Block]:
        """Return the blocks of ``before`` with a comparable learning rate.

        If there are fewer than ``fewest``, return the latest ``REFERENCE_BLOCKS`` such blocks of the whole series.
        """
        before = self.before()
        if lr is None or lr <= 0:
            return before
        near = [one for one in before if one.is_comparable(lr)]
        if len(near) >= fewest:
            return near
        kept = [one for one in self.blocks if one.end <= self.count - BLOCK and one.is_comparable(lr)]
        return kept[-REFERENCE_BLOCKS:]
