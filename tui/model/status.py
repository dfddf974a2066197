"""A run's state as plain data, for scripts: bytes, seconds, and seconds since the epoch."""

from typing import Any

import msgspec

from ...protocol.telemetry import DeviceSample
from .rank import RankModel
from .run import RunModel


def status(model: RunModel) -> dict[str, Any]:
    """Tell how a run stands, in values that JSON takes."""
    info, rates, peak, fit = model.info, model.rates, model.peak, model.fit
    return {
        "id": info.id,
        "name": info.name,
        "kind": info.kind,
        "command": info.command,
        "created": info.created,
        "time": model.now,
        "state": model.state,
        "state_text": model.state_text,
        "exit_code": model.exit_code,
        "model": info.model,
        "parameters": info.parameters,
        "framework": info.framework,
        "backend": info.backend,
        "zero_stage": info.zero_stage,
        "precision": info.precision,
        "world_size": model.world_size,
        "step": model.step,
        "leading_step": model.leading_step,
        "total_steps": model.total_steps,
        "loss": model.loss,
        "lr": model.lr,
        "grad_norm": model.grad_norm,
        "steps_per_second": rates.steps_per_second,
        "seconds_per_step": rates.seconds_per_step,
        "tokens_per_second": rates.tokens_per_second,
        "seconds_left": model.seconds_left,
        "peak": None
        if peak is None
        else {"bytes": peak.bytes, "rank": peak.rank, "phase": peak.phase, "step": peak.step},
        "fit": {"verdict": fit.verdict, "capacity_bytes": fit.capacity_bytes, "rank": fit.rank},
        "output_dir": model.plan.output_dir if model.plan else "",
        "rank_states": dict(model.rank_states()),
        "ranks": [_rank(rank, model.device_of(rank)) for rank in model.ranks.values()],
        "alerts": [msgspec.to_builtins(alert) for alert in model.alerts.unresolved()],
        "hosts": [msgspec.to_builtins(host) for host in model.hosts.values()],
        "hub": None if model.hub is None else msgspec.to_builtins(model.hub),
    }


def _rank(rank: RankModel, device: DeviceSample | None) -> dict[str, Any]:
    hello, shares, peak = rank.hello, rank.shares, rank.peak
    return {
        "rank": rank.rank,
        "state": rank.state,
        "text": rank.state_text,
        "since": rank.state_since,
        "step": rank.step,
        "phase": rank.phase,
        "host": hello.host if hello else "",
        "pid": hello.pid if hello else 0,
        "exit_code": rank.exit_code,
        "signal": rank.signal,
        "memory_measure": hello.memory_measure if hello else "",
        "allocated_bytes": rank.allocated_bytes,
        "reserved_bytes": rank.reserved_bytes,
        "resident_bytes": rank.resident_bytes,
        "capacity_bytes": rank.capacity_bytes,
        "peak": None if peak is None else {"bytes": peak.bytes, "phase": peak.phase, "step": peak.step},
        "step_ms": shares.step_ms,
        "shares": shares.parts,
        "shares_clock": shares.clock,
        "device": None if device is None else msgspec.to_builtins(device),
        "dropped": rank.dropped,
    }
