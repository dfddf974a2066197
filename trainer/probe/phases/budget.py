"""Keeps the probe's cost to the training thread within a share of a step: where steps are short, most are coarse.

In a *full* step memory is read at every boundary of phases and weights are sampled; in a *coarse* one memory is read at
its two ends and around the optimizer's phase alone, whose spikes must never be missed. Steps whose number is a multiple
of ``every`` are full: those of all ranks are the same ones. The cost of both kinds is what the probe's own calls took
(``Guard``), the step's time is that of its host.
"""

import math
from collections import deque

from ....protocol.messages.telemetry import Step

CHOICES = (1, 2, 5, 10, 25, 50)
"""Of ``every``: divisors of ``values.signs.EVERY``, so that the steps that are examined are full ones."""
LONGEST_NS = 20_000_000
"""Time of a step from which on its share is the same: 0.5 % of it are 100 us."""
GAP_NS = 5_000_000_000
"""Time between two full steps, at most: figures by phase would be too old on a screen."""
FIRST = 30
"""Steps at the beginning that are full: of compilation, the optimizer's first states, a leak's beginning."""
SUSPICIOUS = 20
"""Full steps that follow a suspicion."""
WINDOW = 15
"""Steps of each kind whose median counts."""
SPARE = 0.8
"""Share of the budget within which a smaller ``every`` must stay, so that the choice does not alternate."""
HIGHER = 1.01
"""A peak so many times the one that was unusual last is unusual."""
RECORDED_NS = 70
"""An entry of PyTorch's recorder (an allocation or a free) costs the training thread this, on an H200's host."""


class Budget:
    """Chooses which steps are full. ``share`` is that of a step's time, up to ``LONGEST_NS``; 0: all steps are full."""

    def __init__(self, share: float) -> None:
        self.every = 1
        self.full = True
        """Whether the present step is full."""
        self._share = share
        self._costs: dict[bool, deque[int]] = {True: deque(maxlen=WINDOW), False: deque(maxlen=WINDOW)}
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self.left = FIRST
        """Full steps to come although not all are: the first ones, and those after a suspicion."""
        self._number = 0

    def suspect(self) -> None:
        """Make the next steps full: something is unusual. Any thread."""
        self.left = max(self.left, SUSPICIOUS)

    def end_step(self, number: int, cost_ns: int, step_ns: int) -> None:
        """Handle the end of step ``number``, which cost the probe ``cost_ns``; decide about the next one."""
        self._costs[self.full].append(cost_ns)
        self._steps.append(step_ns)
        self._number = number
        if self.left:
            self.left -= 1
        elif self._share and self.full and len(self._costs[True]) == WINDOW:
            self._choose()
        self.full = bool(self.left) or (number + 1) % self.every == 0

    def ahead(self) -> int:
        """Return how many coarse steps follow, at least one: the present one."""
        return max(1, self.every - 1 - self._number % self.every)

    def affords(self, entries: int) -> bool:
        """Return whether PyTorch's recorder may be on in steps of so many entries; any thread."""
        steps = list(self._steps)
        return not self._share or not steps or entries * RECORDED_NS <= self._share * _median(steps)

    def _choose(self) -> None:
        full = _median(self._costs[True])
        coarse = _median(self._costs[False]) if self._costs[False] else full // 4
        step = _median(self._steps)
        allowed = self._share * min(step, LONGEST_NS)
        every = 1
        for every in (each for each in CHOICES if each == 1 or each * step <= GAP_NS):
            mean = (full + (every - 1) * coarse) / every
            if mean <= (allowed if every >= self.every else SPARE * allowed):
                break
        self.every = every


class Unusual:
    """Looks for steps that are unlike those before: the following ones are read in full. For the publisher."""

    def __init__(self) -> None:
        self._highest = 0
        """The peak that was unusual last: a slow growth adds up to another one."""
        self._before: tuple[bool, bool, int, int] | None = None

    def is_so(self, step: Step) -> bool:
        """Return whether a step has more memory than any before, or other trouble than the one before it."""
        peak = step.peak_phase
        top = peak.peak_span.peak if peak is not None else 0
        higher = top > HIGHER * self._highest
        if higher:
            self._highest = top
        numbers = [each for each in (step.loss, step.grad_norm) if each is not None]
        trouble = not all(map(math.isfinite, numbers)), step.overflow, step.retries, step.ooms
        before, self._before = self._before, trouble
        return higher or (before is not None and trouble != before)


def _median(values: "deque[int] | list[int]") -> int:
    return sorted(values)[len(values) // 2]
