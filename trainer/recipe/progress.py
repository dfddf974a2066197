"""Prints progress lines on rank 0's standard output without making the training thread wait for the GPU."""

import math
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ...protocol.text import duration
from .engine.distributed import World
from .state import StepResult

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
        """The last loss printed, over all ranks."""
        self.not_a_number = 0
        """Number of latest printed losses in a row that are not finite."""

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
