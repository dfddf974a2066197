"""Keeps the probe's cost to the training thread within a share of a step: where steps are short, most are coarse.

In a *full* step memory is read at every boundary of phases and weights are sampled; in a *coarse* one memory is read at
its two ends and around the optimizer's phase alone, whose spikes must never be missed. Steps whose number is a multiple
of ``every`` are full: those of all ranks are the same ones. The publisher copies the
losses and norms of a block of short steps. The cost of each kind is what the probe's own calls took (``Guard``), the
step's time is that of its host.
"""

import math
from collections import deque

from ....protocol.messages.telemetry import Step

CHOICES = (1, 2, 5, 10, 25, 50, 75, 100, 200)
"""Of ``every``: up to ``values.signs.EVERY`` its divisors, so that the steps that are examined are full ones."""
BLOCKS = (1, 2, 4, 8)  # Of ``block``
LONGEST_NS = 20_000_000  # Time of a step from which on its share is the same: 0.5 % of it are 100 us
GAP_NS = 5_000_000_000  # Time between two full steps, at most: figures by phase would be too old on a screen
BLOCK_NS = 500_000_000  # Time of a block of steps, at most
FIRST = 30  # Steps at the beginning that are full: of compilation, the optimizer's first states, a leak's beginning
SUSPICIOUS = 20  # Full steps that follow a suspicion
WINDOW = 15  # Steps of each kind whose median counts
SPARE = 0.8  # Share of the budget within which a smaller ``every`` must stay, so that the choice does not alternate
HIGHER = 1.01  # Ratio to the last unusual peak from which a peak is unusual again
FAR = 10.0  # A loss, or a norm, so many times the median of those before it is unusual
RECORDED_NS = 70  # Time of the training thread for an entry of PyTorch's recorder, on an H200's host


class Budget:
    """Chooses which steps are full, and how many followed ones make a block.

    ``share`` is that of a step's time, up to ``LONGEST_NS``; 0: all steps are full.
    """

    def __init__(self, share: float) -> None:
        self.every = self.block = 1  # Of how many steps one is full, and how many followed ones a block has
        self.full = True  # Whether the present step is full
        self._share = share
        self._costs: dict[str, deque[int]] = {kind: deque(maxlen=WINDOW) for kind in ("full", "coarse")}
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self.left = FIRST  # Full steps to come although not all are: the first ones, and those after a suspicion
        self._number = 0

    def suspect(self) -> None:
        """Make the next steps full: something is unusual. Any thread."""
        self.left = max(self.left, SUSPICIOUS)

    def end_step(self, number: int, cost_ns: int, step_ns: int) -> None:
        """Handle the end of the judged step ``number``, which cost ``cost_ns``; decide about the next one."""
        self._costs["full" if self.full else "coarse"].append(cost_ns)
        self._steps.append(step_ns)
        if self.left:
            self.left -= 1
        elif self._share and self.full and len(self._costs["full"]) == WINDOW:
            self._choose()
        self.passed(number)

    def note_followed(self, cost_ns: int, step_ns: int) -> None:
        """Note the cost of a followed step, which is the mean of its block. For the publisher."""
        self._costs["coarse"].append(cost_ns)
        self._steps.append(step_ns)

    def passed(self, number: int) -> None:
        """Decide about the step after step ``number``."""
        self._number = number
        self.full = bool(self.left) or (number + 1) % self.every == 0

    def ahead(self) -> int:
        """Return how many coarse steps follow, at least one: the present one."""
        return max(1, self.every - 1 - self._number % self.every)

    def affords(self, entries: int) -> bool:
        """Return whether PyTorch's recorder may be on in steps of so many entries; any thread."""
        steps = list(self._steps)
        return not self._share or not steps or entries * RECORDED_NS <= self._share * _median(steps)

    def _choose(self) -> None:
        full, coarse = (_median(each) if each else 0 for each in self._costs.values())
        coarse = coarse or full // 4
        step, before, every = _median(self._steps), self.every, 1
        allowed = self._share * min(step, LONGEST_NS)
        for every in _within(CHOICES, GAP_NS, step):
            if coarse + (full - coarse) / every <= (allowed if every >= before else SPARE * allowed):
                break
        self.every, self.block = every, max(_within(BLOCKS, BLOCK_NS, step))


def _within(choices: tuple[int, ...], gap_ns: int, step_ns: int) -> list[int]:
    return [each for each in choices if each == 1 or each * step_ns <= gap_ns]


class Unusual:
    """Looks for steps that are unlike those before: the following ones are read in full. For the publisher."""

    def __init__(self) -> None:
        self._highest = 0  # The peak that was unusual last: a slow growth adds up to another one
        self._before: tuple[bool, bool, int, int] | None = None
        self._recent: tuple[deque[float], deque[float]] = deque(maxlen=WINDOW), deque(maxlen=WINDOW)
        """Sizes of the latest losses and norms."""

    def is_so(self, step: Step) -> bool:
        """Return whether a step has more memory than any before, or other trouble than the one before it."""
        peak = step.peak_phase
        top = peak.peak_span.peak if peak is not None else 0
        higher = top > HIGHER * self._highest
        if higher:
            self._highest = top
        pairs = zip((step.loss, step.grad_norm), self._recent, strict=True)
        far = [_is_far(abs(value), recent) for value, recent in pairs if value is not None]
        trouble = any(far), step.overflow, step.retries, step.ooms
        before, self._before = self._before, trouble
        return higher or (before is not None and trouble != before)


def _is_far(value: float, recent: "deque[float]") -> bool:
    if not math.isfinite(value):
        return True
    usual = sorted(recent)[WINDOW // 2] if len(recent) == WINDOW else math.inf
    recent.append(value)
    return value > FAR * usual > 0


def _median(values: "deque[int] | list[int]") -> int:
    return sorted(values)[len(values) // 2]
