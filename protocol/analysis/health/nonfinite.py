"""NaN and infinite losses and gradient norms: first rank, first step, the last good values.

Raised at the first one in a step whose update the loss scaler did not skip: skipped updates with an infinite norm are
part of dynamic loss scaling. It is delayed until all ranks have reported that step, at most ``WAIT_SECONDS``, because
the report of the rank of origin may arrive last. Resolved after ``CLEAN_STEPS`` finite steps of every affected rank.
"""

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, NamedTuple

import msgspec

from ...messages.telemetry import Step
from ...text import all_ranks
from ..findings.finding import Finding, Kind, Shown, State
from ..words import Words, high_rate, number

CLEAN_STEPS = 20
WAIT_SECONDS = 5.0
UPDATE_STEPS = 50  # an active finding is sent again after this many further steps with such a value
KEPT_STEPS = 64
"""Number of finite steps kept per rank, to compare with another rank's non-finite step and find the last good one."""
OUT_OF_RANGE = 10.0  # a finite loss this many times above the median of the steps kept has left its range
UNEXAMINED = 16
"""Steps after one without labels whose labels may not have been examined: the probe first learns of that one."""


class NonFiniteFacts(msgspec.Struct, frozen=True):
    """Origin of the first non-finite value."""

    value: str  # `nan`, `inf` or `-inf`
    first_rank: int  # the rank of `first_ranks` that reported first; the last good values are its own
    first_ranks: tuple[int, ...]
    """Ranks with such a value in the first step; all ranks if gradients are reduced before the norm is computed."""
    first_step: int
    last_good_step: int | None  # the last earlier step of that rank with a finite value; None: none
    last_good_loss: float | None
    last_good_grad_norm: float | None
    lr: float | None
    steps: int  # steps with such a value so far, over all ranks
    ranks_total: int
    finite_elsewhere: bool  # whether other ranks were finite in that step: its batch or device is the origin
    precision: str = ""
    last_good_lr: float | None = None
    all_ranks: bool = False  # whether all ranks had one in the first step: the update before it is the suspect


class _Good(NamedTuple):
    step: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None


@dataclass(slots=True)
class _Rank:
    step: int = -1  # its latest step
    good: deque[_Good] = field(default_factory=lambda: deque[_Good](maxlen=KEPT_STEPS))  # latest finite steps
    clean: int = 0
    bad: bool = False
    unlabelled: int = -UNEXAMINED - 1  # the latest step with a micro-batch without labels

    def last_good(self) -> _Good:
        """Return the last step before its loss left its range."""
        losses = sorted(good.loss for good in self.good if good.loss is not None)
        highest = OUT_OF_RANGE * abs(losses[len(losses) // 2]) if losses else 0.0
        within = [good for good in self.good if good.loss is None or good.loss <= highest]
        return (within or [_Good(), *self.good])[-1]


class _Case:
    """The steps with a non-finite value, from the first one."""

    def __init__(self, step: Step, precision: str) -> None:
        self.lr = step.lr
        self.since = step.started + step.host_us / 1e6  # end of its first step
        self.precision = precision
        self.steps = 0
        self.ranks: set[int] = set()
        self.raised = False

    def begin(self, step: Step, rank: _Rank, value: float) -> None:
        """Set the first step."""
        self.first_rank, self.first_step, self.value = step.rank, step.step, repr(float(value))
        self.good = rank.last_good()
        self.first_ranks: set[int] = set()
        self.finite_elsewhere = False  # stored, because the ranks' good steps are kept for `KEPT_STEPS` only


class NonFinite:
    """Detects non-finite values of ``loss`` or ``grad_norm``."""

    def __init__(self, what: Literal["loss", "grad_norm"]) -> None:
        self._what = what
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._case: _Case | None = None
        self._explained_by = inf
        """The step after which weights were not finite although no loss was: another finding tells that."""

    def step(self, step: Step, precision: str = "", ranks: Collection[int] = ()) -> list[Finding]:
        """Process one rank's step; the finding waits for the reports of ``ranks``, which still train."""
        rank = self._ranks[step.rank]
        rank.step = step.step
        value = self._value_of(step)
        found: list[Finding] = []
        signs = step.signs
        if signs is not None and self._what == "loss":
            if signs.weights == "nan" and value is not None and isfinite(value):
                self._explained_by = min(self._explained_by, step.step)
            if signs.weights_lost and rank.good:
                self._explained_by = min(self._explained_by, rank.good[-1].step or 0)
            if signs.unlabelled:
                rank.unlabelled = step.step
        if value is not None and not isfinite(value) and step.step - rank.unlabelled <= UNEXAMINED:
            value = None  # a mean over no labels, which another finding tells
        if value is not None and isfinite(value):
            rank.good.append(_Good(step.step, step.loss, step.grad_norm, step.lr))
            if rank.bad:
                found = self._clean(rank)
        elif value is not None and not step.overflow and step.step <= self._explained_by:
            found = self._bad(step, rank, value, precision)
        return found if self._case is None else found + self.raise_complete(ranks)

    def raise_complete(self, ranks: Collection[int]) -> list[Finding]:
        """Raise a delayed finding if all of ``ranks`` have reported its step."""
        case = self._case
        if case is None or case.raised or any(self._ranks[rank].step < case.first_step for rank in ranks):
            return []
        return self._raise(case)

    def tick(self, now: float) -> list[Finding]:
        """Raise a finding that has waited ``WAIT_SECONDS`` for a rank."""
        case = self._case
        return self._raise(case) if case is not None and not case.raised and now - case.since >= WAIT_SECONDS else []

    def _raise(self, case: _Case) -> list[Finding]:
        case.raised = True
        return self._finding(case, "raised")

    def _value_of(self, step: Step) -> float | None:
        """Return the figure of a step; with several engines the first non-finite one, if any."""
        value: float | None = getattr(step, self._what)
        if not step.updates or (value is not None and not isfinite(value)):
            return value
        # Updates skipped by their scaler do not count.
        of_each = [getattr(one, self._what) for one in step.updates if not one.overflow]
        return next((one for one in of_each if one is not None and not isfinite(one)), value)

    def reset(self) -> list[Finding]:
        """Reset for another job; return the resolved finding, if any."""
        case, self._case, self._explained_by = self._case, None, inf
        self._ranks.clear()
        return self._finding(case, "resolved") if case is not None and case.raised else []

    def _bad(self, step: Step, rank: _Rank, value: float, precision: str) -> list[Finding]:
        rank.clean, rank.bad = 0, True
        case = self._case
        if case is None:
            case = self._case = _Case(step, precision)
            case.begin(step, rank, value)
        known = step.rank in case.ranks
        case.ranks.add(step.rank)
        case.steps += 1
        if step.step < case.first_step:  # another rank's message arrived later
            case.begin(step, rank, value)
            known = False
        if step.step == case.first_step:
            case.first_ranks.add(step.rank)
        return self._finding(case, "updated") if case.raised and (not known or case.steps % UPDATE_STEPS == 0) else []

    def _clean(self, rank: _Rank) -> list[Finding]:
        rank.clean += 1
        rank.bad = rank.clean < CLEAN_STEPS
        case = self._case
        if case is None or any(one.bad for one in self._ranks.values()):
            return []
        self._case = None
        return self._finding(case, "resolved") if case.raised else []

    def _finding(self, case: _Case, state: State) -> list[Finding]:
        ranks = self._ranks.values()
        case.finite_elsewhere |= any(good.step == case.first_step for rank in ranks for good in rank.good)
        total = sum(rank.bad or bool(rank.good) for rank in ranks)
        step, loss, grad_norm, lr = case.good
        first = tuple(sorted(case.first_ranks))
        facts = NonFiniteFacts(
            *(case.value, case.first_rank, first, case.first_step, step, loss, grad_norm, case.lr, case.steps, total),
            *(case.finite_elsewhere, case.precision, lr, total == len(first) > 1),
        )
        kind = "nan_loss" if self._what == "loss" else "nan_gradient"
        return [Finding(kind, facts, state, "error", tuple(sorted(case.ranks)), step=case.first_step)]


def _nan(facts: NonFiniteFacts, finding: Finding) -> Words:
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
    # A checkpoint of a step has its update: of a suspect one, the checkpoint before it is the last good one.
    good_until = (facts.last_good_step or 0) - (facts.all_ranks or bool(left))
    until = f"of step {good_until:,} or earlier" if good_until > 0 else "before that step"
    at, lower = high_rate(facts.lr)
    return Words(
        f"{value} {what} on {who} since step {facts.first_step}{at}",
        f"{good}, {rate}{left}.{others}",
        lower
        + _REMEDIES[finding.kind].format(until)
        + (" bf16 has a larger range than fp16." if facts.precision == "fp16" else ""),
        "It has been finite on every rank since.",
    )


_REMEDIES = {
    "nan_loss": "Stop, and resume from a checkpoint {}: parameters that are NaN stay NaN. Check that "
    "batch (labels all masked, empty rows, values out of range), lower the learning rate or lengthen its warm-up, clip "
    "gradients; torch.autograd.set_detect_anomaly(True) names the operation.",
    "nan_gradient": "Clip gradients, and skip updates whose norm is not finite; check that batch. The usual cause is a "
    "division or a logarithm near zero; torch.autograd.set_detect_anomaly(True) names the operation.",
}
_LIMITS = {"finite steps on every rank that resolve it": str(CLEAN_STEPS)}
_SHOWN = {
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
KINDS = tuple(Kind(name, NonFiniteFacts, _nan, shown=_SHOWN, limits=_LIMITS) for name in _REMEDIES)
