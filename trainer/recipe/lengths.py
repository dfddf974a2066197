"""Measures several sequence lengths in one process, one after the other, for a sweep with ``one_process``.

Every step at a length uses the same rows: the ends of the data's longest rows, which carry loss (answers). Before each
length the allocator's cache is emptied, so that its peaks are those of a separate process; docs/sweep.md lists the
figures that are not.
"""

import gc
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ...protocol.errors import ConfigError
from .data.collate import Batch
from .data.positions import WithCounts
from .model.loss import IGNORED
from .monitor import probe
from .progress import ProgressLines
from .rehearse import Sampled
from .step import Stepper

Row = dict[str, Any]
"""A row of ``data.pipeline.Rows``: ``input_ids``, ``labels`` and, if packed, ``lengths``."""


def cut(row: Row, length: int) -> Row:
    """Return the last ``length`` tokens of a row; a document that begins before them is shorter."""
    found = {**row, "input_ids": row["input_ids"][-length:], "labels": row["labels"][-length:]}
    if "lengths" in row:
        starts = numpy.cumsum(row["lengths"]) - len(row["input_ids"]) + length
        found["lengths"] = [int(one) for one in numpy.diff(numpy.maximum(starts, 0), prepend=0) if one]
    return found


def long_rows(data: Sampled, count: int, length: int) -> list[Row]:
    """Return ``count`` rows of at least ``length`` tokens; shorter packed rows are joined.

    Raises:
        ConfigError: the data have no such rows.
    """
    found: list[Row] = []
    for number in data.longest(len(data.examples.rows)):
        row: Row = data.examples.rows[number]
        if found and "lengths" in row and len(found[-1]["input_ids"]) < length:
            last = found.pop()
            row = {
                "input_ids": numpy.concatenate([last["input_ids"], row["input_ids"]]),
                "labels": numpy.concatenate([last["labels"], row["labels"]]),
                "lengths": [*last["lengths"], *row["lengths"]],
            }
        found.append(row)
        if len(found) == count and len(row["input_ids"]) >= length:
            break
    if len(found) < count or any(len(row["input_ids"]) < length for row in found):
        raise ConfigError(
            f"debug.lengths: the data have no {count} rows of {length} tokens; use data.packing=true, longer or more "
            "documents"
        )
    return found


def label_tokens(row: Row) -> int:
    """Return the number of labels of a row that carry loss: those after a document's first position."""
    learned = numpy.asarray(row["labels"]) != IGNORED
    starts = numpy.cumsum([0, *row.get("lengths", [len(learned)])[:-1]])
    learned[starts] = False
    return int(learned.sum())


def measure_lengths(stepper: Stepper, data: Sampled, total_steps: int) -> None:
    """Run ``training.max_steps`` steps at each of ``debug.lengths``. All ranks call this.

    Raises:
        ConfigError: the data have no rows of the longest length.
        torch.OutOfMemoryError: a length does not fit; earlier ones have been measured.
    """
    config, world = stepper.config, stepper.world
    micro_batch, accumulation = config.training.micro_batch, config.training.grad_accumulation
    rows = long_rows(data, micro_batch * accumulation * world.data_ranks, max(config.debug.lengths))
    collate = WithCounts(data.collate, world.sequence)
    lines = ProgressLines(total_steps, config.output.log_every, world)
    probe().plan(total_steps, 0.0, "")
    probe().normalise_over_ranks()
    stepper.engine.train()
    step = 0

    def fetch(own: list[Row]) -> Callable[[], Batch]:
        return lambda: collate(own)

    for length in config.debug.lengths:
        cut_rows = [cut(row, length) for row in rows]
        starts = [(micro * world.data_ranks + world.data_rank) * micro_batch for micro in range(accumulation)]
        fetches = [fetch(cut_rows[start : start + micro_batch]) for start in starts]
        labels = sum(label_tokens(row) for row in cut_rows)
        stepper.engine.zero_grad()
        gc.collect()
        if world.on_gpu:
            torch.cuda.empty_cache()
        for _ in range(config.training.max_steps):
            step += 1
            lines.step(step, stepper.train_step(fetches, labels), length * len(rows))
    lines.flush()
    world.barrier()
    world.log(f"measured {len(config.debug.lengths)} lengths, {step} steps; nothing is kept")
