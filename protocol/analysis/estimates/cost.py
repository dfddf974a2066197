"""Cost of an epoch."""

import msgspec


class EpochCost(msgspec.Struct, frozen=True):
    """Time and cost of an epoch."""

    steps: int
    seconds: float
    gpu_hours: float
    price: float
    """In the currency of the price of a GPU hour."""
    price_per_million_tokens: float | None


def epoch_cost(
    step_seconds: float, samples: int, samples_per_step: int, gpus: int, price_per_gpu_hour: float, tokens: int = 0
) -> EpochCost:
    """Return time and price of one pass over a data set.

    Args:
        samples: rows of the data set, or packed rows.
        tokens: tokens of the data set, for the price per million tokens; 0: unknown.

    Raises:
        ValueError: a step has no samples.
    """
    if samples_per_step < 1:
        raise ValueError("a step must train on at least one sample: micro-batch x accumulation x ranks")
    steps = -(-samples // samples_per_step)
    seconds = steps * step_seconds
    hours = seconds / 3600 * gpus
    price = hours * price_per_gpu_hour
    return EpochCost(steps, seconds, hours, price, price / tokens * 1e6 if tokens > 0 else None)
