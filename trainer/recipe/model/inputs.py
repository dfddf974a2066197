"""Converts collated batches to the model's arguments."""

from typing import Any

from ..data.collate import Batch
from ..data.slices import ROWS_KEY
from ..engine.distributed import World
from . import attention, sequence_parallel


def on_device(batch: Batch, world: World) -> dict[str, Any]:
    """Return a collated batch on the device, with the arguments of attention."""
    moved = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items() if name != ROWS_KEY}
    if world.sequence.size > 1:
        return sequence_parallel.arguments(moved, world.sequence)
    return attention.attention_arguments(moved)
