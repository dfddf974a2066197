"""Runs optimizer steps."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from .config.schema import Config
from .data.collate import Batch, Collate, Then
from .data.positions import with_positions
from .data.slices import cut
from .engine.distributed import World
from .model import attention, sequence_parallel
from .model.compiling import mark_varying
from .model.inputs import on_device
from .monitor import probe
from .state import StepResult


def make_collate(model: Any, config: Config, world: World, padding: Collate, fused_loss: bool) -> Collate:
    """Return the collation that makes the model's batches. All ranks call this."""
    collate, group = padding, world.sequence
    if group.size > 1:
        varlen = sequence_parallel.set_up(model, config, world)
        collate = Then(collate, partial(cut, size=group.size, rank=group.rank))
        collate = Then(collate, partial(attention.isolate, varlen=True)) if varlen else collate
    elif config.data.packing:
        collate = Then(collate, partial(attention.isolate, varlen=attention.set_up(model, config, world)))
    return Then(collate, with_positions) if fused_loss else collate


class Stepper:
    """Runs optimizer steps with DeepSpeed's engine on given batches."""

    def __init__(self, config: Config, world: World, engine: Any) -> None:
        self.config = config
        self.world = world
        self.engine = engine

    def train_step(self, batches: Iterable[Callable[[], Batch]], label_tokens: int) -> StepResult:
        """Run one optimizer step on the mean loss over ``label_tokens``.

        ``batches`` has a function for each micro-step that fetches this rank's micro-batch; ``label_tokens`` are those
        of all ranks together.

        DeepSpeed averages gradients over ranks, so the loss is scaled by their number; micro-steps are summed. Ranks
        that share sequences sum the losses of their slices.
        """
        engine = self.engine
        lr = float(engine.get_lr()[0])
        scale = self.world.size / max(1, label_tokens)
        loss_sum = torch.zeros((), device=self.world.device)
        skipped_before = engine.skipped_steps
        for fetch in batches:
            with probe().phase("data"):
                fetched = fetch()
                if "counts" in fetched:
                    probe().micro_batch(*fetched.pop("counts").tolist())
                batch = self.prepare(fetched)
            loss: torch.Tensor = engine(**batch, use_cache=False).loss
            loss_sum += loss.detach()
            engine.backward(loss * scale, scale_wrt_gas=False)
            engine.step()
        return StepResult(loss_sum, label_tokens, lr, engine.skipped_steps > skipped_before)

    def prepare(self, batch: Batch) -> dict[str, Any]:
        """Return a collated batch on the device, as the model's arguments."""
        moved = on_device(batch, self.world)
        if self.config.model.compile != "off":
            mark_varying(moved)
        return moved
