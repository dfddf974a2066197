"""Divergence: the loss has risen far above its recent level and does not return.

The loss of a step is the mean over ranks. The median of its last ``BLOCK`` values is compared with the blocks of the
last 384 steps with a comparable learning rate (``Levels``). A rise counts if it exceeds the lowest of them by all of

- ``NOISE`` times the spread of single steps, from the median absolute deviation or the tail (a mixture of easy and hard
  batches), and ``BLOCK_NOISE`` times that between consecutive blocks;
- ``SHARE_OF_LEVEL`` of that lowest level, and ``SHARE_OF_GAIN`` of the run's total decrease since its start; if the run
  has not learned yet (a generator, a policy), ``UNLEARNED`` times the larger of that level and the first one;
- ``SWING`` times the largest rise of the series before this one, over at most as many steps: a loss that oscillates, or
  has always risen, does not diverge. Early in a run, before all oscillations have been seen, the factor is larger.

A rise is raised if it is present at ``RISING_LOOKS`` consecutive checks (one every ``EVERY`` steps) and the loss still
rises, or at ``STAYING_LOOKS`` consecutive checks without falling. Harder data, another task, a restart of the learning
rate or a new target network raise the loss too, but then it falls or jumps back. For ``RESTART_STEPS`` after the
learning rate jumped up nothing is raised. A loss ``EXPLODED`` times that of the run's start is none of these: it is
raised at ``EXPLODED_LOOKS`` consecutive checks. After a rise was raised and resolved, another counts only if it is
higher or lasts twice as long.

The severity is only ``info``

- if less than ``MUCH_OF_GAIN`` of the decrease is lost and the level has not trebled: a growing weight of a loss term
  has the same effect;
- if the loss stepped up and stays below the run's start, or the run has not learned: other data have the same effect.
  It becomes a warning if it stays for ``STEPPED_LOOKS``, or rises further;
- if steps generate their own training data: losses of policies and values grow with rewards.

Resolved if the level falls below the middle of the rise. If one rank's rows alternate between engines, nothing is
judged.

Plateau: the loss has not fallen over the last 30 % of the run, and at least ``FEWEST_STEPS`` steps.

Information only. Raised if the medians of the two halves of that window differ by less than ``FLAT`` of the level,
and the standard error of that difference is below ``FLAT`` too. Not raised

- in the tail of a schedule: the learning rate is below ``TAIL`` of its maximum, or the plan is nearly done;
- if there is nothing left to learn: the level is below ``SOLVED`` of the first one, or not above zero.

Resolved if the level falls by 1 %.
"""

from collections import deque
from itertools import pairwise
from math import inf, isnan, nan
from statistics import median_high
from typing import Literal

import msgspec
from msgspec.structs import replace

from ...messages.control import Severity
from ..findings.finding import HIDDEN, Finding, Kind, Shown
from ..words import Words, number
from .series import BLOCK, Block, JoinedStep, Judge, Levels, spread, tail

FEWEST_BLOCKS = 5
EVERY = 4
RISING_LOOKS = 5
STAYING_LOOKS = 25
STEPPED_LOOKS = 75
EXPLODED = 100.0
EXPLODED_LOOKS = 2
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

FIRST_BLOCK = 10
MOST_BLOCKS = 512
FEWEST_STEPS = 1000
WINDOW_SHARE = 0.3
FLAT = 0.002
TAIL = 0.3
SOLVED = 0.1
PLAN_SHARE = 0.8
FALL = 0.01


class DivergenceFacts(msgspec.Struct, frozen=True):
    """The level before and after the rise, and the figures that it is compared with."""

    loss: float  # median of the last steps
    lowest: float  # median of the lowest block of the reference
    lowest_step: int
    since_step: int  # the first step of the rise
    noise: float  # robust standard deviation of single steps
    first_loss: float  # median of the run's first steps
    lr: float | None
    grad_norm: float | None
    steps: int  # steps in the reference
    rollouts: bool = False  # whether steps generate their own training data
    stepped: bool = False  # whether it rose at once to a level at which it stays, as with other data


class _Rise(msgspec.Struct):
    """Height of the loss above its reference, and the limit."""

    height: float
    limit: float
    noise: float
    lowest: Block
    steps: int
    learned: bool


class Divergence(Judge):
    """Judges the series of one run."""

    def __init__(self) -> None:
        super().__init__()
        self._levels = Levels()
        self._rates: deque[float] = deque(maxlen=BLOCK + 1)
        self._first = nan
        self._lowest_of_run = inf
        self._held_until = 0
        self._high: list[float] = []  # the loss at each check since it is high
        self._since = 0
        self._low = 0
        self._peak = self._height = 0.0
        self._returned = 0.0, 0  # maximum height and duration (in checks) of the resolved rises
        self._middle = 0.0
        self._looks = 0

    def step(self, row: JoinedStep) -> list[Finding]:
        if row.loss is None:
            return []
        self._rate(row)
        levels = self._levels
        levels.add(row.loss, row.step, row.lr)
        if levels.count == BLOCK and isnan(self._first):
            self._first = median_high(levels.recent)
        if levels.count % EVERY or levels.count < (FEWEST_BLOCKS + 1) * BLOCK:
            return []
        return self._check(row) if self.standing is None else self._watch(row, self.standing)

    def _rate(self, row: JoinedStep) -> None:
        if row.lr is None:
            return
        rates = self._rates
        if rates and self._levels.count > BLOCK and 0 < rates[0] * RESTART_RATIO < row.lr:
            self._held_until = row.step + RESTART_STEPS
            rates.clear()
        rates.append(row.lr)

    def _check(self, row: JoinedStep) -> list[Finding]:
        recent = median_high(self._levels.recent)
        rise = self._rise(recent, row)
        exploded = recent > EXPLODED * max(abs(self._first), abs(rise.lowest.level)) if rise is not None else False
        if rise is None or rise.height <= rise.limit or (row.step < self._held_until and not exploded):
            self._high = []
            return []
        self._high.append(recent)
        if len(self._high) == 1:
            self._since = max(1, row.step - BLOCK // 2)
            if exploded:
                high = rise.lowest.level + rise.limit
                self._since += next(at for at, loss in enumerate(self._levels.recent) if loss > high) - BLOCK // 2 + 1
        how = "rises" if exploded and len(self._high) >= EXPLODED_LOOKS else self._lasts(rise)
        if not how:
            return []
        self._middle = rise.lowest.level + rise.limit / 2
        self._low = self._looks = 0
        self._peak, self._height = recent, rise.height
        facts = DivergenceFacts(
            *(recent, rise.lowest.level, rise.lowest.step, self._since, rise.noise, self._first, row.lr, row.grad_norm),
            steps=rise.steps,
            rollouts=row.rollout,
            stepped=how == "stays" and not (rise.learned and recent >= self._first),
        )
        self.standing = Finding("diverging_loss", facts, "raised", self._severity_of(facts), step=row.step)
        return [self.standing]

    def _rise(self, recent: float, row: JoinedStep) -> _Rise | None:
        """Return the rise that exceeds its limit most; None: no rise, or nothing to compare with."""
        before = self._levels.before()
        if len(before) < FEWEST_BLOCKS:
            return None
        lowest = min([block.level for block in before])
        self._lowest_of_run = min(lowest, self._lowest_of_run)
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
            start = ABOVE_START * abs(self._first) + self._first
            rises[-1].limit = max(rises[-1].limit, start - rises[-1].lowest.level)
        return max(rises, key=lambda rise: rise.height - rise.limit, default=None)

    def _measured(self, recent: float, reference: list[Block]) -> _Rise:
        lowest = min(reference, key=lambda block: block.level)
        level = lowest.level
        height = recent - level
        residuals = [value for block in reference for value in block.residuals]
        noise = max(spread(residuals), tail(residuals))
        between = spread([b.level - a.level for a, b in pairwise(reference)])
        gained = max(0.0, self._first - self._lowest_of_run)
        swing, blocks = self._swing(level + ONSET * height)
        learned = gained > max(LEARNED * abs(self._first), 2 * noise, swing)
        if learned:
            share = max(SHARE_OF_LEVEL * abs(level), min(SHARE_OF_GAIN * gained, MANY_TIMES * abs(level)))
        else:
            share = UNLEARNED * max(abs(level), abs(self._first))
        factor = SWING * (1 + EARLY_BLOCKS / max(1, blocks))
        limit = max(NOISE * noise, BLOCK_NOISE * between, share, factor * swing)
        return _Rise(height, limit, noise, lowest, len(reference) * BLOCK, learned)

    def _swing(self, onset: float) -> tuple[float, int]:
        """Return the largest rise of the series before it was last below ``onset``, and the number of blocks."""
        blocks = self._levels.blocks
        found = (
            (block.largest_rise, len(blocks) - at) for at, block in enumerate(reversed(blocks)) if block.level <= onset
        )
        return next(found, (0.0, 0))

    def _lasts(self, rise: _Rise) -> Literal["", "rises", "stays"]:
        """Return how the loss has been high for long enough: still rising, or not falling; empty: it has not."""
        height, longest = self._returned
        if len(self._high) < RISING_LOOKS or (rise.height < SWING * height and len(self._high) < 2 * longest):
            return ""
        looks = self._high[2:]  # the first ones are part of the ascent
        # The scatter of the difference of two medians of BLOCK values each.
        scatter = 1.25 * spread([after - before for before, after in pairwise(looks)])
        margin = max(0.15 * rise.height, 3 * rise.noise * 1.25 * (2 / BLOCK) ** 0.5, 3 * scatter)
        if looks[-1] - looks[0] > margin:
            return "rises"
        if len(self._high) < STAYING_LOOKS:
            return ""
        looks = self._high[-STAYING_LOOKS:]
        early, late = median_high(looks[: STAYING_LOOKS // 2]), median_high(looks[STAYING_LOOKS // 2 :])
        return "stays" if early - late < 0.1 * rise.height else ""

    def _severity_of(self, facts: DivergenceFacts) -> Severity:
        rise, lowest = facts.loss - facts.lowest, abs(facts.lowest)
        gained = facts.first_loss - self._lowest_of_run
        if facts.rollouts or facts.stepped or (rise < MUCH_OF_GAIN * gained and rise < 2 * lowest):
            return "info"
        return "error" if facts.loss > max(facts.first_loss, 2 * lowest) else "warning"

    def _watch(self, row: JoinedStep, standing: Finding) -> list[Finding]:
        facts: DivergenceFacts = standing.facts
        recent = median_high(self._levels.recent)
        self._looks += 1
        self._low = self._low + 1 if recent < self._middle else 0
        self._peak = max(self._peak, recent)
        # Other data may explain a loss that stepped up only briefly, and without a further rise.
        further = recent - facts.lowest > FURTHER * self._height
        fallen = self._peak - recent > 0.25 * (self._peak - facts.lowest)
        stepped = facts.stepped and not further and (self._looks < STEPPED_LOOKS or fallen)
        facts = replace(facts, loss=recent, lr=row.lr, grad_norm=row.grad_norm, stepped=stepped)
        severity = max(standing.severity, self._severity_of(facts), key=_ORDER.index)
        self.standing = replace(standing, facts=facts, state="updated", severity=severity, step=row.step)
        if self._low >= RISING_LOOKS:
            height, longest = self._returned
            looks = len(self._high) + self._looks
            self._returned = max(height, self._peak - facts.lowest), max(longest, looks)
            # The high values must not be part of the next reference.
            self._levels, self._high = Levels(), []
            return self._end()
        return [self.standing] if severity != standing.severity or self._looks % UPDATE_LOOKS == 0 else []


_ORDER: tuple[Severity, ...] = ("info", "warning", "error")


def _divergence(facts: DivergenceFacts, finding: Finding) -> Words:
    what = "loss has risen to" if finding.severity == "info" else "loss is diverging:"
    why = ""
    if facts.rollouts:
        why = " The run trains on its own rollouts: the loss of a policy or value model may rise as rewards do."
    elif facts.stepped:
        why = " It rose at once and has not fallen since: other data, or a divergence."
    return Words(
        f"{what} {number(facts.loss)}, was {number(facts.lowest)} at step {facts.lowest_step}",
        f"Since about step {facts.since_step} the loss (median of 8 steps, mean over ranks) has been at "
        f"{number(facts.loss)}, against {number(facts.lowest)} at the lowest of the {facts.steps} steps before; single "
        f"steps scatter by {number(facts.noise)}. The run began at {number(facts.first_loss)}.{why} Learning rate "
        f"{number(facts.lr)}, gradient norm {number(facts.grad_norm)}.",
        f"If the data changed at step {facts.since_step} (curriculum, another task or shard), check the data first; "
        # The loss of a step is that of the weights before its update.
        f"otherwise resume from a checkpoint before step {max(1, facts.since_step - 1)} with a lower learning rate, a "
        "longer warm-up or tighter gradient clipping.",
        "The loss has fallen again.",
    )


class PlateauFacts(msgspec.Struct, frozen=True):
    """The level, its start, and related figures."""

    loss: float
    improvement: float  # median of the window's first half minus that of its second
    since_step: int
    steps: int
    first_loss: float
    lr: float | None
    never_fell: bool  # whether the level is still that of the run's start


class Plateau(Judge):
    """Judges the series of one run, in at most ``MOST_BLOCKS`` blocks of growing size."""

    def __init__(self) -> None:
        super().__init__()
        self._begin()
        self._first: float | None = None  # level of the run's first blocks, kept after a plateau is resolved
        self._at = 0
        self._lr: float | None = None
        self._top_lr = 0.0

    def _begin(self) -> None:
        self._size = FIRST_BLOCK
        self._blocks: list[float] = []
        self._block: list[float] = []
        self._began: list[int] = []

    def step(self, row: JoinedStep, total_steps: int) -> list[Finding]:
        """Process one step of the run, of ``total_steps`` (0: unknown)."""
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
        self._blocks.append(median_high(self._block))
        self._began.append(self._at)
        self._block = []
        if len(self._blocks) >= MOST_BLOCKS:
            self._size *= 2
            self._blocks = [(a + b) / 2 for a, b in zip(self._blocks[::2], self._blocks[1::2], strict=True)]
            self._began = self._began[::2]
        if self.standing is None:
            return self._check(row, total_steps)
        loss = self.standing.facts.loss
        if median_high(self._blocks[-10:]) >= loss - FALL * abs(loss):
            return []
        self._begin()
        return self._end()

    def _check(self, row: JoinedStep, total_steps: int) -> list[Finding]:
        blocks = self._blocks
        count = max(-(-FEWEST_STEPS // self._size), int(WINDOW_SHARE * len(blocks)))
        if len(blocks) < count + 2 or len(blocks) % 4:
            return []
        if self._first is None:
            self._first = median_high(blocks[:3])
        window = blocks[-count:]
        early, late = window[: count // 2], window[count // 2 :]
        level, before, first = median_high(late), median_high(early), self._first
        in_tail = (self._lr is not None and self._lr < TAIL * self._top_lr) or 0 < PLAN_SHARE * total_steps < row.step
        if level <= 0 or level < SOLVED * first or in_tail:
            return []
        error = 1.25 * spread(late, level) * (2 / len(late)) ** 0.5
        if abs(before - level) > FLAT * level or error > FLAT * level:
            return []
        since = self._began[-count]
        facts = PlateauFacts(level, before - level, since, row.step - since + 1, first, self._lr, level > 0.98 * first)
        self.standing = Finding("loss_plateau", facts, severity="info", step=row.step)
        return [self.standing]


def _plateau(facts: PlateauFacts, _: Finding) -> Words:
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
        "diverging_loss",
        DivergenceFacts,
        _divergence,
        shown={
            "lowest": Shown("lowest loss"),
            "lowest_step": Shown("lowest at step"),
            "noise": Shown("noise of the loss"),
            "grad_norm": Shown("gradient norm"),
            "lr": Shown("learning rate"),
            "rollouts": HIDDEN,
            "stepped": HIDDEN,
        },
        limits={
            "rise above the spread of single steps": f"{NOISE:g} times",
            "rise above the spread between blocks": f"{BLOCK_NOISE:g} times",
            "rise above the lowest level": f"{SHARE_OF_LEVEL:.0%}",
            "rise, of what the run had gained": f"{SHARE_OF_GAIN:.0%}",
            "checks in a row, rising": f"{RISING_LOOKS} (one every {EVERY} steps)",
            "checks in a row, staying": str(STAYING_LOOKS),
            f"or above {EXPLODED:g} times the run's start": f"{EXPLODED_LOOKS} checks in a row",
        },
    ),
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
