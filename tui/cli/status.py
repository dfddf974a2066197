"""``ftmon status``: how one run stands, for people and as JSON."""

from argparse import Namespace
from typing import Any

import msgspec

from ...protocol import rundir
from ...protocol.recording.reader import Reader
from ...protocol.text import duration, gib, sanitize
from ..model.run import RunModel
from ..source.load import describe, load
from .runs import RunEntry, entry

_SHOWN = 16
"""Ranks and alerts listed at the most."""


def show_status(arguments: Namespace) -> int:
    """Print how one run stands, as far as it was recorded: half a second ago, for a live one."""
    run = rundir.find(arguments.run)
    found = entry(run)
    model = RunModel()
    if not found.problem:
        reader = Reader(run.recording)
        try:
            info = reader.info()
            model = load(reader, info.last_t, describe(info))
        finally:
            reader.close()
    report = _report(found, model)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 0
    for line in _lines(found, model):
        print(line)
    return 0


def _report(found: RunEntry, model: RunModel) -> dict[str, Any]:
    """Collect what ``status --json`` tells; bytes, seconds, and seconds since the epoch."""
    rates, peak = model.rates, model.peak
    return {
        **msgspec.structs.asdict(found),
        "model": model.info.model,
        "zero_stage": model.info.zero_stage,
        "precision": model.info.precision,
        "world_size": model.world_size,
        "step": model.step,
        "total_steps": model.total_steps,
        "loss": model.loss,
        "lr": model.lr,
        "grad_norm": model.grad_norm,
        "tokens_per_second": rates.tokens_per_second,
        "seconds_per_step": rates.seconds_per_step,
        "seconds_left": model.seconds_left,
        "peak": {"bytes": peak.bytes, "phase": peak.phase, "step": peak.step, "rank": peak.rank} if peak else None,
        "output_dir": model.plan.output_dir if model.plan else "",
        "rank_states": [
            {
                "rank": rank.rank,
                "state": rank.state,
                "text": rank.state_text,
                "step": rank.step,
                "host": rank.hello.host if rank.hello else "",
                "pid": rank.hello.pid if rank.hello else 0,
                "exit_code": rank.exit_code,
                "signal": rank.signal,
            }
            for rank in model.ranks.values()
        ],
        "alerts": [msgspec.to_builtins(alert) for alert in model.alerts.unresolved()],
    }


def _lines(found: RunEntry, model: RunModel) -> list[str]:
    """Say how a run stands in a few lines."""
    code = f", exit code {found.exit_code}" if found.exit_code is not None and not found.live else ""
    lines = [f"{found.id}  {found.state}{code}{', live' if found.live else ''}"]
    if found.problem:
        return [*lines, f"recording: {found.problem}"]
    total = f" of {model.total_steps:,}" if model.total_steps else ""
    left = f", {duration(model.seconds_left)} left" if model.seconds_left else ""
    lines.append(f"step {model.step:,}{total}{left}")
    rates = model.rates
    parts = [
        f"loss {model.loss:.4f}" if model.loss is not None else "",
        f"{rates.tokens_per_second:,.0f} tok/s" if rates.tokens_per_second else "",
        f"{rates.seconds_per_step:.3f} s/step" if rates.seconds_per_step else "",
    ]
    if any(parts):
        lines.append("  ".join(filter(None, parts)))
    if peak := model.peak:
        lines.append(f"highest peak {gib(peak.bytes)}: rank {peak.rank}, {peak.phase} of step {peak.step:,}")
    if states := model.rank_states():
        lines.append("ranks: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    lines += [
        f"  rank {rank.rank} {rank.state}: {sanitize(rank.state_text)}"
        for rank in model.ranks.values()
        if rank.state_text
    ][:16]
    lines += [f"{alert.severity}: {sanitize(alert.title)}" for alert in model.alerts.unresolved()[:16]]
    return [*lines, f"recording: {found.recording}"]
