"""How fast a run goes, from the recent steps of its ranks; a run that stands still does not keep its old speed."""

from collections.abc import Iterable
from dataclasses import dataclass

from .rank import RankModel

RATE_STEPS = 20
"""Steps a rate is taken over."""

_PATIENCE = 3.0
"""A step may last this many times the recent mean before the silence counts as standing still."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed over the recent steps, pauses between steps included; all 0 while nothing is known."""

    steps_per_second: float = 0.0
    seconds_per_step: float = 0.0
    """Mean time from one step's end to the next; not stretched by a stall, so that time left stays sane."""
    tokens_per_second: float = 0.0
    """Of all ranks together."""
    samples_per_second: float = 0.0


def rates(ranks: Iterable[RankModel], now: float) -> Rates:
    """Take the speed of a run at ``now``: the slowest rank's steps, and the tokens of all."""
    slowest = 0.0
    seconds = 0.0
    tokens = samples = 0.0
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
        elapsed = max(end - begin, 1e-6)
        mean = elapsed / len(recent)
        stretched = max(elapsed, now - _PATIENCE * mean - begin) if rank.state != "finished" else elapsed
        tokens += sum(step.tokens for step in recent) / stretched
        samples += sum(step.samples for step in recent) / stretched
        slowest = max(slowest, stretched / len(recent))
        seconds = max(seconds, mean)
    return Rates(1 / slowest if slowest else 0.0, seconds, tokens, samples)
