"""Gradient norm explosion and collapse, from logarithms, because norms of healthy runs vary by factors.

Explosion: in ``EXPLODED_STEPS`` of the last ``EXPLODED_WINDOW`` steps the norm is ``RATIO`` times the median of the
``REFERENCE`` steps before, above it by ``SIGMAS`` of their spread, and ``RATIO_OF_TAIL`` times their 95th percentile;
clipping handles single spikes and a few in a row. Collapse: for ``COLLAPSED_STEPS`` consecutive steps it is below a
thousandth of that median (and below it by as many sigmas, and below the 5th percentile), while the loss is not near
zero too. Resolved after ``FINE_STEPS`` consecutive steps within the square root of the limits. A resolved explosion
counts as usual for this run (a second task, a wandering source of data): another is raised only if it is
``RATIO_AGAIN`` times as high, or lasts twice as long.

The fp16 loss scaler: overflows at its minimum scale, or frequently skipped updates.

A scaler starts far too high and skips its first updates on purpose, so nothing is judged until ``SETTLED``
consecutive steps were not skipped (or ``SEARCH_STEPS`` steps have passed). After that it skips one update in a
thousand or two. Raised if ``SKIPPED`` of the last ``WINDOW`` updates were skipped, as ``scaler_floor`` if the scale
is at most ``floor``. Resolved after ``WINDOW`` updates without a skip.
"""

import math
from collections import deque
from statistics import median_high
from typing import Literal

import msgspec

from ..findings.finding import Finding, Kind, Shown
from ..words import Words, number
from .series import JoinedStep, Judge, spread

REFERENCE = 200
FEWEST = 40
WARM_UP = 10
RATIO = 10.0
SIGMAS = 6.0
LEAST_SIGMA = 0.1  # minimum spread, in natural logarithms, for norms that vary by only a few percent
RATIO_OF_TAIL = 3.0
RATIO_AGAIN = 3.0
FEW = 5
EXPLODED_STEPS = 10
EXPLODED_WINDOW = 12
COLLAPSE = 1e-3
COLLAPSED_STEPS = 20
SOLVED = 0.05
FINE_STEPS = 10
_ZERO = 1e-30
_LOG_RATIO, _LOG_TAIL, _LOG_COLLAPSE = math.log(RATIO), math.log(RATIO_OF_TAIL), math.log(COLLAPSE)

WINDOW = 30
SKIPPED = 6
SETTLED = 10
SEARCH_STEPS = 60
FLOOR = 1.0


class GradientFacts(msgspec.Struct, frozen=True):
    """The norm now and before."""

    grad_norm: float  # median over the steps of the finding
    usual: float  # median of the reference
    ratio: float
    since_step: int
    steps: int  # number of such steps when it was raised
    loss: float | None
    lr: float | None


class _Explosion:
    """Recent steps with a high norm."""

    def __init__(self) -> None:
        self.window: deque[tuple[int, float] | None] = deque(maxlen=EXPLODED_WINDOW)
        """Step and logarithm of each high norm; None for the others."""
        self.steps = 0  # number of high norms since the last `FINE_STEPS` consecutive normal ones
        self.peak = 0.0  # the highest of them above the median, as a logarithm
        self.fine = 0
        self.standing = False
        self.returned = 0.0, 0  # maximum `peak` and `steps` of the resolved explosions

    def add(self, step: int, log: float, above: float | None) -> None:
        """Append a step; ``above`` is its height above the median if that is too high, else None."""
        self.window.append(None if above is None else (step, log))
        if above is not None:
            self.fine = 0
            self.steps += 1
            self.peak = max(self.peak, above)
            return
        self.fine += 1
        if self.fine >= FINE_STEPS and not self.standing:
            self.steps, self.peak = 0, 0.0

    def found(self) -> list[tuple[int, float]]:
        """Return the high steps of the window if they are an explosion, else an empty list."""
        high = [one for one in self.window if one is not None]
        peak, steps = self.returned
        usual = steps and self.peak < peak + math.log(RATIO_AGAIN) and self.steps < 2 * steps
        return [] if len(high) < EXPLODED_STEPS or usual else high

    def end(self) -> None:
        """End the detected explosion; keep its height and length as usual for this run."""
        peak, steps = self.returned
        self.returned = max(peak, self.peak), max(steps, self.steps)
        self.standing = False


class Gradients:
    """Judges the series of one run."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=REFERENCE)
        self._seen = 0
        self._odd: list[float] = []  # logarithms of the latest consecutive norms that are too high, or too low
        self._odd_way: Literal["", "up", "down"] = ""
        self._odd_since = 0
        self._up = _Explosion()
        self._first_loss: float | None = None
        self._standing: dict[str, tuple[Finding, float]] = {}  # finding and median of the reference, by direction
        self._fine = 0
        self._middle = 0.0
        self._sigma = 0.0
        self._low = self._high = 0.0
        self._judged_at = -1

    def step(self, row: JoinedStep) -> list[Finding]:
        if row.loss is not None and self._first_loss is None:
            self._first_loss = row.loss
        norm = row.grad_norm
        if norm is None or norm < 0 or row.overflow or row.unlabelled:
            return []
        self._seen += 1
        if self._seen <= WARM_UP:
            return []
        log = math.log(max(norm, _ZERO))
        if len(self._logs) < FEWEST:
            if norm > 0:
                self._logs.append(log)
            return []
        self._measure()
        way = self._way(log)
        found = self._resolve(log, row) if self._standing else []
        self._up.add(row.step, log, log - self._middle if way == "up" else None)
        if way != self._odd_way and len(self._odd) < FEW:
            self._logs.extend(self._odd)  # a few in a row are usual for this run
        if not way:
            self._odd, self._odd_way = [], ""
            self._logs.append(log)
            return found
        if way != self._odd_way:
            self._odd, self._odd_way, self._odd_since = [], way, row.step
        self._odd.append(log)
        if len(self._odd) > REFERENCE:
            # A change that lasts as long as the reference becomes the new reference.
            self._logs.append(log)
        return found if way in self._standing else found + self._found(way, row)

    def reset(self) -> list[Finding]:
        """Reset; return the resolved findings."""
        found = [finding.over() for finding, _ in self._standing.values()]
        self.__init__()
        return found

    def _measure(self) -> None:
        """Update median and spread of the reference every 8 steps, because it changes slowly."""
        if self._judged_at >= 0 and self._seen - self._judged_at < 8:
            return
        self._judged_at = self._seen
        ordered = sorted(self._logs)
        self._middle = ordered[len(ordered) // 2]
        self._sigma = max(LEAST_SIGMA, spread(ordered, self._middle))
        self._low, self._high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]

    def _way(self, log: float) -> Literal["", "up", "down"]:
        above = log - self._middle
        if above > _LOG_RATIO and above > SIGMAS * self._sigma and log > self._high + _LOG_TAIL:
            return "up"
        if -above > -_LOG_COLLAPSE and -above > SIGMAS * self._sigma and log < self._low - _LOG_TAIL:
            return "down"
        return ""

    def _found(self, way: str, row: JoinedStep) -> list[Finding]:
        if way == "up":
            high = self._up.found()
            self._up.standing = bool(high)
            return self._raise("up", high[0][0], [log for _, log in high], row) if high else []
        solved = row.loss is not None and self._first_loss is not None and row.loss <= SOLVED * self._first_loss
        return (
            [] if solved or len(self._odd) != COLLAPSED_STEPS else self._raise("down", self._odd_since, self._odd, row)
        )

    def _raise(self, way: str, since: int, logs: list[float], row: JoinedStep) -> list[Finding]:
        norm, usual = math.exp(median_high(logs)), math.exp(self._middle)
        shown = 0.0 if norm <= 2 * _ZERO else norm
        facts = GradientFacts(shown, usual, norm / usual, since, len(logs), row.loss, row.lr)
        found = Finding("gradient_explosion" if way == "up" else "gradient_collapse", facts, step=row.step)
        self._standing[way] = found, self._middle
        self._fine = 0
        return [found]

    def _resolve(self, log: float, row: JoinedStep) -> list[Finding]:
        found: list[Finding] = []
        for way, (finding, middle) in list(self._standing.items()):
            back = log - middle < _LOG_RATIO / 2 if way == "up" else middle - log < -_LOG_COLLAPSE / 2
            self._fine = self._fine + 1 if back else 0
            if self._fine >= FINE_STEPS:
                del self._standing[way]
                found.append(finding.over())
                if way == "up":
                    self._up.end()
        return found


def _gradient(facts: GradientFacts, finding: Finding) -> Words:
    rate = f" Loss {number(facts.loss)}, learning rate {number(facts.lr)}."
    over = "The norm is back to normal."
    if finding.kind == "gradient_explosion":
        return Words(
            f"gradient norm {number(facts.grad_norm)}, usually {number(facts.usual)}",
            f"Since step {facts.since_step} it was {facts.ratio:.0f} times its usual size in {facts.steps} "
            f"steps (before clipping).{rate}",
            "Lower the learning rate or clip gradients at a small multiple of the usual norm; a rise in loss that "
            "follows calls for a checkpoint before that step.",
            over,
        )
    return Words(
        f"gradient norm has collapsed to {number(facts.grad_norm)}, usually {number(facts.usual)}",
        f"Since step {facts.since_step}, for {facts.steps} steps in a row, the parameters have received almost no "
        f"gradient.{rate}",
        "Check for activations that are saturated or all zero, a loss that is detached or fully masked, parameters "
        "frozen during the run, fp16 gradients that underflow (use a loss scale, or bf16).",
        over,
    )


class ScalerFacts(msgspec.Struct, frozen=True):
    """The number of skipped updates, and the scale."""

    loss_scale: float | None
    floor: float
    skipped: int
    window: int
    skipped_in_all: int
    since_step: int


class Scaler(Judge):
    """Judges the updates of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = FLOOR
        self._last: deque[bool] = deque(maxlen=WINDOW)
        self._seen = self._in_row = self._in_all = 0
        self._settled = False
        self._scale: float | None = None
        self._since = 0

    def step(self, row: JoinedStep) -> list[Finding]:
        if row.loss_scale is not None:
            self._scale = row.loss_scale
        self._seen += 1
        self._in_row = 0 if row.overflow else self._in_row + 1
        self._in_all += row.overflow
        if not self._in_all:
            self._settled = self._settled or self._in_row >= SETTLED
            return []
        if not self._settled:
            self._settled = self._in_row >= SETTLED or self._seen >= SEARCH_STEPS
            return []
        self._last.append(row.overflow)
        skipped = sum(self._last)
        if row.overflow and skipped == 1:
            self._since = row.step
        if self.standing is not None and self._in_row >= WINDOW:
            return self._end()
        at_floor = self._scale is not None and self._scale <= self.floor
        worse = self.standing is not None and self.standing.kind == "scaler_skipping" and at_floor
        if skipped < SKIPPED or not (self.standing is None or worse):
            return []
        found = self._end()
        facts = ScalerFacts(self._scale, self.floor, skipped, len(self._last), self._in_all, self._since)
        kind, severity = ("scaler_floor", "error") if at_floor else ("scaler_skipping", "warning")
        self.standing = Finding(kind, facts, "raised", severity, step=row.step)
        return [*found, self.standing]


def _scaler(facts: ScalerFacts, finding: Finding) -> Words:
    scale = f"at a loss scale of {number(facts.loss_scale)}" if facts.loss_scale is not None else "by the loss scaler"
    counted = f"{facts.skipped} of the last {facts.window} updates were skipped {scale}"
    remedy = (
        "Use bf16 where the device has it; otherwise look for the operation that overflows in fp16 (attention scores, "
        "a loss summed over tokens) and compute it in fp32, lower the learning rate, clip gradients."
    )
    if finding.kind == "scaler_floor":
        return Words(
            f"loss scale is at its floor, {number(facts.loss_scale)}, and updates still overflow",
            f"{counted}, {facts.skipped_in_all} in all. The scale cannot go lower: the gradients themselves are "
            "infinite, and the run does not learn.",
            remedy,
            "Updates are applied again.",
        )
    return Words(
        f"the loss scaler skips updates: {facts.skipped} of the last {facts.window}",
        f"{counted}, since step {facts.since_step}, {facts.skipped_in_all} in all. A stable loss scaler skips about "
        "one update in a thousand.",
        remedy,
        "Updates are applied again.",
    )


_SCALER_LIMITS = {"updates skipped": f"{SKIPPED} of {WINDOW}"}
KINDS = (
    Kind(
        "gradient_explosion",
        GradientFacts,
        _gradient,
        shown={"usual": Shown("usual gradient norm")},
        limits={
            f"above the median of {REFERENCE} steps": f"{RATIO:g} times",
            "in how many steps": f"{EXPLODED_STEPS} of {EXPLODED_WINDOW}",
        },
    ),
    Kind(
        "gradient_collapse",
        GradientFacts,
        _gradient,
        limits={
            f"of the median of {REFERENCE} steps": f"below {COLLAPSE:g}",
            "in how many steps": f"{COLLAPSED_STEPS} in a row",
        },
    ),
    Kind(
        "scaler_floor",
        ScalerFacts,
        _scaler,
        shown={
            "floor": Shown("lowest loss scale"),
            "skipped": Shown("steps skipped"),
            "skipped_in_all": Shown("steps skipped so far"),
            "window": Shown("measured over", "steps"),
        },
        limits=_SCALER_LIMITS,
    ),
    Kind("scaler_skipping", ScalerFacts, _scaler, limits=_SCALER_LIMITS),
)
