"""Finds by dry runs the largest sequence length and micro-batch that fit each kind of GPU, or a capacity."""

import argparse
from collections.abc import Callable, Sequence

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates import largest
from ...protocol.host.gpus import FIT_TABLE
from ...protocol.text import counted
from . import answer, ranks, what_if
from .jobs import Prepared
from .result import Holds, Point, Prediction

CONFIRMED = (0.99, 0.97, 0.95)
"""Shares of a fitting length that must fit, too: memory does not grow evenly with the length."""
_MOST_TOKENS = 1 << 24
"""Maximum tokens of a micro-batch."""
_MOST_POSITIONS = 1 << 20
"""Maximum length if a model's own is not known."""
_MOST_ROWS = 1024

Run = Callable[[list[int]], dict[int, Point]]
"""Predicts values of one axis."""


def add(
    found: Prediction,
    job: Prepared,
    arguments: argparse.Namespace,
    allocator: Settings,
    tell: Callable[[str], None],
) -> Prediction:
    """Return a prediction with the largest lengths and micro-batches that fit, and the curves over both.

    If ranks differ, only those are run that need most at one of the points.

    Args:
        found: prediction of the unchanged run.
        job: the unchanged run.
        arguments: arguments of the command; a capacity replaces the kinds of GPU.
        allocator: settings of the run.
        tell: called with the planned runs before each round.

    Raises:
        ConfigError: a dry run was refused.
    """
    longest = max(found.points, key=lambda point: point.sequence_length)
    highest = {max(point.ranks, key=lambda rank: rank.needed_bytes).rank for point in found.points}
    run = ranks.differing(job.stage, job.ranks)
    only = sorted({ranks.nearest(run, rank) for rank in highest})
    given = argparse.Namespace(**{**vars(arguments), "sequence_length": [longest.sequence_length]})

    def lengths(values: list[int]) -> dict[int, Point]:
        tell(f"the largest sequence length: {_candidates(values)}")
        points = answer.predict(job._replace(lengths=values), arguments.capacity, only=only).points
        return {point.sequence_length: point for point in points}

    def micro_batches(values: list[int]) -> dict[int, Point]:
        points: dict[int, Point] = {}
        for number, rows in enumerate(values, 1):
            tell(f"the largest micro-batch: candidate {rows:,} ({number} of {len(values)} in this round)")
            changes = (f"--micro-batch={rows}", f"--accumulation={job.accumulation}")
            if arguments.config:
                changes = (f"training.micro_batch={rows}", "training.total_batch=0")
            other = what_if.changed(given, allocator, changes)()
            (points[rows],) = answer.predict(other, arguments.capacity, only=only).points
        return points

    positions = min(found.positions or _MOST_POSITIONS, _MOST_TOKENS // job.micro_batch)
    rows = min(_MOST_ROWS, max(1, _MOST_TOKENS // longest.sequence_length))
    by_length = {point.sequence_length: point for point in found.points}
    by_rows = {job.micro_batch: longest}
    kinds = _kinds(job, arguments.capacity)
    long = _search(largest.round_numbers(positions, job.sequence_parallel_size), kinds, lengths, by_length, CONFIRMED)
    wide = _search(range(1, rows + 1), kinds, micro_batches, by_rows)
    return msgspec.structs.replace(
        found,
        largest=[
            Holds(gpu, capacity, length, batch)
            for (gpu, capacity), length, batch in zip(kinds, long, wide, strict=True)
        ],
        pieces=answer.curve(by_length),
        batch_pieces=answer.curve(by_rows),
    )


def _candidates(values: Sequence[int]) -> str:
    shown = ", ".join(f"{value:,}" for value in values[:4])
    return f"{counted(len(values), 'candidate')} ({shown}{', ...' if len(values) > 4 else ''})"


def _kinds(job: Prepared, capacity: int | None) -> list[tuple[str, int]]:
    """Return the kinds of GPU, and the limit of PyTorch's reserved memory on each."""
    if capacity is not None:
        return [("", capacity)]
    return [(gpu.title, gpu.memory_bytes - round(answer.beside(job, gpu).value)) for gpu in FIT_TABLE]


def _search(
    values: Sequence[int],
    kinds: list[tuple[str, int]],
    run: Run,
    points: dict[int, Point],
    confirm: Sequence[float] = (),
) -> list[largest.Largest]:
    """Search one axis; ``points`` has the known points, and receives the new ones."""

    def needs(asked: list[int]) -> list[largest.Need]:
        new = [value for value in asked if value not in points]
        points.update(run(new) if new else {})
        return [_need(points[value], kinds) for value in asked]

    return largest.largest_that_fit(values, [capacity for _, capacity in kinds], needs, confirm)


def _need(point: Point, kinds: list[tuple[str, int]]) -> largest.Need:
    # With a capacity, the allocator's own verdict counts.
    fits = [bool(point.fits) if not gpu else point.needed_bytes <= capacity for gpu, capacity in kinds]
    return largest.Need(point.needed_bytes, fits)
