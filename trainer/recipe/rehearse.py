"""Rehearses a run before its first step: runs the work with the highest memory use, and restores all state.

The micro-batch of the longest examples runs forward, backward and optimizer, and the largest evaluation batch a
forward. Then the disk's space is compared with what the run will write, and a sample of each file of a checkpoint is
written, read back, compared and deleted. The update has a learning rate of 0, so no weight changes; optimizer states,
the schedule, the loss scale, counters and random state are restored. A run that resumes is rehearsed before its
checkpoint is loaded. Errors that would occur hours later occur now.
"""

import gc
import random
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from ...protocol.errors import ConfigError, FtmonError
from ...protocol.text import duration
from .checkpoint.save import Checkpoints, rehearse_checkpoint
from .data.batches import Collate, WithCounts
from .data.pipeline import Examples
from .distributed import World
from .engine import forget_module_order
from .evaluation.evaluate import Evaluator
from .model.activations import compile_ahead
from .model.loss import IGNORED, Batch
from .monitor import activity, probe
from .state import TrainState
from .step import ProgressLines, Stepper

_TRIES = 24  # Limit of updates with overflowing fp16 gradients, each of which halves the loss scale
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "_is_gradient_accumulation_boundary")


class Sampled(NamedTuple):
    """Training examples, and their collation."""

    examples: Examples
    collate: Collate

    def longest(self, count: int) -> list[int]:
        """Return the numbers of the ``count`` longest rows, longest first; fewer if there are fewer."""
        tokens = self.examples.tokens.tolist()
        return sorted(range(len(tokens)), key=lambda row: (-tokens[row], row))[:count]

    def batch(self, rows: list[int]) -> Batch:
        """Return a batch of some rows."""
        return self.collate([self.examples.rows[row] for row in rows])


class Writing(NamedTuple):
    """What a run will write."""

    checkpoints: Checkpoints
    state: TrainState
    steps: range  # The steps to be trained
    model_bytes: int  # Size of the final model; 0: none is written


def rehearse(stepper: Stepper, data: Sampled, evaluator: Evaluator | None, writing: Writing) -> None:
    """Rehearse a run that has done no step in this process. All ranks call this.

    A loss that is not a number, or a checkpoint that cannot be written, is an ``FtmonError``; an out-of-memory error
    gets a note that names the rows.
    """
    config, world = stepper.config, stepper.world
    began = time.perf_counter()
    rows = data.longest(config.training.micro_batch)
    longest = int(data.examples.tokens[rows[0]])
    what = f"{len(rows)} x {longest:,} tokens (training rows {_listed(rows)})"
    parts = [f"a step on the longest micro-batch, {what}"]
    parts += ["the largest evaluation batch"] if evaluator is not None else []
    parts += ["a sample of a checkpoint written and read back"] if config.checkpoint.rehearse else []
    world.log(f"rehearsal: {'; '.join(parts)}")
    with probe().rehearsal(), activity("rehearsal", parts[0], total=len(parts)) as progress, _restored(stepper):
        with _named(f"the longest micro-batch, {what}", "training.micro_batch or training.sequence_length"):
            _step(stepper, data, rows)
        if evaluator is not None:
            progress.send(1, parts[1])
            with _named("the largest evaluation batch", "evaluation.micro_batch"):
                evaluator.loss(most_batches=1)
        written = ""
        if config.checkpoint.rehearse:
            progress.send(len(parts) - 1, parts[-1])
            with _named("a checkpoint", "nothing: set checkpoint.rehearse=false"):
                checkpoints, state, steps, model_bytes = writing
                written = rehearse_checkpoint(checkpoints, state, config, world, steps, model_bytes)
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated" if world.on_gpu else ""
    world.log(f"rehearsal: {what} fits: {duration(time.perf_counter() - began)}{peak}{written}")


def compile_first(stepper: Stepper, data: Sampled, model: Any) -> None:
    """Compile the layers for ``model.compile`` before the first step, also of a resumed run. All ranks call this."""
    rows = data.longest(stepper.config.training.micro_batch)
    stepper.engine.train()
    with probe().rehearsal(), _same_random_numbers(stepper.world):
        batch = stepper.prepare(data.batch(rows))
        compile_ahead(model, batch, stepper.world, required=stepper.config.model.compile == "layers")
    forget_module_order(stepper.engine)


def _step(stepper: Stepper, data: Sampled, rows: list[int]) -> None:
    """Run an optimizer step on copies of one micro-batch, with ZeRO-3 possibly two."""
    config, engine = stepper.config, stepper.engine
    batch = data.batch(rows)
    label_tokens = int(data.examples.label_tokens[rows].sum())
    # With accumulation, memory is highest in the second micro-step, with the gradients of the first.
    micro_steps = min(2, config.training.micro_steps)

    def fetch(last: bool) -> Batch:
        engine.set_gradient_accumulation_boundary(last)
        return batch

    fetches = [partial(fetch, number == micro_steps - 1) for number in range(micro_steps)]
    with torch.no_grad():
        losses: torch.Tensor = engine(**stepper.prepare(batch), use_cache=False).loss.double()
    # All ranks or none: a slice of the rows may be the only one with such a loss.
    dist.all_reduce(losses)
    loss = float(losses)
    if not numpy.isfinite(loss):
        # An update would propagate it to the weights even with a learning rate of 0.
        raise FtmonError(
            f"rehearsal: the loss of training rows {_listed(rows)} is {loss}; look at them and at the model"
        )
    # ZeRO-3 prefetches and keeps parameters only from its second forward and backward on.
    for _ in range(2 if config.zero.stage == 3 and micro_steps == 1 else 1):
        for _ in range(_TRIES):
            for group in engine.basic_optimizer.param_groups:
                group["lr"] = 0.0  # the schedule sets it after each update
            if not stepper.train_step(fetches, label_tokens * micro_steps * stepper.world.data_ranks).skipped:
                break


@contextmanager
def _restored(stepper: Stepper) -> Generator[None]:
    """Restore, at the end, all state that a step with a learning rate of 0 changes."""
    engine = stepper.engine
    optimizer: Any = engine.basic_optimizer
    numbers = [
        {name: value for name, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]
    states = {id(parameter): _kept(state) for parameter, state in optimizer.state.items()}
    counters = {name: getattr(engine, name) for name in _COUNTERS if hasattr(engine, name)}
    schedule = engine.lr_scheduler.state_dict()
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    scale = dict(vars(scaler)) if scaler is not None else {}
    engine.train()
    try:
        with _same_random_numbers(stepper.world):
            yield
    finally:
        engine.zero_grad()
        for group, values in zip(optimizer.param_groups, numbers, strict=True):
            for name, value in list(group.items()):
                if isinstance(value, int | float):
                    # A number that was added counts steps (DeepSpeed's FusedAdam).
                    group[name] = values.get(name, 0)
        for parameter, state in optimizer.state.items():
            _put_back(state, states.get(id(parameter), {}))
        engine.lr_scheduler.load_state_dict(schedule)
        for name, value in counters.items():
            setattr(engine, name, value)
        if scaler is not None:
            vars(scaler).update(scale)


@contextmanager
def _same_random_numbers(world: World) -> Generator[None]:
    generators = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    on_device = torch.cuda.get_rng_state(world.device) if world.on_gpu else None
    try:
        yield
    finally:
        random.setstate(generators[0])
        numpy.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, world.device)


def _kept(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the non-zero part of one parameter's optimizer state, small before the first step."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or bool(value.any())
    }


def _put_back(state: dict[str, Any], kept: dict[str, Any]) -> None:
    # In place: DeepSpeed keeps references to these tensors for its checkpoints.
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            value.copy_(kept[name]) if name in kept else value.zero_()
        elif isinstance(value, int | float):
            state[name] = kept.get(name, 0)


@contextmanager
def _named(what: str, setting: str) -> Generator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            note = (
                f"rehearsal: out of memory on {what}; lower {setting}, or see docs/training.md, Speed and memory; "
                "'ftmon predict CONFIG.yaml --what-if' says which changes would fit"
            )
            print(note, flush=True)
            error.add_note(note)
        raise


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


Row = dict[str, Any]  # A row of ``data.pipeline.Rows``: ``input_ids``, ``labels`` and, if packed, ``lengths``


def cut(row: Row, length: int) -> Row:
    """Return the last ``length`` tokens of a row; a document that begins before them is shorter."""
    found = {**row, "input_ids": row["input_ids"][-length:], "labels": row["labels"][-length:]}
    if "lengths" in row:
        starts = numpy.cumsum(row["lengths"]) - len(row["input_ids"]) + length
        found["lengths"] = [int(one) for one in numpy.diff(numpy.maximum(starts, 0), prepend=0) if one]
    return found


def long_rows(data: Sampled, count: int, length: int) -> list[Row]:
    """Return ``count`` rows of at least ``length`` tokens (else ``ConfigError``); shorter packed rows are joined."""
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
    """Run ``training.max_steps`` steps at each of ``debug.lengths``, for a sweep. All ranks call this.

    Every step at a length uses the same rows: the ends of the data's longest rows, which carry loss (answers). Before
    each length the allocator's cache is emptied, so that its peaks are those of a separate process; docs/sweep.md lists
    the figures that are not. Data without rows of the longest length are a ``ConfigError``; if a length does not fit,
    earlier ones have been measured.
    """
    config, world = stepper.config, stepper.world
    micro_batch, accumulation = config.training.micro_batch, config.training.micro_steps
    rows = long_rows(data, micro_batch * accumulation * world.data_ranks, max(config.debug.lengths))
    collate = WithCounts(data.collate, world.sequence)
    lines = ProgressLines(total_steps, config.output.log_every, world)
    probe().plan(total_steps, 0.0, "")
    probe().normalise_over_ranks()
    stepper.engine.train()
    step = 0
    for length in config.debug.lengths:
        cut_rows = [cut(row, length) for row in rows]
        starts = [(micro * world.data_ranks + world.data_rank) * micro_batch for micro in range(accumulation)]
        fetches = [partial(collate, cut_rows[start : start + micro_batch]) for start in starts]
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
