"""Speed of a run: from the last few steps of its ranks while it trains, over all steps once it has ended.

The one source of every displayed step time, throughput and time left. Evaluations and checkpoints are no part of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ...protocol.messages.telemetry import PAUSES, Step
from .rank import RankModel
from .training import TrainingHistory

RATE_STEPS = 8
"""Steps over which a speed is measured."""

_NEWEST = 3
_CHANGE = 1.5
"""If the median of the newest 3 steps differs by this factor from that of the steps before, only these 3 count."""

_PATIENCE = 3.0
"""A step may take this many times the recent duration before the run counts as stalled."""

_DELIVERY_SECONDS = 2.0
"""Delays up to this are ignored: steps are sent, recorded and shown in batches."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed without evaluations and checkpoints; all 0 while unknown."""

    steps_per_second: float = 0.0
    seconds_per_step: float = 0.0
    """Time between the ends of two steps; a stall does not increase it, so that time left stays realistic."""
    tokens_per_second: float = 0.0
    """Of all ranks together."""
    flops_per_second: float = 0.0
    """Model FLOP/s of all ranks together; 0 unless known for every rank."""


def rates(ranks: Iterable[RankModel], now: float, *, rests: bool = False) -> Rates:
    """Return the speed over the last few steps: of the slowest rank, and the tokens of all.

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
        taken = recent_seconds(recent)
        recent = recent[-len(taken) :]
        typical = max(median(taken), 1e-6)
        silence = now - rank.clock_offset - _end(recent[-1])
        waits = not rests and rank.state != "finished" and rank.phase not in PAUSES
        late = max(0.0, silence - max(_PATIENCE * typical, _DELIVERY_SECONDS)) if waits else 0.0
        stretched = typical + late / len(recent)
        tokens += sum(step.tokens for step in recent) / len(recent) / stretched
        flops += sum(step.flops for step in recent) / len(recent) / stretched
        all_flops = all_flops and all(step.flops for step in recent)
        slowest = max(slowest, stretched)
        seconds = max(seconds, typical)
    return Rates(1 / slowest if slowest else 0.0, seconds, tokens, flops if all_flops else 0.0)


def recent_seconds(steps: Sequence[Step]) -> list[float]:
    """Return the seconds of the steps that show the present speed, a suffix of those of ``steps``.

    The first of several steps only gives the beginning of the second. Older steps are left out if the newest ones have
    another speed.
    """
    if len(steps) == 1:
        return [steps[0].training_us * 1e-6]
    taken = [_seconds(before, step) for before, step in pairwise(steps)]
    older, newest = taken[:-_NEWEST], taken[-_NEWEST:]
    if older:
        low, high = sorted((median(older), median(newest)))
        if high > _CHANGE * low:
            return newest
    return taken


def _seconds(before: Step, step: Step) -> float:
    """Return the time since the previous step's end without pauses; steps that were not recorded share it."""
    paused = (step.host_us - step.training_us) * 1e-6
    return max(0.0, _end(step) - _end(before) - paused) / max(1, step.step - before.step)


def _end(step: Step) -> float:
    return step.started + step.host_us * 1e-6


def mean_rates(course: TrainingHistory, ranks: int) -> Rates:
    """Return the mean speed over all steps of a job except the first, which prepares kernels and memory."""
    seconds, tokens, flops = course.mean_step
    if not seconds:
        return Rates()
    return Rates(1 / seconds, seconds, tokens * ranks / seconds, flops * ranks / seconds)
