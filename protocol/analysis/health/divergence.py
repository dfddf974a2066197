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
from itertools import pairwise
from typing import Literal

import msgspec

from ...messages.control import Severity
from ..findings import Finding, State
from ..findings.kind import HIDDEN, Kind, Shown
from ..text.words import Words, number
from .joined import JoinedStep
from .levels import BLOCK, Block, Levels
from .recent import median, spread, tail

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


_SHOWN: dict[str, Shown] = {
    "lowest": Shown("lowest loss"),
    "lowest_step": Shown("lowest at step"),
    "noise": Shown("noise of the loss"),
    "grad_norm": Shown("gradient norm"),
    "lr": Shown("learning rate"),
    "rollouts": HIDDEN,
    "stepped": HIDDEN,
}

KINDS = (
    Kind(
        "diverging_loss",
        DivergenceFacts,
        _divergence,
        shown=_SHOWN,
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
