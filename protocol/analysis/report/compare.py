"""Compares two runs, or two sweeps: differences in relation to the noise of both.

The gate is the size of regression that must be found. The alarm is raised from half of it on, if the difference is also
significant: with a standard error of at most 0.3 gates, a regression of one gate is missed in 1 of 20 cases, and equal
runs raise the alarm in 1 of 20. With more noise the result is "cannot tell".
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal

import msgspec

from ..sweep.figures import RESIDENT_ERROR

FALSE_ALARMS = 0.05
"""Share of comparisons of equal runs that raise an alarm, over all gated figures together."""
_NOISE_SHARE = 0.3

Judgement = Literal["same", "worse", "better", "cannot tell"]


class Measure(msgspec.Struct, frozen=True):
    """One figure of a run."""

    value: float
    error: float = 0.0
    """Standard error, in the unit of the value; 0: unknown, or an exact counter."""
    unit: Literal["bytes", "ms", "tokens/s", "loss"] = "bytes"
    gated: bool = False
    """Whether the gate checks it."""

    @property
    def higher_is_better(self) -> bool:
        """True for throughput only."""
        return self.unit == "tokens/s"


class StepRange(msgspec.Struct, frozen=True):
    """The common steps of two runs, over which all their figures are compared."""

    first: int
    last: int
    before_last: int
    """The first run's last step."""
    after_last: int
    evaluation: int | None = None
    """Step of the last evaluation that both runs have; None: none."""


class Side(msgspec.Struct, frozen=True):
    """One of the two runs (or configurations of sweeps)."""

    name: str
    measures: dict[str, Measure]
    """By name: ``step time``, ``backward peak`` ..."""
    settings: dict[str, str] = {}
    """Configuration and versions, flat."""
    alerts: dict[str, int] = {}
    """Number of alerts by kind."""
    verdict: str = "done"


class Difference(msgspec.Struct, frozen=True):
    """One figure of both sides."""

    name: str
    before: Measure
    after: Measure
    change: float
    """As a share of the first; 0.03 for 3 % more."""
    error: float
    """Standard error of the change, also as a share."""
    judgement: Judgement
    gated: bool


class Comparison(msgspec.Struct, frozen=True):
    """The differences of two sides."""

    before: str
    after: str
    differences: list[Difference]
    settings: list[tuple[str, str, str]]
    """Keys that differ: key, before, after."""
    alerts: list[tuple[str, int, int]]
    """Kinds whose counts differ."""
    missing: list[str]
    """Figures that only one side has."""
    regressions: list[str]
    """Regressions that exceed the gate, as text; empty: none, or no gate."""
    undecided: list[str]
    """Gated figures whose noise is too large for the gate."""
    steps: StepRange | None = None
    """None for sweeps."""


def compare(before: Side, after: Side, gate: float | None = None, tests: int = 0) -> Comparison:
    """Return the differences of two sides.

    Args:
        gate: regression that must be found, as a share; None: no alarm.
        tests: number of noisy gated figures in all comparisons made together; 0: those of this one.
    """
    names = [name for name in before.measures if name in after.measures]
    z = z_for(tests or noisy(before, after))
    found = [_difference(name, before.measures[name], after.measures[name], gate, z) for name in names]
    regressions = [f"{one.name} {one.change:+.1%}" for one in found if one.gated and one.judgement == "worse"]
    if before.verdict == "done" and after.verdict != "done":
        regressions.insert(0, f"{after.verdict}, was done")
    return Comparison(
        before.name,
        after.name,
        found,
        _settings(before.settings, after.settings),
        [
            (kind, before.alerts.get(kind, 0), after.alerts.get(kind, 0))
            for kind in sorted({*before.alerts, *after.alerts})
            if before.alerts.get(kind, 0) != after.alerts.get(kind, 0)
        ],
        sorted(before.measures.keys() ^ after.measures.keys()),
        regressions if gate is not None else [],
        [one.name for one in found if one.gated and one.judgement == "cannot tell"] if gate is not None else [],
    )


def noisy(before: Side, after: Side) -> int:
    """Count the gated figures of a comparison that have noise."""
    both = [(one, after.measures[name]) for name, one in before.measures.items() if name in after.measures]
    return max(1, sum(one.gated and bool(one.error or other.error) for one, other in both))


def z_for(tests: int) -> float:
    """Return the number of standard errors that is significant in ``tests`` tests (Bonferroni's correction)."""
    return NormalDist().inv_cdf(1 - FALSE_ALARMS / max(1, tests))


def _difference(name: str, before: Measure, after: Measure, gate: float | None, z: float) -> Difference:
    if not before.value:
        return Difference(name, before, after, 0.0, 0.0, "same" if not after.value else "cannot tell", False)
    change = (after.value - before.value) / abs(before.value)
    error = math.hypot(before.error, after.error) / abs(before.value)
    worse = -change if before.higher_is_better else change
    gated = before.gated and after.gated
    return Difference(name, before, after, change, error, _judge(worse, error, gate if gated else None, z), gated)


def _judge(worse: float, error: float, gate: float | None, z: float) -> Judgement:
    certain = abs(worse) > z * error and abs(worse) > 1e-9
    if gate is None:
        return ("worse" if worse > 0 else "better") if certain else "same"
    if worse >= gate / 2 and certain:
        return "worse"
    if error > _NOISE_SHARE * gate and worse + z * error >= gate / 2:
        return "cannot tell"
    return "better" if worse <= -gate / 2 and certain else "same"


def _settings(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    keys = dict.fromkeys([*before, *after])
    return [(key, before.get(key, "-"), after.get(key, "-")) for key in keys if before.get(key) != after.get(key)]


def peak_measure(size: int, *, resident: bool, gated: bool = False) -> Measure:
    """Return the measure of a memory peak: a counter of the allocator is exact, a resident set is not."""
    return Measure(float(size), size * RESIDENT_ERROR if resident else 0.0, "bytes", gated)


def mean_of_last(values: Sequence[float], most: int = 50) -> Measure | None:
    """Return the mean of the last losses with its standard error; None without any."""
    last = [value for value in values if math.isfinite(value)][-most:]
    if not last:
        return None
    mean = sum(last) / len(last)
    if len(last) < 3:
        return Measure(mean, abs(mean), "loss")
    deviation = math.sqrt(sum((value - mean) ** 2 for value in last) / (len(last) - 1))
    return Measure(mean, deviation / math.sqrt(len(last)), "loss", gated=True)
