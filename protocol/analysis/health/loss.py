"""Divergence: the loss has risen far above its recent level and does not return.

The loss of a step is the mean over ranks. The median of its last ``BLOCK`` values is compared with the blocks of the
last 384 steps with a comparable learning rate (``levels``). A rise counts if it exceeds the lowest of them by all of

- ``NOISE`` times the spread of single steps, from the median absolute deviation or the tail (a mixture of easy and hard
  batches), and ``BLOCK_NOISE`` times that between consecutive blocks;
- ``SHARE_OF_LEVEL`` of that lowest level, and ``SHARE_OF_GAIN`` of the run's total decrease since its start; if the run
  has not learned yet (a generator, a policy), ``UNLEARNED`` times the larger of that level and the first one;
- ``SWING`` times the largest rise of the series before this one, over at most as many steps: a loss that oscillates, or
  has always risen, does not diverge. Early in a run, before all oscillations have been seen, the factor is larger.

A rise is raised if it is present at ``RISING_LOOKS`` consecutive checks (one every ``EVERY`` steps) and the loss still
rises, or at ``STAYING_LOOKS`` consecutive checks without falling. Harder data, another task, a restart of the learning
rate or a new target network raise the loss too, but then it falls or jumps back. For ``RESTART_STEPS`` after the
learning rate jumped up nothing is raised. After a rise was raised and resolved, another counts only if it is higher or
lasts twice as long.

The severity is only ``info``

- if less than ``MUCH_OF_GAIN`` of the decrease is lost and the level has not trebled: a growing weight of a loss term
  has the same effect;
- if the loss stepped up and stays below the run's start, or the run has not learned: other data have the same effect.
  It becomes a warning if it stays for ``STEPPED_LOOKS``, or rises further;
- if steps generate their own training data: losses of policies and values grow with rewards.

Resolved if the level falls below the middle of the rise. If one rank's rows alternate between engines, nothing is
judged.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Literal, NamedTuple

import msgspec

from ...messages.control import Severity
from ...messages.telemetry import Step
from ...text import all_ranks
from ..findings.finding import HIDDEN, Finding, Kind, Shown, State
from ..words import Words, number

# NaN and infinite losses and gradient norms: first rank, first step, the last good values.
#
# Raised at the first one in a step whose update the loss scaler did not skip: skipped updates with an infinite norm are
# part of dynamic loss scaling. It is delayed until all ranks have reported that step, at most ``WAIT_SECONDS``, because
# the report of the rank of origin may arrive last. Resolved after ``CLEAN_STEPS`` finite steps of every affected rank.


CLEAN_STEPS = 20
WAIT_SECONDS = 5.0
UPDATE_STEPS = 50
"""An active finding is sent again after this many further steps with such a value."""
KEPT_STEPS = 64
"""Number of finite steps kept per rank, to compare with another rank's non-finite step and find the last good one."""
OUT_OF_RANGE = 10.0
"""A finite loss this many times above the median of the steps kept has left its range."""


class NonFiniteFacts(msgspec.Struct, frozen=True):
    """Origin of the first non-finite value."""

    value: str
    """``nan``, ``inf`` or ``-inf``."""
    first_rank: int
    """The rank of ``first_ranks`` that reported first; the last good values are its own."""
    first_ranks: tuple[int, ...]
    """Ranks with such a value in the first step; all ranks if gradients are reduced before the norm is computed."""
    first_step: int
    last_good_step: int | None
    """The last earlier step of that rank with a finite value; None: none."""
    last_good_loss: float | None
    last_good_grad_norm: float | None
    lr: float | None
    steps: int
    """Steps with such a value so far, over all ranks."""
    ranks_total: int
    finite_elsewhere: bool
    """Whether other ranks had a finite value in that step: then that rank's batch or device is the origin."""
    precision: str = ""
    last_good_lr: float | None = None
    all_ranks: bool = False
    """Whether every rank had such a value in the first step: then the update before it is the suspect."""


class _Good(NamedTuple):
    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None


_NO_GOOD = None, None, None, None


@dataclass(slots=True)
class _Rank:
    step: int = -1
    """Its latest step."""
    good: "deque[_Good]" = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Its latest steps with a finite value."""
    clean: int = 0
    bad: bool = False


@dataclass(slots=True)
class _Case:
    first_rank: int
    first_step: int
    value: str
    good: _Good | tuple[None, None, None, None]
    lr: float | None
    since: float
    """End of its first step."""
    precision: str
    steps: int = 0
    first_ranks: set[int] = field(default_factory=set[int])
    ranks: set[int] = field(default_factory=set[int])
    finite_elsewhere: bool = False
    """Stored, because the ranks' good steps are kept for ``KEPT_STEPS`` only."""
    raised: bool = False


class NonFinite:
    """Detects non-finite values of ``loss`` or ``grad_norm``."""

    def __init__(self, what: Literal["loss", "grad_norm"]) -> None:
        self._what = what
        self._kind: Literal["nan_loss", "nan_gradient"] = "nan_loss" if what == "loss" else "nan_gradient"
        self._ranks: dict[int, _Rank] = {}
        self._case: _Case | None = None
        self._explained = False
        """Whether weights were not finite before any loss was: another finding tells that."""

    def step(self, step: Step, precision: str = "", ranks: Collection[int] = ()) -> list[Finding]:
        """Process one rank's step.

        Args:
            ranks: ranks that still train; the finding waits for their reports of its step.
        """
        rank = self._ranks.get(step.rank)
        if rank is None:
            rank = self._ranks[step.rank] = _Rank()
        rank.step = step.step
        value = step.loss if self._what == "loss" else step.grad_norm
        if step.updates:
            value = self._of_updates(step, value)
        found: list[Finding] = []
        signs = step.signs
        if signs is not None and self._what == "loss":
            self._explained |= signs.weights == "nan" and value is not None and isfinite(value)
            if signs.unlabelled:
                value = None  # a mean over no labels, which another finding tells
        if value is None:
            pass
        elif isfinite(value):
            rank.good.append(_Good(step.step, step.loss, step.grad_norm, step.lr))
            if rank.bad:
                found = self._clean(rank, precision)
        elif not step.overflow and not self._explained:
            found = self._bad(step, rank, value, precision)
        return found if self._case is None else found + self.raise_complete(ranks)

    def raise_complete(self, ranks: Collection[int]) -> list[Finding]:
        """Raise a delayed finding if all of ``ranks`` have reported its step."""
        case = self._case
        if case is None or case.raised:
            return []
        late = any(rank not in self._ranks or self._ranks[rank].step < case.first_step for rank in ranks)
        return [] if late else self._raise(case)

    def tick(self, now: float) -> list[Finding]:
        """Raise a finding that has waited ``WAIT_SECONDS`` for a rank."""
        case = self._case
        return self._raise(case) if case is not None and not case.raised and now - case.since >= WAIT_SECONDS else []

    def _raise(self, case: _Case) -> list[Finding]:
        case.raised = True
        return [self._finding(case, "raised", case.precision)]

    def _of_updates(self, step: Step, value: float | None) -> float | None:
        """Return the first non-finite value of several engines, else ``value``."""
        if value is not None and not isfinite(value):
            return value
        # Updates skipped by their scaler do not count.
        of_each = [getattr(one, self._what) for one in step.updates if not one.overflow]
        return next((one for one in of_each if one is not None and not isfinite(one)), value)

    def reset(self) -> list[Finding]:
        """Reset for another job; return the resolved finding, if any."""
        case, self._case, self._explained = self._case, None, False
        self._ranks.clear()
        return [self._finding(case, "resolved", "")] if case is not None and case.raised else []

    def _bad(self, step: Step, rank: _Rank, value: float, precision: str) -> list[Finding]:
        rank.clean, rank.bad = 0, True
        case = self._case
        if case is None:
            ended = step.started + step.host_us / 1e6
            case = self._case = _Case(step.rank, step.step, repr(float(value)), _good(rank), step.lr, ended, precision)
        known = step.rank in case.ranks
        case.ranks.add(step.rank)
        case.steps += 1
        if step.step < case.first_step:  # another rank's message arrived later
            case.first_rank, case.first_step, case.value = step.rank, step.step, repr(float(value))
            case.good, known = _good(rank), False
            case.first_ranks.clear()
            case.finite_elsewhere = False
        if step.step == case.first_step:
            case.first_ranks.add(step.rank)
        if case.raised and (not known or case.steps % UPDATE_STEPS == 0):
            return [self._finding(case, "updated", precision)]
        return []

    def _clean(self, rank: _Rank, precision: str) -> list[Finding]:
        rank.clean += 1
        if rank.clean >= CLEAN_STEPS:
            rank.bad = False
        case = self._case
        if case is None or any(one.bad for one in self._ranks.values()):
            return []
        self._case = None
        return [self._finding(case, "resolved", precision)] if case.raised else []

    def _finding(self, case: _Case, state: Literal["raised", "updated", "resolved"], precision: str) -> Finding:
        finite = [rank for rank in self._ranks.values() if any(good.step == case.first_step for good in rank.good)]
        case.finite_elsewhere |= bool(finite)
        ranks_total = sum(rank.bad or bool(rank.good) for rank in self._ranks.values())
        step, loss, grad_norm, lr = case.good
        facts = NonFiniteFacts(
            case.value,
            case.first_rank,
            tuple(sorted(case.first_ranks)),
            case.first_step,
            *(step, loss, grad_norm),
            case.lr,
            case.steps,
            ranks_total,
            case.finite_elsewhere,
            precision,
            lr,
            ranks_total == len(case.first_ranks) > 1,
        )
        return Finding(self._kind, facts, state, "error", tuple(sorted(case.ranks)), step=case.first_step)


def _good(rank: _Rank) -> _Good | tuple[None, None, None, None]:
    """Return the last step of a rank before its loss left its range."""
    if not rank.good:
        return _NO_GOOD
    losses = sorted(good.loss for good in rank.good if good.loss is not None)
    if not losses:
        return rank.good[-1]
    highest = OUT_OF_RANGE * abs(losses[len(losses) // 2])
    within = [good for good in rank.good if good.loss is None or good.loss <= highest]
    return within[-1] if within else rank.good[-1]


def _nan(finding: Finding) -> Words:
    facts: NonFiniteFacts = finding.facts
    what = "loss" if finding.kind == "nan_loss" else "gradient norm"
    who = all_ranks(facts.first_ranks)
    value = "NaN" if facts.value == "nan" else "infinite"
    if facts.last_good_step is None:
        good = f"Rank {facts.first_rank} had no finite one before"
    else:
        norm = f", gradient norm {number(facts.last_good_grad_norm)}" if facts.last_good_grad_norm is not None else ""
        loss = number(facts.last_good_loss)
        good = f"The last good step of rank {facts.first_rank} was {facts.last_good_step}: loss {loss}{norm}"
    others = left = ""
    if facts.last_good_step is not None and facts.last_good_step < facts.first_step - 1:
        left = "; after it the loss left its range"
    rate = f"learning rate {number(facts.lr)}"
    if facts.last_good_lr and facts.lr and facts.lr > 2 * facts.last_good_lr:
        rate += f", {number(facts.lr / facts.last_good_lr)} times that of the good step"
    if facts.ranks_total > 1 and facts.finite_elsewhere:
        others = f" Other ranks were finite in that step, so it came from the batch or device of {who}."
    elif facts.all_ranks:
        suspect = facts.first_step - 1 if facts.last_good_step is None else facts.last_good_step
        others = f" All ranks in the same step: the update of step {suspect} is the suspect, not a batch."
    elif set(finding.ranks) > set(facts.first_ranks):
        others = f" Since then: {all_ranks(finding.ranks)}."
    if finding.kind == "nan_loss":
        # A checkpoint of a step has its update: of a suspect one, the checkpoint before it is the last good one.
        good_until = (facts.last_good_step or 0) - (facts.all_ranks or bool(left))
        until = f"of step {good_until:,} or earlier" if good_until > 0 else "before that step"
        remedy = (
            f"Stop, and resume from a checkpoint {until}: parameters that are NaN stay NaN. Check that "
            "batch (labels all masked, empty rows, values out of range), lower the learning rate or lengthen its "
            "warm-up, clip gradients; torch.autograd.set_detect_anomaly(True) names the operation."
        )
    else:
        remedy = (
            "Clip gradients, and skip updates whose norm is not finite; check that batch. The usual cause is a "
            "division or a logarithm near zero; torch.autograd.set_detect_anomaly(True) names the operation."
        )
    if facts.precision == "fp16":
        remedy += " bf16 has a larger range than fp16."
    return Words(
        f"{value} {what} on {who} since step {facts.first_step}",
        f"{good}, {rate}{left}.{others}",
        remedy,
        "It has been finite on every rank since.",
    )


_SHOWN: dict[str, Shown] = {
    "last_good_loss": Shown("last finite loss"),
    "last_good_step": Shown("last finite step"),
    "last_good_grad_norm": Shown("last finite gradient norm"),
    "first_step": Shown("first at step"),
    "first_rank": Shown("first on", "rank"),
    "first_ranks": Shown("first on ranks"),
    "ranks_total": Shown("of ranks"),
    "finite_elsewhere": Shown("finite on other ranks"),
    "last_good_lr": Shown("learning rate of the last good step"),
    "all_ranks": Shown("on all ranks"),
}

_LIMITS = {"finite steps on every rank that resolve it": str(CLEAN_STEPS)}
KINDS = (
    Kind("nan_loss", NonFiniteFacts, _nan, shown=_SHOWN, limits=_LIMITS),
    Kind("nan_gradient", NonFiniteFacts, _nan, limits=_LIMITS),
)


# The steps of all ranks joined by step number: one row per step of the run, with means over ranks.


LAG = 16
"""A step is returned without waiting for more ranks once the newest step is this many steps ahead."""
REPEATS = 3
"""If ranks send this many step numbers twice, rows of several engines or optimizers alternate."""


@dataclass(slots=True)
class JoinedStep:
    """One step of the run; a figure is None if no rank sent a finite one."""

    step: int
    loss: float | None = None
    """Mean over the ranks with a finite loss."""
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    overflow: bool = False
    rollout: bool = False
    """Whether the step generated its own training data (reinforcement learning)."""
    ranks: int = 0
    _losses: int = 0

    def add(self, step: Step) -> None:
        """Add one rank's step."""
        self.ranks += 1
        loss, norm = step.loss, step.grad_norm
        if loss is not None and isfinite(loss):
            self._losses += 1
            self.loss = loss if self.loss is None else self.loss + (loss - self.loss) / self._losses
        if norm is not None and isfinite(norm):
            self.grad_norm = norm if self.grad_norm is None else max(self.grad_norm, norm)
        if step.lr is not None:
            self.lr = step.lr
        if step.loss_scale is not None:
            self.loss_scale = step.loss_scale
        if step.overflow:
            self.overflow = True
        if not self.rollout:
            for record in step.phases:
                if record.name == "generate":
                    self.rollout = True


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
        if len(step.updates) > 1:
            self.alternating = True
        last = self._last.get(step.rank)
        if last == step.step:
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
        if len(self._open) == 1:
            self._passed = step.step
            del self._open[step.step]
            return [row]
        self._passed = newest = max(
            number for number, one in self._open.items() if one.ranks >= ranks or number <= late
        )
        return [self._open.pop(number) for number in sorted(self._open) if number <= newest]

    def drop(self, rank: int) -> None:
        """Stop waiting for a rank."""
        self.ranks.discard(rank)
        self._last.pop(rank, None)


# Robust statistics of short series: medians and the median absolute deviation.


MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


def median(values: Iterable[float]) -> float:
    """Return the median; the upper one of two for an even count. ``values`` must not be empty."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def spread(values: Sequence[float], center: float | None = None) -> float:
    """Return a robust standard deviation: the scaled median absolute deviation from ``center`` (default: median)."""
    if not values:
        return 0.0
    middle = median(values) if center is None else center
    return MAD_TO_SIGMA * median([abs(value - middle) for value in values])


def tail(values: Sequence[float]) -> float:
    """Return the standard deviation of a normal distribution with the same 90th percentile of magnitudes."""
    ordered = sorted([abs(value) for value in values])
    return ordered[len(ordered) * 9 // 10] / 1.645 if ordered else 0.0


# Plateau: the loss has not fallen over the last 30 % of the run, and at least ``FEWEST_STEPS`` steps.
#
# Information only. Raised if the medians of the two halves of that window differ by less than ``FLAT`` of the level,
# and the standard error of that difference is below ``FLAT`` too. Not raised
#
# - in the tail of a schedule: the learning rate is below ``TAIL`` of its maximum, or the plan is nearly done;
# - if there is nothing left to learn: the level is below ``SOLVED`` of the first one, or not above zero.
#
# Resolved if the level falls by 1 %.


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


PLATEAU_KINDS = (
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


# The level of a series over time: medians of blocks of steps, each with its learning rate.


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


FEWEST_BLOCKS = 5
EVERY = 4
RISING_LOOKS = 5
STAYING_LOOKS = 25
STEPPED_LOOKS = 75
FURTHER = 1.5
NOISE = 3.0
BLOCK_NOISE = 6.0
SHARE_OF_LEVEL = 0.5
SHARE_OF_GAIN = 0.25
MUCH_OF_GAIN = 0.66
MANY_TIMES = 2.5
UNLEARNED = 1.5
ABOVE_START = 0.1
ONSET = 0.25
LEARNED = 0.1
SWING = 1.25
EARLY_BLOCKS = 16
RESTART_RATIO = 3.0
RESTART_STEPS = 100
UPDATE_LOOKS = 25


class DivergenceFacts(msgspec.Struct, frozen=True):
    """The level before and after the rise, and the figures that it is compared with."""

    loss: float
    """Median of the last steps."""
    lowest: float
    """Median of the lowest block of the reference."""
    lowest_step: int
    since_step: int
    """The first step of the rise."""
    noise: float
    """Robust standard deviation of single steps."""
    first_loss: float
    """Median of the run's first steps."""
    lr: float | None
    grad_norm: float | None
    steps: int
    """Steps in the reference."""
    rollouts: bool = False
    """Whether steps generate their own training data."""
    stepped: bool = False
    """Whether it rose at once to a level at which it stays, as with other data."""


class _Rise(msgspec.Struct):
    """Height of the loss above its reference, and the limit."""

    height: float
    limit: float
    noise: float
    lowest: Block
    steps: int
    learned: bool


class Divergence:
    """Judges the series of one run."""

    def __init__(self) -> None:
        self._levels = Levels()
        self._rates: deque[float] = deque(maxlen=BLOCK + 1)
        self._first: float | None = None
        self._lowest_of_run: float | None = None
        self._held_until = 0
        self._high: list[float] = []
        """The loss at each check since it is high."""
        self._since = 0
        self._low = 0
        self._facts: DivergenceFacts | None = None
        self._severity: Severity = "warning"
        self._peak = self._height = 0.0
        self._returned = 0.0, 0
        """Maximum height and duration (in checks) of the resolved rises."""
        self._middle = 0.0
        self._looks = 0

    def step(self, row: JoinedStep) -> list[Finding]:
        """Process one step of the run."""
        if row.loss is None:
            return []
        self._rate(row)
        levels = self._levels
        levels.add(row.loss, row.step, row.lr)
        if levels.count == BLOCK and self._first is None:
            self._first = median(levels.recent)
        if levels.count % EVERY or levels.count < (FEWEST_BLOCKS + 1) * BLOCK:
            return []
        return self._check(row) if self._facts is None else self._watch(row, self._facts)

    def reset(self) -> list[Finding]:
        """Reset; return the resolved finding, if any."""
        facts, severity = self._facts, self._severity
        self.__init__()
        return [_finding(facts, "resolved", severity, None)] if facts is not None else []

    def _rate(self, row: JoinedStep) -> None:
        if row.lr is None:
            return
        rates = self._rates
        if rates and self._levels.count > BLOCK and 0 < rates[0] * RESTART_RATIO < row.lr:
            self._held_until = row.step + RESTART_STEPS
            rates.clear()
        rates.append(row.lr)

    def _check(self, row: JoinedStep) -> list[Finding]:
        recent = median(self._levels.recent)
        rise = self._rise(recent, row)
        if rise is None or rise.height <= rise.limit or row.step < self._held_until:
            self._high = []
            return []
        self._high.append(recent)
        if len(self._high) == 1:
            self._since = max(1, row.step - BLOCK // 2)
        how = self._lasts(rise)
        if not how:
            return []
        self._middle = rise.lowest.level + rise.limit / 2
        self._low = self._looks = 0
        self._peak, self._height = recent, rise.height
        first = self._first if self._first is not None else recent
        facts = DivergenceFacts(
            recent,
            rise.lowest.level,
            rise.lowest.step,
            self._since,
            rise.noise,
            first,
            row.lr,
            row.grad_norm,
            rise.steps,
            row.rollout,
            how == "stays" and not (rise.learned and recent >= first),
        )
        self._facts, self._severity = facts, self._severity_of(facts)
        return [_finding(facts, "raised", self._severity, row.step)]

    def _rise(self, recent: float, row: JoinedStep) -> _Rise | None:
        """Return the rise that exceeds its limit most; None: no rise, or nothing to compare with."""
        before = self._levels.before()
        if len(before) < FEWEST_BLOCKS:
            return None
        lowest = min([block.level for block in before])
        self._lowest_of_run = lowest if self._lowest_of_run is None else min(lowest, self._lowest_of_run)
        # A cheap test that ends most checks: the rise is below the level's share.
        if recent - lowest <= SHARE_OF_LEVEL * abs(lowest):
            return None
        comparable = self._levels.comparable(row.lr, FEWEST_BLOCKS)
        rises: list[_Rise] = []
        if len(comparable) >= FEWEST_BLOCKS:
            rises.append(self._measured(recent, comparable))
        if len(comparable) < len(before):
            # Compared with a lower learning rate, only a loss above the run's start counts.
            rises.append(self._measured(recent, before))
            start = ABOVE_START * abs(self._first or 0.0) + (self._first or 0.0) - rises[-1].lowest.level
            rises[-1].limit = max(rises[-1].limit, start)
        return max(rises, key=lambda rise: rise.height - rise.limit, default=None)

    def _measured(self, recent: float, reference: list[Block]) -> _Rise:
        lowest = min(reference, key=lambda block: block.level)
        level = lowest.level
        height = recent - level
        residuals = [value for block in reference for value in block.residuals]
        noise = max(spread(residuals, 0.0), tail(residuals))
        between = spread([b.level - a.level for a, b in pairwise(reference)], 0.0)
        first = self._first if self._first is not None else level
        gained = max(0.0, first - (self._lowest_of_run if self._lowest_of_run is not None else level))
        swing, blocks = self._swing(level + ONSET * height)
        learned = gained > max(LEARNED * abs(first), 2 * noise, swing)
        if learned:
            share = max(SHARE_OF_LEVEL * abs(level), min(SHARE_OF_GAIN * gained, MANY_TIMES * abs(level)))
        else:
            share = UNLEARNED * max(abs(level), abs(first))
        factor = SWING * (1 + EARLY_BLOCKS / max(1, blocks))
        limit = max(NOISE * noise, BLOCK_NOISE * between, share, factor * swing)
        return _Rise(height, limit, noise, lowest, len(reference) * BLOCK, learned)

    def _swing(self, onset: float) -> tuple[float, int]:
        """Return the largest rise of the series before it was last below ``onset``, and the number of blocks."""
        blocks = self._levels.blocks
        count = len(blocks)
        for block in reversed(blocks):
            if block.level <= onset:
                return block.largest_rise, count
            count -= 1
        return 0.0, 0

    def _lasts(self, rise: _Rise) -> Literal["", "rises", "stays"]:
        """Return how the loss has been high for long enough: still rising, or not falling; empty: it has not."""
        height, longest = self._returned
        if len(self._high) < RISING_LOOKS or (rise.height < SWING * height and len(self._high) < 2 * longest):
            return ""
        looks = self._high[2:]  # the first ones are part of the ascent
        # The scatter of the difference of two medians of BLOCK values each.
        scatter = 1.25 * spread([after - before for before, after in pairwise(looks)], 0.0)
        margin = max(0.15 * rise.height, 3 * rise.noise * 1.25 * (2 / BLOCK) ** 0.5, 3 * scatter)
        if looks[-1] - looks[0] > margin:
            return "rises"
        if len(self._high) < STAYING_LOOKS:
            return ""
        looks = self._high[-STAYING_LOOKS:]
        early, late = median(looks[: STAYING_LOOKS // 2]), median(looks[STAYING_LOOKS // 2 :])
        return "stays" if early - late < 0.1 * rise.height else ""

    def _severity_of(self, facts: DivergenceFacts) -> Severity:
        rise, lowest = facts.loss - facts.lowest, abs(facts.lowest)
        gained = facts.first_loss - (self._lowest_of_run if self._lowest_of_run is not None else facts.lowest)
        if facts.rollouts or facts.stepped or (rise < MUCH_OF_GAIN * gained and rise < 2 * lowest):
            return "info"
        return "error" if facts.loss > max(facts.first_loss, 2 * lowest) else "warning"

    def _stepped(self, recent: float, facts: DivergenceFacts) -> bool:
        """Return whether other data may still explain a loss that stepped up: briefly, and without a further rise."""
        if recent - facts.lowest > FURTHER * self._height:
            return False
        fallen = self._peak - recent > 0.25 * (self._peak - facts.lowest)
        return self._looks < STEPPED_LOOKS or fallen

    def _watch(self, row: JoinedStep, facts: DivergenceFacts) -> list[Finding]:
        recent = median(self._levels.recent)
        self._looks += 1
        self._low = self._low + 1 if recent < self._middle else 0
        self._peak = max(self._peak, recent)
        stepped = facts.stepped and self._stepped(recent, facts)
        self._facts = facts = msgspec.structs.replace(
            facts, loss=recent, lr=row.lr, grad_norm=row.grad_norm, stepped=stepped
        )
        severity = self._severity_of(facts)
        if self._low >= RISING_LOOKS:
            found = _finding(facts, "resolved", self._severity, row.step)
            height, longest = self._returned
            looks = len(self._high) + self._looks
            self._returned = max(height, self._peak - facts.lowest), max(longest, looks)
            self._facts, self._high = None, []
            # The high values must not be part of the next reference.
            self._levels = Levels()
            return [found]
        worse = _ORDER.index(severity) > _ORDER.index(self._severity)
        if worse or self._looks % UPDATE_LOOKS == 0:
            self._severity = severity if worse else self._severity
            return [_finding(facts, "updated", self._severity, row.step)]
        return []


_ORDER: tuple[Severity, ...] = ("info", "warning", "error")


def _finding(facts: DivergenceFacts, state: State, severity: Severity, step: int | None) -> Finding:
    return Finding("diverging_loss", facts, state, severity, step=step)


def _divergence(finding: Finding) -> Words:
    facts: DivergenceFacts = finding.facts
    what = "loss has risen to" if finding.severity == "info" else "loss is diverging:"
    if facts.rollouts:
        why = " The run trains on its own rollouts: the loss of a policy or value model may rise as rewards do."
    elif facts.stepped:
        why = " It rose at once and has not fallen since: other data, or a divergence."
    else:
        why = ""
    return Words(
        f"{what} {number(facts.loss)}, was {number(facts.lowest)} at step {facts.lowest_step}",
        f"Since about step {facts.since_step} the loss (median of 8 steps, mean over ranks) has been at "
        f"{number(facts.loss)}, against {number(facts.lowest)} at the lowest of the {facts.steps} steps before; single "
        f"steps scatter by {number(facts.noise)}. The run began at {number(facts.first_loss)}.{why} Learning rate "
        f"{number(facts.lr)}, gradient norm {number(facts.grad_norm)}.",
        f"If the data changed at step {facts.since_step} (curriculum, another task or shard), check the data first; "
        "otherwise resume from a checkpoint before it with a lower learning rate, a longer warm-up or tighter gradient "
        "clipping.",
        "The loss has fallen again.",
    )


_DIVERGENCE_SHOWN: dict[str, Shown] = {
    "lowest": Shown("lowest loss"),
    "lowest_step": Shown("lowest at step"),
    "noise": Shown("noise of the loss"),
    "grad_norm": Shown("gradient norm"),
    "lr": Shown("learning rate"),
    "rollouts": HIDDEN,
    "stepped": HIDDEN,
}

DIVERGENCE_KINDS = (
    Kind(
        "diverging_loss",
        DivergenceFacts,
        _divergence,
        shown=_DIVERGENCE_SHOWN,
        limits={
            "rise above the spread of single steps": f"{NOISE:g} times",
            "rise above the spread between blocks": f"{BLOCK_NOISE:g} times",
            "rise above the lowest level": f"{SHARE_OF_LEVEL:.0%}",
            "rise, of what the run had gained": f"{SHARE_OF_GAIN:.0%}",
            "checks in a row, rising": f"{RISING_LOOKS} (one every {EVERY} steps)",
            "checks in a row, staying": str(STAYING_LOOKS),
        },
    ),
)
