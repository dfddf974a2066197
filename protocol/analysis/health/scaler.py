"""The fp16 loss scaler: overflows at its minimum scale, or frequently skipped updates.

A scaler starts far too high and skips its first updates on purpose, so nothing is judged until ``SETTLED`` consecutive
steps were not skipped (or ``SEARCH_STEPS`` steps have passed). After that it skips one update in a thousand or two.
Raised if ``SKIPPED`` of the last ``WINDOW`` updates were skipped, as ``scaler_floor`` if the scale is at most
``floor``. Resolved after ``WINDOW`` updates without a skip.
"""

from collections import deque

import msgspec

from ..findings import Finding, State
from ..findings.kind import Kind, Shown
from ..text.words import Words, number
from .joined import JoinedStep

WINDOW = 30
SKIPPED = 6
SETTLED = 10
SEARCH_STEPS = 60
FLOOR = 1.0


class ScalerFacts(msgspec.Struct, frozen=True):
    """The number of skipped updates, and the scale."""

    loss_scale: float | None
    floor: float
    skipped: int
    window: int
    skipped_in_all: int
    since_step: int


class Scaler:
    """Judges the updates of one run."""

    def __init__(self, floor: float = FLOOR) -> None:
        self.floor = floor
        self._last: deque[bool] = deque(maxlen=WINDOW)
        self._seen = self._in_row = self._in_all = 0
        self._settled = False
        self._scale: float | None = None
        self._since = 0
        self._standing: tuple[str, ScalerFacts] | None = None

    def step(self, row: JoinedStep) -> list[Finding]:
        """Process one step of the run."""
        if row.loss_scale is not None:
            self._scale = row.loss_scale
        if not row.overflow and not self._in_all:
            self._seen += 1
            self._in_row += 1
            self._settled = self._settled or self._in_row >= SETTLED
            return []
        self._seen += 1
        self._in_row = 0 if row.overflow else self._in_row + 1
        self._in_all += row.overflow
        if not self._settled:
            self._settled = self._in_row >= SETTLED or self._seen >= SEARCH_STEPS
            return []
        self._last.append(row.overflow)
        skipped = sum(self._last)
        if row.overflow and skipped == 1:
            self._since = row.step
        if self._standing is not None:
            return self._watch(row, skipped)
        if skipped < SKIPPED:
            return []
        at_floor = self._scale is not None and self._scale <= self.floor
        facts = ScalerFacts(self._scale, self.floor, skipped, len(self._last), self._in_all, self._since)
        self._standing = ("scaler_floor" if at_floor else "scaler_skipping"), facts
        return [_finding(*self._standing, "raised", row.step)]

    def reset(self) -> list[Finding]:
        """Reset; return the resolved finding, if any."""
        standing, floor = self._standing, self.floor
        self.__init__(floor)
        return [_finding(*standing, "resolved", None)] if standing is not None else []

    def _watch(self, row: JoinedStep, skipped: int) -> list[Finding]:
        assert self._standing is not None
        kind, facts = self._standing
        if self._in_row >= WINDOW:
            self._standing = None
            return [_finding(kind, facts, "resolved", row.step)]
        if kind == "scaler_skipping" and self._scale is not None and self._scale <= self.floor and skipped >= SKIPPED:
            worse = ScalerFacts(self._scale, self.floor, skipped, len(self._last), self._in_all, self._since)
            self._standing = "scaler_floor", worse
            return [_finding(kind, facts, "resolved", row.step), _finding("scaler_floor", worse, "raised", row.step)]
        return []


def _finding(kind: str, facts: ScalerFacts, state: State, step: int | None) -> Finding:
    severity = "error" if kind == "scaler_floor" else "warning"
    return Finding(kind, facts, state, severity, step=step)


def _scaler(finding: Finding) -> Words:
    facts: ScalerFacts = finding.facts
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


_SHOWN: dict[str, Shown] = {
    "floor": Shown("lowest loss scale"),
    "skipped": Shown("steps skipped"),
    "skipped_in_all": Shown("steps skipped so far"),
    "window": Shown("measured over", "steps"),
}

_LIMITS = {"updates skipped": f"{SKIPPED} of {WINDOW}"}
KINDS = (
    Kind("scaler_floor", ScalerFacts, _scaler, shown=_SHOWN, limits=_LIMITS),
    Kind("scaler_skipping", ScalerFacts, _scaler, limits=_LIMITS),
)
