"""Progress lines on rank 0's standard output, without making the training thread wait for the GPU."""

import time
from collections import deque
from typing import Any

import torch

from ...protocol.text import duration

_Pending = tuple[int, torch.Tensor, Any, float, float, int]


class ProgressLines:
    """Prints ``step 10/120  loss 5.1234  lr 1.0e-03  12,345 tokens/s  0.41 s/step`` as the figures become known."""

    def __init__(self, total_steps: int, every: int, ranks: int, silent: bool) -> None:
        self._total = total_steps
        self._every = every
        self._ranks = ranks
        self._silent = silent
        self._waiting: deque[_Pending] = deque()
        self._since = time.perf_counter()
        self._since_step = -1
        self._tokens = 0

    def step(self, step: int, losses: list[torch.Tensor], lr: float, tokens: int) -> None:
        """Take in one step: its micro-steps' losses (still on the device), and this rank's tokens."""
        if self._silent:
            return
        if self._since_step < 0:
            self._since_step = step - 1
        self._tokens += tokens
        if step == self._since_step + 1 == 1 or step % self._every == 0 or step == self._total:
            now = time.perf_counter()
            seconds = (now - self._since) / max(1, step - self._since_step)
            rate = self._tokens * self._ranks / max(1e-9, now - self._since)
            mean = torch.stack(losses).mean()
            ready: Any = None
            if mean.is_cuda:
                # Into page-locked memory: a copy into any other makes the host wait for the GPU.
                mean = torch.empty((), dtype=mean.dtype, pin_memory=True).copy_(mean, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record()
            self._waiting.append((step, mean, ready, lr, seconds, round(rate)))
            self._since, self._since_step, self._tokens = now, step, 0
        self.flush(wait=False)

    def flush(self, wait: bool = True) -> None:
        """Print what is known by now; with ``wait``, everything."""
        while self._waiting:
            step, mean, ready, lr, seconds, rate = self._waiting[0]
            if ready is not None:
                if not wait and not ready.query():
                    return
                ready.synchronize()
            self._waiting.popleft()
            print(
                f"step {step}/{self._total}  loss {float(mean):.4f}  lr {lr:.2e}  {rate:,} tokens/s  "
                f"{duration(seconds)}/step",
                flush=True,
            )
