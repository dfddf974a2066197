"""Compares two runs, or two sweeps: differences in relation to the noise of both.

The gate is the size of regression that must be found. The alarm is raised from half of it on, if the difference is
also significant: with a standard error of at most 0.3 gates, a regression of one gate is missed in 1 of 20 cases,
and equal runs raise the alarm in 1 of 20. With more noise the result is "cannot tell".
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal

import msgspec

from ..messages.telemetry import Hello
from ..sweep.rows import PhaseFigures, RankRow, Row
from ..text import gib
from .sweep.summary import RESIDENT_ERROR, aligned

FALSE_ALARMS = 0.05  # share of comparisons of equal runs that raise an alarm, over all gated figures together
_NOISE_SHARE = 0.3
_MOST_LOSSES = 50
_PHASES = ("data", "generate", "forward", "backward", "optimizer")
_MOST_TEXT = 80
_JUDGED = {"same": "", "worse": "worse", "better": "better", "cannot tell": "cannot tell: too noisy"}

Judgement = Literal["same", "worse", "better", "cannot tell"]


class Measure(msgspec.Struct, frozen=True):
    """One figure of a run."""

    value: float
    error: float = 0.0  # standard error, in the unit of the value; 0: unknown, or an exact counter
    unit: Literal["bytes", "ms", "tokens/s", "loss"] = "bytes"
    gated: bool = False  # whether the gate checks it


class StepRange(msgspec.Struct, frozen=True):
    """The common steps of two runs, over which all their figures are compared."""

    first: int
    last: int
    before_last: int  # the first run's last step
    after_last: int
    evaluation: int | None = None  # step of the last evaluation that both runs have; None: none
    data_compared: int = 0  # number of steps whose data were compared, over the ranks that both runs have
    data_differ_from: int | None = None  # the first step that a rank trained on other data; None: there is none


class Side(msgspec.Struct, frozen=True):
    """One of the two runs (or configurations of sweeps)."""

    name: str
    measures: dict[str, Measure]  # by name: `step time`, `backward peak` ...
    settings: dict[str, str] = {}  # configuration and versions, flat
    alerts: dict[str, int] = {}  # number of alerts by kind
    verdict: str = "done"
    not_finite: dict[str, int] = {}  # compared steps in which a figure was NaN or infinite, by its name; empty: none


class Difference(msgspec.Struct, frozen=True):
    """One figure of both sides."""

    name: str
    before: Measure
    after: Measure
    change: float  # as a share of the first; 0.03 for 3 % more
    error: float  # standard error of the change, also as a share
    judgement: Judgement
    gated: bool


class Comparison(msgspec.Struct, frozen=True):
    """The differences of two sides."""

    before: str
    after: str
    differences: list[Difference]
    settings: list[tuple[str, str, str]]  # keys that differ: key, before, after
    alerts: list[tuple[str, int, int]]  # kinds whose counts differ
    not_finite: list[tuple[str, int, int]]  # figures that were NaN or infinite, with the number of steps of each side
    missing: list[str]  # figures that only one side has
    regressions: list[str]  # regressions that exceed the gate, as text; empty: none, or no gate
    undecided: list[str]  # gated figures whose noise is too large for the gate
    steps: StepRange | None = None  # none for sweeps


def compare(before: Side, after: Side, gate: float | None = None, tests: int = 0) -> Comparison:
    """Return the differences of two sides.

    ``gate``: regression that must be found, as a share; None: no alarm. ``tests``: number of noisy gated figures in all
    comparisons made together; 0: those of this one.
    """
    names = [name for name in before.measures if name in after.measures]
    # The number of standard errors that is significant in so many tests (Bonferroni's correction).
    z = NormalDist().inv_cdf(1 - FALSE_ALARMS / max(1, tests or noisy(before, after)))
    found = [_difference(name, before.measures[name], after.measures[name], gate, z) for name in names]
    regressions = [f"{one.name} {one.change:+.1%}" for one in found if one.gated and one.judgement == "worse"]
    if before.verdict == "done" and after.verdict != "done":
        regressions.insert(0, f"{after.verdict}, was done")
    lost = [
        (name, before.not_finite.get(name, 0), after.not_finite.get(name, 0))
        for name in dict.fromkeys([*before.not_finite, *after.not_finite])
    ]
    regressions += [f"{name} not finite in {steps:,} steps" for name, earlier, steps in lost if steps and not earlier]
    keys = dict.fromkeys([*before.settings, *after.settings])
    settings = [(key, before.settings.get(key, "-"), after.settings.get(key, "-")) for key in keys]
    kinds = sorted({*before.alerts, *after.alerts})
    alerts = [(kind, before.alerts.get(kind, 0), after.alerts.get(kind, 0)) for kind in kinds]
    return Comparison(
        before.name,
        after.name,
        found,
        [one for one in settings if one[1] != one[2]],
        [alert for alert in alerts if alert[1] != alert[2]],
        lost,
        sorted(before.measures.keys() ^ after.measures.keys()),
        regressions if gate is not None else [],
        [one.name for one in found if one.gated and one.judgement == "cannot tell"] if gate is not None else [],
    )


def noisy(before: Side, after: Side) -> int:
    """Count the gated figures of a comparison that have noise."""
    both = [(one, after.measures[name]) for name, one in before.measures.items() if name in after.measures]
    return max(1, sum(one.gated and bool(one.error or other.error) for one, other in both))


def _difference(name: str, before: Measure, after: Measure, gate: float | None, z: float) -> Difference:
    if not before.value:
        return Difference(name, before, after, 0.0, 0.0, "same" if not after.value else "cannot tell", False)
    change = (after.value - before.value) / abs(before.value)
    error = math.hypot(before.error, after.error) / abs(before.value)
    worse = -change if before.unit == "tokens/s" else change
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


def peak_measure(size: int, *, resident: bool, gated: bool = False) -> Measure:
    """Return the measure of a memory peak: a counter of the allocator is exact, a resident set is not."""
    return Measure(float(size), size * RESIDENT_ERROR if resident else 0.0, "bytes", gated)


def _mean_of_last(values: Sequence[float]) -> Measure | None:
    """Return the mean of the last losses with its standard error; None without any."""
    last = [value for value in values if math.isfinite(value)][-_MOST_LOSSES:]
    if not last:
        return None
    mean = statistics.fmean(last)
    if len(last) < 3:
        return Measure(mean, abs(mean), "loss")
    return Measure(mean, statistics.stdev(last) / math.sqrt(len(last)), "loss", gated=True)


def side_of_ranks(
    name: str,
    ranks: Sequence[RankRow],
    losses: Sequence[float] = (),
    settings: Mapping[str, str] | None = None,
    alerts: Mapping[str, int] | None = None,
    verdict: str = "done",
) -> Side:
    """Return a side of a run; ``losses``: of the steps in order, each the mean over ranks.

    Memory is that of the highest rank, times are those of the slowest. The gate checks step time, the highest peak,
    reserved memory and loss; phases show where a difference comes from.
    """
    measured = [rank for rank in ranks if rank.steps]
    measures: dict[str, Measure] = {}
    if measured:
        slowest = max(measured, key=lambda rank: rank.step_ms)
        resident = any(figures.resident_peak_bytes for rank in measured for figures in rank.phases.values())
        if slowest.step_ms:  # an imported run has neither times nor memory
            measures["step time"] = Measure(slowest.step_ms, slowest.step_ms_error, "ms", gated=True)
        tokens = sum(rank.tokens_per_second for rank in measured)
        if tokens:
            share = slowest.step_ms_error / slowest.step_ms if slowest.step_ms else 0.0
            measures["throughput"] = Measure(tokens, tokens * share, "tokens/s")
        peak = max(rank.peak_bytes for rank in measured)
        if peak:
            measures["highest peak"] = peak_measure(peak, resident=resident, gated=True)
        reserved = max(rank.reserved_peak_bytes for rank in measured)
        if reserved and not resident:
            measures["reserved"] = peak_measure(reserved, resident=False, gated=True)
        nvml = max(rank.nvml_bytes for rank in measured)
        if nvml:
            measures["NVML"] = peak_measure(nvml, resident=False)
        for phase in _PHASES:
            found = [rank.phases[phase] for rank in measured if phase in rank.phases]
            if found:
                highest = max(one.peak_bytes for one in found)
                if highest:  # an imported log has times alone
                    measures[f"{phase} peak"] = peak_measure(highest, resident=resident)
                measures[f"{phase} time"] = _time(found)
    loss = _mean_of_last(losses)
    if loss is not None:
        measures["loss"] = loss
    return Side(name, measures, dict(settings or {}), dict(alerts or {}), verdict)


def side_of_rows(name: str, rows: Sequence[Row]) -> Side:
    """Return a side of one configuration of a sweep; with more than two repeats, the noise includes their scatter."""
    done = [side_of_ranks(name, row.ranks) for row in rows if row.verdict == "done"]
    failed = [row.verdict for row in rows if row.verdict != "done"]
    if not done:
        return Side(name, {}, verdict=failed[0] if failed else "done")
    measures: dict[str, Measure] = {}
    for figure, first in done[0].measures.items():
        of = [side.measures[figure] for side in done if figure in side.measures]
        values = [one.value for one in of]
        error = statistics.fmean(one.error for one in of) / len(of) ** 0.5
        if len(values) > 2:
            error = max(error, statistics.stdev(values) / len(values) ** 0.5)
        measures[figure] = msgspec.structs.replace(first, value=statistics.median(values), error=error)
    return Side(name, measures, verdict=failed[0] if failed else "done")


def settings_of(hellos: Sequence[Hello]) -> dict[str, str]:
    """Return the configuration from the first hello, flat: versions, ZeRO stage, DeepSpeed's own keys."""
    if not hellos:
        return {}
    hello = hellos[0]
    found: dict[str, Any] = {
        "ranks": hello.world_size,
        "device": hello.device.name,
        "model": hello.model,
        "parameters": hello.parameters,
        "zero_stage": hello.zero_stage,
        "micro_batch": hello.micro_batch,
        "grad_accumulation": hello.grad_accumulation,
        "precision": hello.precision,
        **{f"versions.{name}": version for name, version in hello.versions.items()},
    }
    found |= _flat("deepspeed", hello.deepspeed_config or {})
    return {key: str(value)[:_MOST_TEXT] for key, value in found.items() if value not in (None, "", 0)}


def _flat(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {key: one for name, below in value.items() for key, one in _flat(f"{path}.{name}", below).items()}


def _time(found: Sequence[PhaseFigures]) -> Measure:
    value, error = max((one.device_ms if one.device_ms is not None else one.host_ms, one.ms_error) for one in found)
    return Measure(value, error, "ms")


def measure_text(measure: Measure) -> str:
    """Return a figure with its unit: ``13.40 GiB``, ``398.2 ms``."""
    if measure.unit == "bytes":
        return gib(measure.value)
    if measure.unit == "loss":
        return f"{measure.value:.4f}"
    return f"{measure.value:,.1f} {measure.unit}"


def comparison_lines(found: Comparison, gate: float | None) -> list[str]:
    """Return a comparison: figures, configuration, alerts, and the gate's result."""
    lines = [f"{found.before} -> {found.after}"]
    if found.steps is not None:
        lines.append(f"  {range_text(found.steps)}")
    if found.differences:
        table = [["", "before", "after", "change", "noise", ""], *(_row(one) for one in found.differences)]
        lines += [f"  {line}" for line in aligned(table)]
    lines += [f"  {name} not finite: in {one:,} -> {other:,} steps" for name, one, other in found.not_finite]
    if found.missing:
        lines.append(f"  only one has: {', '.join(found.missing)}")
    if found.settings:
        lines.append("  configuration:")
        lines += [f"    {key}: {before} -> {after}" for key, before, after in found.settings]
    if found.alerts:
        lines.append("  alerts:")
        lines += [f"    {kind}: {before} -> {after}" for kind, before, after in found.alerts]
    if gate is not None:
        lines.append(f"  {gate_text(found, gate)}")
    return lines


def range_text(steps: StepRange) -> str:
    """Return the compared steps: ``steps 6 to 120 of both (the first has 400 steps, the second 120)``."""
    words = f"steps {steps.first:,} to {steps.last:,} of both"
    if steps.before_last != steps.after_last:
        words += f" (the first run has {steps.before_last:,} steps, the second {steps.after_last:,})"
    if steps.evaluation is not None:
        words += f"; evaluation after step {steps.evaluation:,}"
    if steps.data_differ_from is not None:
        return f"{words}; their data differ from step {steps.data_differ_from:,} on"
    return words + ("; the same data" if steps.data_compared else "")


def gate_text(found: Comparison, gate: float) -> str:
    """Return the gate's result: ``regression: step time +3.4% (gate 3%)``."""
    undecided = f"; cannot tell of {', '.join(found.undecided)}: too noisy" if found.undecided else ""
    limit = f"{gate * 100:g}%"
    if found.regressions:
        return f"regression: {', '.join(found.regressions)} (gate {limit}){undecided}"
    return (
        f"no regression of {limit} found{undecided}" if found.differences else "nothing to compare: no figure in common"
    )


def summary_line(found: Sequence[Comparison], gate: float | None) -> str:
    """Return the result of several comparisons."""
    worse = sum(bool(one.regressions) for one in found)
    unsure = sum(bool(one.undecided) for one in found)
    if gate is None:
        return f"{len(found)} configurations compared"
    words = f"{worse} of {len(found)} regressed" if worse else f"none of {len(found)} regressed"
    return words + (f", {unsure} too noisy to tell" if unsure else "")


def _row(one: Difference) -> list[str]:
    noise = f"±{one.error:.1%}" if one.error else ""
    words = _JUDGED[one.judgement]
    return [one.name, measure_text(one.before), measure_text(one.after), f"{one.change:+.1%}", noise, words]
