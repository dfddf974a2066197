"""Synthetic curves for ``bench.health``: clean runs of many kinds, and runs with a planted fault.

Each function yields one row a step: what differs from an ordinary step.
"""

import math
import random
from collections.abc import Callable, Iterator

Row = dict[str, float]
"""``loss``, ``grad_norm``, ``lr``, ``overflow``, ``loss_scale``, ``data_ms``, ``engines``, and ``rollout``: the step
generates what it learns from."""


# Clean runs. Each yields rows for as long as it is asked.


def cosine(at: int, total: int, top: float = 3e-4, warm: int = 50) -> float:
    return top * min(1.0, at / warm) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, at / total)))


def norms(r: random.Random, level: float, sigma: float) -> float:
    return level * math.exp(r.gauss(0, sigma))


def pretraining(r: random.Random, total: int) -> Iterator[Row]:
    start, floor, noise = r.uniform(7, 11), r.uniform(2, 4), r.uniform(0.01, 0.05)
    power, sigma = r.uniform(0.2, 0.5), r.uniform(0.05, 0.4)
    for at in range(1, total):
        level = floor + (start - floor) * at**-power
        norm = norms(r, 0.3 + 3 * at**-0.5, sigma)
        yield {"loss": level * (1 + r.gauss(0, noise)), "grad_norm": norm, "lr": cosine(at, total)}


def fine_tuning(r: random.Random, total: int) -> Iterator[Row]:
    level, noise, sigma = r.uniform(0.8, 2.5), r.uniform(0.1, 0.35), r.uniform(0.1, 0.6)
    gain = r.uniform(0.05, 0.5)
    for at in range(1, total):
        loss = level * (1 - gain * at / total) * max(0.05, 1 + r.gauss(0, noise))
        yield {"loss": loss, "grad_norm": norms(r, 1.5, sigma), "lr": cosine(at, total)}


def small_batches(r: random.Random, total: int) -> Iterator[Row]:
    level = r.uniform(0.5, 3)
    for at in range(1, total):
        loss = level * r.expovariate(1.0) * (0.4 + 0.6 * math.exp(-at / 300))
        yield {"loss": loss, "grad_norm": norms(r, 2.0, 0.9), "lr": 1e-4}


def heavy_tails(r: random.Random, total: int) -> Iterator[Row]:
    for at in range(1, total):
        tail = r.gauss(0, 1) / math.sqrt(max(1e-3, sum(r.gauss(0, 1) ** 2 for _ in range(3)) / 3))
        loss = 1.5 + 1.5 * math.exp(-at / 200) + 0.15 * abs(tail)
        yield {"loss": loss, "grad_norm": norms(r, 1.0, 0.5) * (1 + abs(tail)), "lr": 1e-4}


def warm_up(r: random.Random, total: int) -> Iterator[Row]:
    bump, where = r.uniform(0.05, 0.4), r.randint(20, 80)
    for at in range(1, total):
        level = 2.0 * math.exp(-at / 400) + 1.0 + bump * math.exp(-(((at - where) / 20) ** 2))
        yield {
            "loss": level * (1 + r.gauss(0, 0.05)),
            "grad_norm": norms(r, 1.0, 0.3),
            "lr": cosine(at, total, warm=200),
        }


def restarts(r: random.Random, total: int) -> Iterator[Row]:
    period, bump = r.randint(150, 500), r.uniform(0.1, 0.9)
    for at in range(1, total):
        since = at % period
        level = 1.0 + 3.0 * math.exp(-at / 200) + (bump * math.exp(-since / 40) if at > period else 0)
        lr = 3e-4 * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * since / period)))
        yield {"loss": level * (1 + r.gauss(0, 0.04)), "grad_norm": norms(r, 1.0, 0.3), "lr": lr}


def curriculum(r: random.Random, total: int) -> Iterator[Row]:
    boundaries = range(r.randint(100, 300), total, r.randint(400, 800))
    rises = [r.uniform(0.05, 0.4) for _ in boundaries]
    for at in range(1, total):
        level = 1.2 + 2.0 * math.exp(-at / 250)
        for begun, rise in zip(boundaries, rises, strict=True):
            if at >= begun:
                level *= 1 + rise * math.exp(-(at - begun) / 300)
        yield {"loss": level * (1 + r.gauss(0, 0.05)), "grad_norm": norms(r, 1.0, 0.3), "lr": cosine(at, total)}


def epochs(r: random.Random, total: int) -> Iterator[Row]:
    length, drop = r.randint(60, 300), r.uniform(0.1, 0.5)
    for at in range(1, total):
        epoch, within = divmod(at, length)
        level = 1.8 * (1 - drop) ** epoch * (1 + 0.1 * within / length) + 0.05
        yield {"loss": level * (1 + r.gauss(0, 0.08)), "grad_norm": norms(r, 1.0, 0.4), "lr": cosine(at, total)}


def spikes(r: random.Random, total: int) -> Iterator[Row]:
    left = 0
    for at in range(1, total):
        if not left and r.random() < 0.01:
            left = r.randint(1, 3)
        height = r.uniform(2, 10) if left else 1.0
        left = max(0, left - 1)
        level = (2.0 + 3 * math.exp(-at / 300)) * height
        yield {"loss": level * (1 + r.gauss(0, 0.03)), "grad_norm": norms(r, 1.0, 0.3) * height**2, "lr": 1e-4}


def gan(r: random.Random, total: int) -> Iterator[Row]:
    """Generator and critic in one loop: a step has an update of each."""
    return ({**row, "engines": 2} for row in swinging(r, total))


def swinging(r: random.Random, total: int) -> Iterator[Row]:
    """One series that rises slowly for the whole run and swings by several times its lowest value meanwhile."""
    end, wave, period = r.uniform(1.5, 6.0), r.uniform(0.1, 0.5), r.uniform(20, 40)
    for at in range(1, total):
        level = 0.7 + (end - 0.7) * at / max(2500, total) + wave * math.sin(at / period)
        yield {"loss": level + r.gauss(0, 0.3), "grad_norm": norms(r, 5.0, 0.8), "lr": 2e-4}


def policy(r: random.Random, total: int) -> Iterator[Row]:
    scale = r.uniform(0.01, 0.2)
    for at in range(1, total):
        heavy = r.gauss(0, 1) * (3 if r.random() < 0.05 else 1)
        loss = scale * heavy + 0.02 * math.sin(at / 150) + scale * 0.5 * at / total
        yield {"loss": loss, "grad_norm": norms(r, 0.3, 0.7), "lr": 1e-6}


def memorised(r: random.Random, total: int) -> Iterator[Row]:
    pace = r.uniform(40, 200)
    for at in range(1, total):
        level = 3.0 * math.exp(-at / pace) + 0.01
        yield {"loss": level * math.exp(r.gauss(0, 0.4)), "grad_norm": norms(r, level, 0.5), "lr": 1e-4}


def mixture(r: random.Random, total: int) -> Iterator[Row]:
    low, high, share = 1.0, r.uniform(2, 6), r.uniform(0.1, 0.5)
    for _ in range(1, total):
        level = high if r.random() < share else low
        yield {"loss": level * (1 + r.gauss(0, 0.05)), "grad_norm": norms(r, level, 0.3), "lr": 1e-4}


def blocks(r: random.Random, total: int) -> Iterator[Row]:
    length, high = r.randint(5, 20), r.uniform(1.2, 2.5)
    for at in range(1, total):
        level = 1.5 * (high if at // length % 2 else 1.0)
        yield {"loss": level * (1 + r.gauss(0, 0.05)), "grad_norm": norms(r, level, 0.3), "lr": 1e-4}


def half_precision(r: random.Random, total: int) -> Iterator[Row]:
    scale, good = 2.0 ** r.choice((16, 24, 32)), 0
    limit, window = 2.0 ** r.randint(10, 17), r.choice((100, 500, 1000))
    for at in range(1, total):
        overflow = scale > limit * math.exp(r.gauss(0, 0.2))
        yield {
            "loss": 2 + 2 * math.exp(-at / 200) + r.gauss(0, 0.1),
            "grad_norm": math.inf if overflow else norms(r, 1.0, 0.3),
            "lr": cosine(at, total),
            "loss_scale": scale,
            "overflow": overflow,
        }
        good = 0 if overflow else good + 1
        if overflow:
            scale /= 2
        elif good % window == 0:
            scale *= 2


def loader(r: random.Random, total: int) -> Iterator[Row]:
    """Epochs whose first batch takes seconds, and now and then a slow one."""
    length, usual = r.randint(50, 200), r.uniform(0.2, 15)
    for at in range(1, total):
        data = 4000.0 if at % length == 0 else usual * math.exp(r.gauss(0, 0.3))
        if r.random() < 0.01:
            data += 300
        yield {"loss": 2 + r.gauss(0, 0.1), "lr": 1e-4, "data_ms": data}


def cyclic(r: random.Random, total: int) -> Iterator[Row]:
    """A triangular learning rate; the loss rises with it in each cycle."""
    period, amplitude, low = r.randint(100, 2000), r.uniform(0.1, 1.0), r.uniform(0.05, 0.3)
    noise = r.uniform(0.02, 0.15)
    for at in range(1, total):
        rate = 1 - abs(2 * (at / period % 1) - 1)
        level = (1.0 + 2.0 * math.exp(-at / 200)) * (1 + amplitude * rate)
        norm = norms(r, 1.0 + rate, 0.3)
        yield {"loss": level * (1 + r.gauss(0, noise)), "grad_norm": norm, "lr": 3e-4 * (low + (1 - low) * rate)}


def deep_restarts(r: random.Random, total: int) -> Iterator[Row]:
    """Warm restarts of a model that memorises: in each cycle the loss falls by a factor and comes back."""
    period, factor = r.randint(100, 400), r.choice((1, 2))
    share, noise, begun = r.uniform(0.1, 0.6), r.uniform(0.02, 0.15), 0
    rise = r.uniform(5, 40)
    last = 1.0
    for at in range(1, total):
        if at - begun >= period:
            begun, period = at, period * factor
        rate = 0.5 + 0.5 * math.cos(math.pi * (at - begun) / period)
        last += (rate - last) / rise  # the loss follows the learning rate after some steps
        level = (0.5 + 2.5 * math.exp(-at / 300)) * (share + (1 - share) * last)
        norm = norms(r, 0.5 + level, 0.3)
        yield {"loss": level * (1 + r.gauss(0, noise)), "grad_norm": norm, "lr": 3e-4 * max(0.01, rate)}


def harder_data(r: random.Random, total: int) -> Iterator[Row]:
    """A curriculum whose stages begin at once, with a loss up to 2.5 times as high."""
    every, noise = r.randint(150, 700), r.uniform(0.03, 0.15)
    rises = [r.uniform(1.2, 2.5) for _ in range(total // every + 1)]
    pace, rest = r.uniform(50, 300), r.uniform(0.0, 0.4)
    level = 3.0
    for at in range(1, total):
        stage, since = divmod(at, every)
        begun = 1.0 + 2.0 * math.exp(-at / 250)
        risen = (rises[stage] - 1) * (rest + (1 - rest) * math.exp(-since / pace)) if stage else 0.0
        level = begun * (1 + risen)
        norm = norms(r, 1.0 + risen, 0.3)
        yield {"loss": level * (1 + r.gauss(0, noise)), "grad_norm": norm, "lr": cosine(at, total)}


def annealed(r: random.Random, total: int) -> Iterator[Row]:
    """A variational model: the weight of a second term grows, once or in cycles, and the loss with it."""
    begin, over, weight = r.randint(20, 300), r.randint(200, 1000), r.uniform(0.3, 1.5)
    cycles = r.random() < 0.5
    for at in range(1, total):
        since = max(0, at - begin)
        beta = min(1.0, 2 * (since / over % 1)) if cycles else min(1.0, since / over)
        level = 1.0 + 2.5 * math.exp(-at / 150) + weight * beta
        yield {"loss": level * (1 + r.gauss(0, 0.06)), "grad_norm": norms(r, 1.0, 0.3), "lr": 1e-3}


def rewards(r: random.Random, total: int) -> Iterator[Row]:
    """Policy and value loss of a rollout's returns: once the policy earns something, the loss grows many times over."""
    where, width, gain = r.uniform(0.1, 0.9) * total, r.uniform(60, 400), r.uniform(3, 20)
    for at in range(1, total):
        returns = 1 / (1 + math.exp(-max(-50.0, min(50.0, (at - where) / width))))
        level = 0.3 + math.exp(-at / 60) + gain * returns
        loss = level * math.exp(r.gauss(0, 0.3)) + r.gauss(0, 0.05)
        yield {"loss": loss, "grad_norm": norms(r, level, 0.5), "lr": 3e-4, "rollout": 1}


def targets(r: random.Random, total: int) -> Iterator[Row]:
    """Q-learning: each new target network lets the loss jump, and the values grow slowly."""
    every, jump, pace = r.randint(50, 600), r.uniform(0.5, 4), r.uniform(0.1, 0.4)
    growth = r.uniform(0.0, 2.0)
    for at in range(1, total):
        since = at % every
        level = 0.5 * (1 + growth * at / 3000) * (1 + jump * math.exp(-since / (pace * every)))
        yield {"loss": level * math.exp(r.gauss(0, 0.25)), "grad_norm": norms(r, level, 0.4), "lr": 1e-4}


def single_samples(r: random.Random, total: int) -> Iterator[Row]:
    """A batch of one: losses of a log-normal or a Pareto distribution, and norms that go with them."""
    sigma, tail, pareto = r.uniform(0.6, 1.4), r.uniform(1.3, 3), r.random() < 0.5
    for at in range(1, total):
        level = 0.5 + 1.5 * math.exp(-at / 300)
        loss = level * (r.paretovariate(tail) if pareto else math.exp(r.gauss(0, sigma)))
        yield {"loss": loss, "grad_norm": norms(r, 0.3 * loss, 0.5), "lr": 1e-5}


def grouped(r: random.Random, total: int) -> Iterator[Row]:
    """Rows in the order of their source: neighbouring batches are alike, and the loss wanders."""
    rho, sigma, noise = r.uniform(0.8, 0.99), r.uniform(0.15, 0.5), r.uniform(0.03, 0.15)
    at_log = 0.0
    for at in range(1, total):
        at_log = rho * at_log + r.gauss(0, sigma * math.sqrt(1 - rho**2))
        level = (1.5 + 1.5 * math.exp(-at / 200)) * math.exp(at_log)
        norm = norms(r, 0.7 * math.exp(1.5 * at_log), 0.4)
        yield {"loss": level * (1 + r.gauss(0, noise)), "grad_norm": norm, "lr": 2e-5}


def tasks(r: random.Random, total: int) -> Iterator[Row]:
    """Two to four tasks in turn, each for some steps, with losses and norms of their own."""
    count, length = r.randint(2, 4), r.choice((1, 2, 5, 10, 20, 50, 80))
    levels = [math.exp(r.uniform(-1.6, 1.6)) for _ in range(count)]
    steep = [r.uniform(0.2, 0.8) for _ in range(count)]
    for at in range(1, total):
        task = at // length % count
        level = levels[task] * (1 - steep[task] * (1 - math.exp(-at / 400)))
        yield {"loss": level * (1 + r.gauss(0, 0.08)), "grad_norm": norms(r, level, 0.4), "lr": 1e-4}


def rare_task(r: random.Random, total: int) -> Iterator[Row]:
    """A second task with a loss up to five times as high, for a few steps now and then."""
    share, high, left = r.uniform(0.002, 0.01), r.uniform(2, 5), 0
    longest = r.randint(3, 40)
    for at in range(1, total):
        if not left and r.random() < share:
            left = r.randint(1, longest)
        level = (1.0 + 1.5 * math.exp(-at / 250)) * (high if left else 1.0)
        left = max(0, left - 1)
        yield {"loss": level * (1 + r.gauss(0, 0.06)), "grad_norm": norms(r, level, 0.4), "lr": 1e-4}


def densities(r: random.Random, total: int) -> Iterator[Row]:
    """A negative log-likelihood of a density: it crosses zero and goes on falling."""
    end, noise = r.uniform(-6, -0.2), r.uniform(0.05, 0.4)
    pace = r.uniform(100, 800)
    for at in range(1, total):
        level = end + (4.0 - end) * math.exp(-at / pace)
        yield {"loss": level + r.gauss(0, noise), "grad_norm": norms(r, 2.0, 0.6), "lr": cosine(at, total)}


def no_signal(r: random.Random, total: int) -> Iterator[Row]:
    """GRPO: a loss around zero, and steps in which all rewards are equal and the gradient is next to nothing."""
    share = r.uniform(0.0, 0.5)
    for at in range(1, total):
        empty = r.random() < share
        norm = 1e-6 if empty else norms(r, 0.2, 0.5)
        yield {"loss": 0.0 if empty else r.gauss(0, 0.02) + 1e-5 * at, "grad_norm": norm, "lr": 1e-6, "rollout": 1}


def refills(r: random.Random, total: int) -> Iterator[Row]:
    """A shuffle buffer that is filled again now and then, and a file system that is busy for some steps."""
    every, usual, steps, wait = r.randint(200, 800), r.uniform(0.2, 8), r.randint(3, 15), r.uniform(50, 400)
    for at in range(1, total):
        slow = at % every < steps
        data = (wait if slow else usual) * math.exp(r.gauss(0, 0.3))
        yield {"loss": 2 + r.gauss(0, 0.1), "lr": 1e-4, "data_ms": data}


CLEAN: tuple[Callable[[random.Random, int], Iterator[Row]], ...] = (
    pretraining, fine_tuning, small_batches, heavy_tails, warm_up, restarts, curriculum, epochs, spikes, gan, swinging,
    policy, memorised, mixture, blocks, half_precision, loader, cyclic, deep_restarts, harder_data, annealed, rewards,
    targets, single_samples, grouped, tasks, rare_task, densities, no_signal, refills,
)  # fmt: skip


# Planted faults, in a run that is clean before. Each yields rows; the fault begins at ``at``.


def _after(r: random.Random, total: int, at: int, change: Callable[[int, Row], Row]) -> Iterator[Row]:
    base = r.choice((pretraining, fine_tuning, epochs))(r, total)
    for number, row in enumerate(base, 1):
        yield change(number - at, row) if number >= at else row


def diverges_fast(r: random.Random, total: int, at: int) -> Iterator[Row]:
    pace = r.uniform(5, 20)
    return _after(r, total, at, lambda s, row: {**row, "loss": row["loss"] * min(50.0, math.exp(s / pace))})


def diverges_slowly(r: random.Random, total: int, at: int) -> Iterator[Row]:
    over, top = r.uniform(80, 200), r.uniform(3, 6)
    return _after(r, total, at, lambda s, row: {**row, "loss": row["loss"] * (1 + (top - 1) * min(1.0, s / over))})


def jumps_to_chance(r: random.Random, total: int, at: int) -> Iterator[Row]:
    return _after(r, total, at, lambda s, row: {**row, "loss": 10.8 + r.gauss(0, 0.05)})


def diverges_from_the_start(r: random.Random, total: int, at: int) -> Iterator[Row]:
    """A learning rate that is too high: nothing is ever learned."""
    begin, pace, noise = r.uniform(1, 11), r.uniform(8, 40), r.uniform(0.02, 0.2)
    for number in range(1, total):
        level = begin * min(1e4, math.exp(max(0, number - at) / pace))
        yield {"loss": level * (1 + r.gauss(0, noise)), "grad_norm": norms(r, level, 0.3), "lr": 1e-2}


def diverges_in_warm_up(r: random.Random, total: int, at: int) -> Iterator[Row]:
    """The learning rate is still rising when the loss turns, and rises past where it began."""
    over, top, noise = r.uniform(20, 150), r.uniform(1.1, 3), r.uniform(0.02, 0.1)
    start, floor = r.uniform(7, 11), r.uniform(2, 4)
    for number in range(1, total):
        level = floor + (start - floor) * min(number, at) ** -0.35
        level += (start * top - level) * min(1.0, max(0, number - at) / over)
        norm = norms(r, 1.0 + max(0, number - at) / over, 0.3)
        yield {"loss": level * (1 + r.gauss(0, noise)), "grad_norm": norm, "lr": 1e-3 * min(1.0, number / (at + 100))}


def becomes_nan(r: random.Random, total: int, at: int) -> Iterator[Row]:
    return _after(r, total, at, lambda s, row: {**row, "loss": math.nan, "grad_norm": math.nan})


def explodes(r: random.Random, total: int, at: int) -> Iterator[Row]:
    by = r.uniform(30, 1000)
    return _after(r, total, at, lambda s, row: {**row, "grad_norm": row["grad_norm"] * by})


def collapses(r: random.Random, total: int, at: int) -> Iterator[Row]:
    to = r.choice((0.0, 1e-9, 1e-6))
    return _after(r, total, at, lambda s, row: {**row, "grad_norm": row["grad_norm"] * to})


def goes_flat(r: random.Random, total: int, at: int) -> Iterator[Row]:
    for number in range(1, total):
        level = 2.0 + 3.0 * math.exp(-min(number, at) / 150)
        yield {"loss": level * (1 + r.gauss(0, 0.02)), "grad_norm": norms(r, 1.0, 0.3), "lr": 1e-4}


def scaler_sinks(r: random.Random, total: int, at: int) -> Iterator[Row]:
    for number, row in enumerate(half_precision(r, total), 1):
        if number >= at:
            row = {**row, "overflow": True, "loss_scale": max(1.0, 65536 / 2 ** (number - at)), "grad_norm": math.inf}
        yield row


def scaler_skips(r: random.Random, total: int, at: int) -> Iterator[Row]:
    for number, row in enumerate(half_precision(r, total), 1):
        yield {**row, "overflow": r.random() < 0.4, "loss_scale": 256.0} if number >= at else row


def waits_for_data(r: random.Random, total: int, at: int) -> Iterator[Row]:
    wait, workers = r.uniform(60, 400), r.choice((1, 1, 4, 8))
    for number, row in enumerate(loader(r, total), 1):
        slow = number >= at and number % workers == 0
        yield {**row, "data_ms": wait * workers} if slow else row


FAULTS: tuple[tuple[Callable[[random.Random, int, int], Iterator[Row]], tuple[str, ...]], ...] = (
    (diverges_fast, ("diverging_loss",)),
    (diverges_slowly, ("diverging_loss",)),
    (jumps_to_chance, ("diverging_loss",)),
    (diverges_from_the_start, ("diverging_loss",)),
    (diverges_in_warm_up, ("diverging_loss",)),
    (becomes_nan, ("nan_loss",)),
    (explodes, ("gradient_explosion",)),
    (collapses, ("gradient_collapse",)),
    (goes_flat, ("loss_plateau",)),
    (scaler_sinks, ("scaler_floor",)),
    (scaler_skips, ("scaler_skipping", "scaler_floor")),
    (waits_for_data, ("input_bound",)),
)
