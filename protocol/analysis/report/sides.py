"""One side of a comparison, from the figures of a run's ranks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...messages.telemetry import Hello
from ...sweep.rows import PhaseFigures, RankRow, Row
from .compare import Measure, Side, mean_of_last, peak_measure

_PHASES = ("data", "generate", "forward", "backward", "optimizer")
_MOST_TEXT = 80


def side_of_ranks(
    name: str,
    ranks: Sequence[RankRow],
    losses: Sequence[float] = (),
    settings: Mapping[str, str] | None = None,
    alerts: Mapping[str, int] | None = None,
    verdict: str = "done",
) -> Side:
    """Return a side of a run.

    Memory is that of the highest rank, times are those of the slowest. The gate checks step time, the highest peak,
    reserved memory and loss; phases show where a difference comes from.

    Args:
        losses: losses of the steps in order, each the mean over ranks.
    """
    measured = [rank for rank in ranks if rank.steps]
    measures: dict[str, Measure] = {}
    if measured:
        slowest = max(measured, key=lambda rank: rank.step_ms)
        resident = any(figures.resident_peak_bytes for rank in measured for figures in rank.phases.values())
        measures["step time"] = Measure(slowest.step_ms, slowest.step_ms_error, "ms", gated=True)
        tokens = sum(rank.tokens_per_second for rank in measured)
        if tokens:
            share = slowest.step_ms_error / slowest.step_ms if slowest.step_ms else 0.0
            measures["throughput"] = Measure(tokens, tokens * share, "tokens/s")
        peak = max(rank.peak_bytes for rank in measured)
        measures["highest peak"] = peak_measure(peak, resident=resident, gated=True)
        if not resident:
            reserved = max(rank.reserved_peak_bytes for rank in measured)
            measures["reserved"] = peak_measure(reserved, resident=False, gated=True)
        nvml = max(rank.nvml_bytes for rank in measured)
        if nvml:
            measures["NVML"] = peak_measure(nvml, resident=False)
        for phase in _PHASES:
            found = [rank.phases[phase] for rank in measured if phase in rank.phases]
            if found:
                measures[f"{phase} peak"] = peak_measure(max(one.peak_bytes for one in found), resident=resident)
                measures[f"{phase} time"] = _time(found)
    loss = mean_of_last(losses)
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
    for key, value in _flat("deepspeed", hello.deepspeed_config or {}).items():
        found[key] = value
    return {key: str(value)[:_MOST_TEXT] for key, value in found.items() if value not in (None, "", 0)}


def _flat(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    found: dict[str, Any] = {}
    for key, below in value.items():
        found |= _flat(f"{path}.{key}", below)
    return found


def _time(found: Sequence[PhaseFigures]) -> Measure:
    slowest = max(found, key=lambda one: one.device_ms if one.device_ms is not None else one.host_ms)
    value = slowest.device_ms if slowest.device_ms is not None else slowest.host_ms
    return Measure(value, slowest.ms_error, "ms")
