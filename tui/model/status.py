"""A run's state as JSON values, for scripts: bytes, seconds, and seconds since the epoch."""

from typing import Any

import msgspec

from ...protocol.messages.telemetry import DeviceSample, Evaluation
from .rank import RankModel
from .rates import rates as rates_of
from .run import RunModel
from .training import perplexity_of, times_left


def status(model: RunModel) -> dict[str, Any]:
    """Return the state of a run as JSON values."""
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
        "trainable_parameters": info.trainable_parameters,
        "framework": info.framework,
        "backend": info.backend,
        "zero_stage": info.zero_stage,
        "precision": info.precision,
        "world_size": model.world_size,
        "step": model.step,
        "leading_step": model.leading_step,
        "total_steps": model.total_steps,
        "epoch": model.epoch,
        "epochs": model.plan.epochs if model.plan else None,
        "loss": model.loss,
        "losses": model.losses_by_name,
        "lr": model.lr,
        "grad_norm": model.grad_norm,
        "steps_per_second": rates.steps_per_second,
        "seconds_per_step": rates.seconds_per_step,
        "tokens_per_second": rates.tokens_per_second,
        "mfu": model.mfu,
        "peak_flops": model.peak_flops,
        "evaluation": _evaluation(model.training.evaluation),
        "best_evaluation": _evaluation(model.training.best),
        "checkpoint": _last_checkpoint(model),
        "early_stop": _whole(model.training.early_stop),
        "activity": None if model.training.activity is None else msgspec.to_builtins(model.training.activity),
        "seconds_left": model.seconds_left,
        "evaluations_left": _evaluations_left(model),
        "evaluation_seconds": model.training.seconds_of("eval"),
        "peak": None
        if peak is None
        else {
            "bytes": peak.bytes,
            "rank": peak.rank,
            "phase": peak.phase,
            "step": peak.step,
            "after_last_step": peak.after,
        },
        "fit": {"verdict": fit.verdict, "capacity_bytes": fit.capacity_bytes, "rank": fit.rank},
        "output_dir": model.plan.output_dir if model.plan else "",
        "job": model.job or None,
        "jobs": [_whole(job) for job in model.jobs.values()],
        "rank_states": dict(model.rank_states()),
        "ranks": [_rank(rank, model.device_of(rank), model) for rank in model.ranks.values()],
        "alerts": [msgspec.to_builtins(alert) for alert in model.alerts.unresolved()],
        "hosts": [msgspec.to_builtins(host) for host in model.hosts.values()],
        "hub": None if model.hub is None else msgspec.to_builtins(model.hub),
    }


def _evaluation(evaluation: Evaluation | None) -> Any:
    return None if evaluation is None else {**_whole(evaluation), "perplexity": perplexity_of(evaluation)}


def _last_checkpoint(model: RunModel) -> Any:
    checkpoints = model.training.checkpoints
    return _whole(checkpoints[-1]) if checkpoints else None


def _evaluations_left(model: RunModel) -> int | None:
    plan = model.plan
    if plan is None or not (plan.evaluate_every or plan.evaluate_at_end):
        return None
    if model.training.early_stop is not None:
        return 0
    return times_left(plan.evaluate_every, plan.evaluate_at_end, model.step, plan.total_steps)


def _whole(value: Any) -> Any:
    """Return a struct as a map with all its fields, including those with default values."""
    if isinstance(value, msgspec.Struct):
        return {name: _whole(each) for name, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _rank(rank: RankModel, device: DeviceSample | None, model: RunModel) -> dict[str, Any]:
    hello, shares, peak = rank.hello, rank.shares, rank.peak
    own = rates_of([rank], model.now, rests=model.rests)
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
        "tokens_per_second": own.tokens_per_second,
        "mfu": own.flops_per_second / rank.peak_flops if rank.peak_flops and own.flops_per_second else None,
    }
