"""Speed of a run from the recent steps of its ranks; it decreases while the run makes no progress."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...protocol.messages.telemetry import PAUSES
from .rank import RankModel

RATE_STEPS = 20
"""Steps a rate is measured over."""

_PATIENCE = 3.0
"""A step may take this many times the recent mean before the run counts as stalled."""

_DELIVERY_SECONDS = 2.0
"""Delays up to this are ignored: steps are sent, recorded and shown in batches."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed over the recent steps, without evaluations and checkpoints; all 0 while unknown."""

    steps_per_second: float = 0.0
    seconds_per_step: float = 0.0
    """Mean time between the ends of two steps; a stall does not increase it, so that time left stays realistic."""
    tokens_per_second: float = 0.0
    """Of all ranks together."""
    flops_per_second: float = 0.0
    """Model FLOP/s of all ranks together; 0 unless known for every rank."""


def rates(ranks: Iterable[RankModel], now: float, *, rests: bool = False) -> Rates:
    """Return the speed of a run: of the slowest rank's steps, and the tokens of all.

    Args:
        ranks: ranks of one job.
        now: hub time; a rank without a recent step counts as slow.
        rests: no step is due (the last one is done, or the run evaluates, saves or exports), so ``now`` is ignored.
    """
    slowest = 0.0
    seconds = 0.0
    tokens = flops = 0.0
    all_flops = True
    for rank in ranks:
        steps = rank.steps
        if not steps or rank.state == "gone":
            continue
        recent = [steps[index] for index in range(max(0, len(steps) - RATE_STEPS - 1), len(steps))]
        end = recent[-1].started + recent[-1].host_us * 1e-6
        if len(recent) > 1:
            begin = recent[0].started + recent[0].host_us * 1e-6
            recent = recent[1:]
        else:
            begin = recent[0].started
        paused = sum(step.host_us - step.training_us for step in recent) * 1e-6
        elapsed = max(end - begin - paused, 1e-6)
        mean = elapsed / len(recent)
        silence = now - rank.clock_offset - end
        waits = not rests and rank.state != "finished" and rank.phase not in PAUSES
        stretched = elapsed + max(0.0, silence - max(_PATIENCE * mean, _DELIVERY_SECONDS)) if waits else elapsed
        tokens += sum(step.tokens for step in recent) / stretched
        flops += sum(step.flops for step in recent) / stretched
        all_flops = all_flops and all(step.flops for step in recent)
        slowest = max(slowest, stretched / len(recent))
        seconds = max(seconds, mean)
    return Rates(1 / slowest if slowest else 0.0, seconds, tokens, flops if all_flops else 0.0)
