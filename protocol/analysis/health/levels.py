"""The level of a series over time: medians of blocks of steps, each with its learning rate."""

from collections import deque

from .recent import median

BLOCK = 8
REFERENCE_BLOCKS = 48
KEPT_BLOCKS = 512
COMPARABLE = 1.5
"""Blocks whose learning rate was lower than the current one by more than this factor are no reference, because a loss
is lower at a lower rate, as with cycles and warm restarts."""


class Block:
    """``BLOCK`` consecutive steps."""

    def __init__(self, values: list[float], step: int, end: int, lr: float | None) -> None:
        self.step = step
        """Number of its first step."""
        self.end = end
        """Number of values of the series up to the block's end."""
        self.level = median(values)
        self.residuals = [value - self.level for value in values]
        self.lr = lr
        self.largest_rise = 0.0
        """Largest rise of the series so far, from a block to a later one at most ``REFERENCE_BLOCKS`` apart."""


class Levels:
    """The blocks of one series, oldest first."""

    def __init__(self) -> None:
        self.blocks: deque[Block] = deque(maxlen=KEPT_BLOCKS)
        self.recent: deque[float] = deque(maxlen=BLOCK)
        """The latest values, whether their block is complete or not."""
        self.count = 0
        self._open: list[float] = []
        self._open_step = 0
        self._latest: deque[Block] = deque(maxlen=REFERENCE_BLOCKS)

    def add(self, value: float, step: int, lr: float | None) -> None:
        """Append the value of one step."""
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
        near = [one for one in before if _is_comparable(one, lr)]
        if len(near) >= fewest:
            return near
        kept = [one for one in self.blocks if one.end <= self.count - BLOCK and _is_comparable(one, lr)]
        return kept[-REFERENCE_BLOCKS:]


def _is_comparable(block: Block, lr: float) -> bool:
    return block.lr is None or block.lr * COMPARABLE >= lr
