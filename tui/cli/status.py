"""``ftmon status``: how one run stands, for people and as JSON."""

from argparse import Namespace
from collections.abc import Iterator

import msgspec

from ...protocol import rundir
from ...protocol.recording.reader import Reader
from ...protocol.text import duration, gib, sanitize
from ..model.run import RunModel
from ..model.runs import RunEntry, RunList
from ..model.status import status
from ..source.load import describe, load

_SHOWN = 16
"""Ranks and alerts listed at the most."""


def show_status(arguments: Namespace) -> int:
    """Print how a run stands, as it was recorded: of a live one, half a second ago."""
    run = rundir.find(arguments.run)
    entry = RunList().entry(run)
    model = RunModel()
    if entry.recording and not entry.problem:
        with Reader(run.recording) as reader:
            info = reader.info()
            model = load(reader, info.last_t, describe(info))
    if arguments.json:
        # The list's entry knows how the job ended even where the recording does not.
        known = {key: value for key, value in msgspec.structs.asdict(entry).items() if key not in ("ranks", "step")}
        print(msgspec.json.format(msgspec.json.encode({**status(model), **known})).decode())
    else:
        for line in _lines(entry, model):
            print(line)
    return 0


def _lines(entry: RunEntry, model: RunModel) -> Iterator[str]:
    """Say how a run stands in a few lines."""
    code = f", exit code {entry.exit_code}" if entry.exit_code is not None and not entry.live else ""
    yield f"{entry.id}  {entry.state}{code}{', live' if entry.live else ''}"
    if entry.problem or not entry.recording:
        yield f"recording: {entry.problem or 'none yet'}"
        return
    total = f" of {model.total_steps:,}" if model.total_steps else ""
    left = f", {duration(model.seconds_left)} left" if model.seconds_left and entry.live else ""
    yield f"step {model.step:,}{total}{left}"
    rates = model.rates
    parts = [
        f"loss {model.loss:.4f}" if model.loss is not None else "",
        f"{rates.tokens_per_second:,.0f} tok/s" if rates.tokens_per_second else "",
        f"{rates.seconds_per_step:.3f} s/step" if rates.seconds_per_step else "",
    ]
    if any(parts):
        yield "  ".join(filter(None, parts))
    if peak := model.peak:
        yield f"highest peak {gib(peak.bytes)}: rank {peak.rank}, {peak.phase} of step {peak.step:,}"
    if states := model.rank_states():
        yield "ranks: " + ", ".join(f"{count} {state}" for state, count in states.items())
    told = [rank for rank in model.ranks.values() if rank.state_text]
    yield from (f"  rank {rank.rank} {rank.state}: {sanitize(rank.state_text)}" for rank in told[:_SHOWN])
    yield from (f"{alert.severity}: {sanitize(alert.title)}" for alert in model.alerts.unresolved()[:_SHOWN])
    yield f"recording: {entry.recording}" + (f" ({entry.missing})" if entry.missing else "")
