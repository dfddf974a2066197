"""The loss of a step, as the script optimises it, from the scalars that ``backward`` was called on.

A step's gradient is the sum of the gradients of all its backward passes, so their losses add up: a script that
accumulates divides each by the number of micro-batches. An engine, or a pipeline's schedule, divides them itself.
"""

from collections.abc import Sequence
from typing import Any

from ....protocol.messages.telemetry import Update
from ..device import cuda
from ..phases.tracker import Notes, Part


def step_loss(notes: Notes) -> float | None:
    """Return a step's loss; None if it had none that could be read. The device must have finished the step.

    What the script reported counts first, then what a Trainer's ``training_step`` returned. A micro-batch may go
    backward in parts: the micro-steps of ``notes`` are corrected.
    """
    if notes.trainer_losses:
        notes.micro_steps = len(notes.trainer_losses)
    if notes.accumulation > 1:  # a pipeline's stage goes backward once for each of its outputs
        notes.micro_steps = min(notes.micro_steps, notes.accumulation)
    if notes.reported_loss is not None:
        return notes.reported_loss
    if reported := _read_all(notes.reported):
        return sum(reported) / len(reported)
    if whole := _read_all(notes.trainer_losses):
        return sum(whole)
    return _combine(notes.losses, notes.accumulation, notes)


def updates(notes: Notes) -> dict[int, Update]:
    """Return the figures of each of several engines or optimizers, by key, in the order of their first updates.

    With one backward before two updates, the first update has the loss and the clipped norm.
    """
    return {key: _update(part, notes) for key, part in notes.parts.items()}


def _update(part: Part, notes: Notes) -> Update:
    found = [_combine(losses, part.accumulation, notes) for losses in part.losses]
    known = [loss for loss in found if loss is not None]
    return Update(
        name=part.name,
        count=part.count,
        micro_steps=sum(map(len, part.losses)),
        loss=sum(known) / len(known) if known else None,
        lr=cuda.read(part.lr),
        grad_norm=cuda.read(part.grad_norm),
        loss_scale=cuda.read(part.loss_scale),
        overflow=bool(cuda.read(part.overflow)),
    )


def _combine(losses: Sequence[Any], accumulation: int, notes: Notes) -> float | None:
    found = _read_all(losses)
    if not found:
        return None
    divisor = 1 if notes.sum_losses or not accumulation else min(accumulation, len(found))
    return sum(found) * notes.added_ranks / divisor


def _read_all(fetched: Sequence[Any]) -> list[float]:
    return [value for value in map(cuda.read, fetched) if value is not None]
