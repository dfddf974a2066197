"""Plateau: the loss has not fallen over the last 30 % of the run, and at least ``FEWEST_STEPS`` steps.

Information only. Raised if the medians of the two halves of that window differ by less than ``FLAT`` of the level, and
the standard error of that difference is below ``FLAT`` too. Not raised

- in the tail of a schedule: the learning rate is below ``TAIL`` of its maximum, or the plan is nearly done;
- if there is nothing left to learn: the level is below ``SOLVED`` of the first one, or not above zero.

Resolved if the level falls by 1 %.
"""

import msgspec

from ..findings import Finding
from ..findings.kind import Kind
from ..text.words import Words, number
from .joined import JoinedStep
from .recent import median, spread

FIRST_BLOCK = 10
MOST_BLOCKS = 512
FEWEST_STEPS = 1000
WINDOW_SHARE = 0.3
FLAT = 0.002
TAIL = 0.3
SOLVED = 0.1
PLAN_SHARE = 0.8
FALL = 0.01


class PlateauFacts(msgspec.Struct, frozen=True):
    """The level, its start, and related figures."""

    loss: float
    improvement: float
    """Median of the window's first half minus that of its second."""
    since_step: int
    steps: int
    first_loss: float
    lr: float | None
    never_fell: bool
    """Whether the level is still that of the run's start."""


class Plateau:
    """Judges the series of one run, in at most ``MOST_BLOCKS`` blocks of growing size."""

    def __init__(self) -> None:
        self._size = FIRST_BLOCK
        self._blocks: list[float] = []
        self._block: list[float] = []
        self._began: list[int] = []
        self._first: float | None = None
        """Level of the run's first blocks, kept after a plateau is resolved."""
        self._at = 0
        self._lr: float | None = None
        self._top_lr = 0.0
        self._facts: PlateauFacts | None = None
        self.total_steps = 0
        """Planned steps; 0: unknown."""

    def step(self, row: JoinedStep) -> list[Finding]:
        """Process one step of the run."""
        if row.loss is None:
            return []
        if row.lr is not None:
            self._lr = row.lr
            self._top_lr = max(self._top_lr, row.lr)
        if not self._block:
            self._at = row.step
        self._block.append(row.loss)
        if len(self._block) < self._size:
            return []
        self._blocks.append(median(self._block))
        self._began.append(self._at)
        self._block = []
        if len(self._blocks) >= MOST_BLOCKS:
            self._size *= 2
            self._blocks = [(a + b) / 2 for a, b in zip(self._blocks[::2], self._blocks[1::2], strict=True)]
            self._began = self._began[::2]
        return self._check(row)

    def reset(self) -> list[Finding]:
        """Reset, except for the plan; return the resolved finding, if any."""
        facts, total = self._facts, self.total_steps
        self.__init__()
        self.total_steps = total
        return [Finding("loss_plateau", facts, "resolved", "info")] if facts is not None else []

    def _check(self, row: JoinedStep) -> list[Finding]:
        blocks = self._blocks
        if self._facts is not None:
            level = median(blocks[-10:])
            if level < self._facts.loss - FALL * abs(self._facts.loss):
                found = Finding("loss_plateau", self._facts, "resolved", "info", step=row.step)
                self._facts = None
                self._blocks, self._began, self._block = [], [], []
                self._size = FIRST_BLOCK
                return [found]
            return []
        count = max(-(-FEWEST_STEPS // self._size), int(WINDOW_SHARE * len(blocks)))
        if len(blocks) < count + 2 or len(blocks) % 4:
            return []
        if self._first is None:
            self._first = median(blocks[:3])
        window = blocks[-count:]
        early, late = window[: count // 2], window[count // 2 :]
        level, before, first = median(late), median(early), self._first
        if level <= 0 or level < SOLVED * first or self._in_tail(row):
            return []
        error = 1.25 * spread(late, level) * (2 / len(late)) ** 0.5
        if abs(before - level) > FLAT * level or error > FLAT * level:
            return []
        self._facts = PlateauFacts(
            level,
            before - level,
            self._began[-count],
            row.step - self._began[-count] + 1,
            first,
            self._lr,
            level > 0.98 * first,
        )
        return [Finding("loss_plateau", self._facts, "raised", "info", step=row.step)]

    def _in_tail(self, row: JoinedStep) -> bool:
        tail = self._lr is not None and self._lr < TAIL * self._top_lr
        return tail or (self.total_steps > 0 and row.step > PLAN_SHARE * self.total_steps)


def _plateau(finding: Finding) -> Words:
    facts: PlateauFacts = finding.facts
    if facts.never_fell:
        return Words(
            f"the loss has not fallen since the start: {number(facts.loss)}",
            f"After {facts.since_step + facts.steps - 1} steps it is at {number(facts.loss)}; it began at "
            f"{number(facts.first_loss)}. Learning rate {number(facts.lr)}.",
            "Check that the parameters are trained at all (requires_grad, the optimizer's parameter groups, a nonzero "
            "learning rate), and that labels are not all masked, or shuffled relative to their inputs.",
            "The loss falls.",
        )
    return Words(
        f"the loss has been flat at {number(facts.loss)} for {facts.steps} steps",
        f"Since step {facts.since_step} it changed by {number(-facts.improvement)}. Learning rate {number(facts.lr)}, "
        "not in the tail of its schedule.",
        "Evaluate whether more steps are worth their cost; a change of the learning rate can end a plateau.",
        "The loss falls again.",
    )


KINDS = (
    Kind(
        "loss_plateau",
        PlateauFacts,
        _plateau,
        limits={
            "change between the halves of the window": f"below {FLAT:.1%}",
            "window": f"the last {WINDOW_SHARE:.0%} of the run, {FEWEST_STEPS:,} steps at least",
        },
    ),
)
