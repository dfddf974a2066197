"""The learning rate over time, as a share of its peak."""

import math

from ..config.schema import Schedule


def factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """Return the learning rate of a step as a share of the peak rate.

    ``step`` counts from 0.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    share = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    falling = 1.0 - share if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * falling
