"""Runs optimizer steps."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...protocol.text import duration
from .config.schema import Config
from .data.batches import Collate, Then, with_positions
from .distributed import World
from .model import attention
from .model.activations import mark_varying
from .model.attention import cut, on_device
from .model.loss import Batch, addition_weight, causal_model
from .monitor import probe
from .state import StepResult


def make_collate(
    model: Any, config: Config, world: World, padding: Collate, fused_loss: bool, chosen_rows: bool = False
) -> Collate:
    """Return the collation of the model's batches, with those of ``loss.choose_rows`` if asked. All ranks call this."""
    collate, group = padding, world.sequence
    if group.size > 1:
        varlen = attention.set_up_sequence_parallel(model, config, world)
        collate = Then(collate, partial(cut, size=group.size, rank=group.rank))
        collate = Then(collate, partial(attention.isolate, varlen=True)) if varlen else collate
    elif config.data.packing:
        collate = Then(collate, partial(attention.isolate, varlen=attention.set_up(model, config, world)))
    return Then(collate, partial(with_positions, rows=chosen_rows)) if fused_loss else collate


class Stepper:
    """Runs optimizer steps with DeepSpeed's engine on given batches."""

    def __init__(self, config: Config, world: World, engine: Any) -> None:
        self.config = config
        self.world = world
        self.engine = engine
        self._fused_loss = hasattr(causal_model(engine.module), "plain_forward")

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
        micro_batches = self.config.training.micro_steps * self.world.size
        added = addition_weight(engine.module, max(1, label_tokens), micro_batches)
        if self._fused_loss:
            added["loss_factor"] = scale
        skipped_before = engine.skipped_steps
        for fetch in batches:
            with probe().phase("data"):
                fetched = fetch()
                if "counts" in fetched:
                    probe().micro_batch(*fetched.pop("counts").tolist())
                batch = self.prepare(fetched)
            loss: torch.Tensor = engine(**batch, use_cache=False, **added).loss
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


_Pending = tuple[int, torch.Tensor, Any, float, float, int]


class ProgressLines:
    """Prints ``step 10/120  loss 5.1234  lr 1.0e-03  12,345 tokens/s  0.41 s/step`` as the figures become known."""

    def __init__(self, total_steps: int, every: int, world: World) -> None:
        self._total = total_steps
        self._every = every
        self._world = world
        self._waiting: deque[_Pending] = deque()
        self._since = time.perf_counter()
        self._since_step = -1
        self._tokens = 0
        self.last_loss: float | None = None
        self.not_a_number = 0

    def step(self, step: int, result: StepResult, tokens: int) -> None:
        """Process one step; all ranks call this, as the loss is summed over them."""
        if self._since_step < 0:
            self._since_step = step - 1
        self._tokens += tokens
        if step == self._since_step + 1 == 1 or step % self._every == 0 or step == self._total:
            now = time.perf_counter()
            seconds = (now - self._since) / max(1, step - self._since_step)
            rate = self._tokens / max(1e-9, now - self._since)
            mean = result.loss_sum.clone()
            dist.all_reduce(mean)
            mean /= max(1, result.label_tokens)
            ready: Any = None
            if mean.is_cuda:
                # Into page-locked memory: a copy into other memory makes the host wait for the GPU.
                mean = torch.empty((), dtype=mean.dtype, pin_memory=True).copy_(mean, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record()
            self._waiting.append((step, mean, ready, result.lr, seconds, round(rate)))
            self._since, self._since_step, self._tokens = now, step, 0
        self.flush(wait=False)

    def resume(self) -> None:
        """Restart the count of tokens and time, after work other than steps."""
        self._since, self._since_step, self._tokens = time.perf_counter(), -1, 0

    def flush(self, wait: bool = True) -> None:
        """Print the lines whose figures have arrived; with ``wait``, all."""
        while self._waiting:
            step, mean, ready, lr, seconds, rate = self._waiting[0]
            if ready is not None:
                if not wait and not ready.query():
                    return
                ready.synchronize()
            self._waiting.popleft()
            self.not_a_number = 0 if math.isfinite(float(mean)) else self.not_a_number + 1
            self.last_loss = float(mean)
            self._world.log(
                f"step {step}/{self._total}  loss {self.last_loss:.4f}  lr {lr:.2e}  {rate:,} tokens/s  "
                f"{duration(seconds)}/step"
            )
