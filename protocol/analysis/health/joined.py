"""The steps of all ranks joined by step number: one row per step of the run, with means over ranks."""

from dataclasses import dataclass
from math import isfinite

from ...messages.telemetry import Step

LAG = 16
"""A step is returned without waiting for more ranks once the newest step is this many steps ahead."""
REPEATS = 3
"""If ranks send this many step numbers twice, rows of several engines or optimizers alternate."""


@dataclass(slots=True)
class JoinedStep:
    """One step of the run; a figure is None if no rank sent a finite one."""

    step: int
    loss: float | None = None
    """Mean over the ranks with a finite loss."""
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    overflow: bool = False
    rollout: bool = False
    """Whether the step generated its own training data (reinforcement learning)."""
    ranks: int = 0
    _losses: int = 0

    def add(self, step: Step) -> None:
        """Add one rank's step."""
        self.ranks += 1
        loss, norm = step.loss, step.grad_norm
        if loss is not None and isfinite(loss):
            self._losses += 1
            self.loss = loss if self.loss is None else self.loss + (loss - self.loss) / self._losses
        if norm is not None and isfinite(norm):
            self.grad_norm = norm if self.grad_norm is None else max(self.grad_norm, norm)
        if step.lr is not None:
            self.lr = step.lr
        if step.loss_scale is not None:
            self.loss_scale = step.loss_scale
        if step.overflow:
            self.overflow = True
        if not self.rollout:
            for record in step.phases:
                if record.name == "generate":
                    self.rollout = True


class Join:
    """Joins the steps of ``ranks``."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.alternating = False
        """Whether several engines or optimizers train in one loop, so that their losses are not one series."""
        self._open: dict[int, JoinedStep] = {}
        self._last: dict[int, int] = {}
        self._repeats = 0
        self._passed = 0

    def add(self, step: Step) -> list[JoinedStep]:
        """Add one rank's step; return the steps that are complete now, ascending."""
        if len(step.updates) > 1:
            self.alternating = True
        last = self._last.get(step.rank)
        if last == step.step:
            self._repeats += 1
            self.alternating = self.alternating or self._repeats >= REPEATS
            return []
        self._last[step.rank] = step.step
        self.ranks.add(step.rank)
        if step.step <= self._passed:
            return []  # from a straggler whose step was returned without it
        row = self._open.get(step.step)
        if row is None:
            row = self._open[step.step] = JoinedStep(step.step)
        row.add(step)
        late, ranks = step.step - LAG, len(self.ranks)
        if row.ranks < ranks and min(self._open) > late:
            return []
        if len(self._open) == 1:
            self._passed = step.step
            del self._open[step.step]
            return [row]
        self._passed = newest = max(
            number for number, one in self._open.items() if one.ranks >= ranks or number <= late
        )
        return [self._open.pop(number) for number in sorted(self._open) if number <= newest]

    def drop(self, rank: int) -> None:
        """Stop waiting for a rank."""
        self.ranks.discard(rank)
        self._last.pop(rank, None)
