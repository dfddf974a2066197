"""Raw marks and notes that the training thread records and the publisher thread interprets."""

from dataclasses import dataclass, field
from time import perf_counter_ns, time_ns
from typing import Any, NamedTuple


def wall_offset_ns() -> int:
    """Return what to add to ``time.perf_counter_ns`` for nanoseconds since the epoch.

    A pause between the two clocks' readings would shift all marks: of five pairs the fastest counts.
    """
    looks = [(perf_counter_ns(), time_ns(), perf_counter_ns()) for _ in range(5)]
    before, now, after = min(looks, key=lambda look: look[2] - look[0])
    return now - (before + after) // 2


class Mark(NamedTuple):
    """The beginning of a phase, which ends the previous one."""

    phase: str
    """Empty: the previous phase continues, and only the peak in ``memory`` counts (the script reset its counters)."""
    ns: int
    """``time.perf_counter_ns``."""
    memory: Any
    """The memory back end's raw sample, with peaks since the previous mark; None: use the next mark's figures.
    The same object as in an earlier mark: nothing was measured in between."""
    event: Any
    """A recorded CUDA event, or None; if ``memory`` is None too, use the next mark's event."""
    collectives: int
    """Collective calls entered so far."""
    collective_ns: int
    """Host time spent in collective calls so far."""


class Counts(NamedTuple):
    """Counts of one micro-batch, by the training loop."""

    tokens: int
    """Tokens without padding."""
    label_tokens: int
    pairs: int
    """Pairs of query and key that attention computes within documents; 0: not known."""
    longest: int
    """Tokens of the longest document; 0: not known."""
    samples: int | None = None
    """Rows; None: as many as the forward's batch has."""


class BatchesNoted(NamedTuple):
    """State of the notes on batches: samples and tokens, lengths of ``Notes.tokens`` and ``labels``, the shape."""

    samples: int = 0
    padded_tokens: int = 0
    tokens: int = 0
    labels: int = 0
    shape: list[int] = []  # noqa: RUF012


@dataclass(slots=True)
class Part:
    """The updates that one of several engines or optimizers made in a step; the latest figures count."""

    name: str
    count: int = 0
    losses: list[list[Any]] = field(default_factory=list)
    """``Notes.losses`` before each update."""
    accumulation: int = 0
    lr: Any = None
    grad_norm: Any = None
    loss_scale: Any = None
    overflow: bool = False


@dataclass(slots=True, eq=False)
class Notes:
    """Notes of an unfinished step. Numbers may still be in transfer from the device (see ``values``)."""

    losses: list[Any] = field(default_factory=list)
    """Scalars that ``backward`` was called on since the last update of any optimizer."""
    sum_losses: bool = False
    """Whether the losses add up to the step's although an engine updates (a Trainer has divided them)."""
    reported: list[Any] = field(default_factory=list)
    """Losses of micro-steps as the script reported them."""
    trainer_losses: list[Any] = field(default_factory=list)
    """Results of a Trainer's ``training_step``; they add up to the step's loss."""
    accumulation: int = 0
    """Number of micro-steps by which the engine, or a pipeline's schedule, divides losses; 0: neither does."""
    added_ranks: float = 1.0
    """Number of ranks whose losses add up; a rank's loss is multiplied by it, so that their mean is the sum."""
    fetches: dict[int, int] = field(default_factory=dict)
    """Batches fetched for training, by dataloader iterator."""
    fetch_ns: int = 0
    """Host time in dataloaders."""
    parts: dict[int, Part] = field(default_factory=dict)
    """With several engines or optimizers: the updates of each, by its ``id``, in the order of their first ones."""
    owner: int = 0
    """Key of the engine or optimizer whose figures are the step's."""
    labels: list[Any] = field(default_factory=list)
    """Label tensors of the micro-batches whose loss is a mean over them."""
    reported_loss: float | None = None
    lr: Any = None
    grad_norm: Any = None
    loss_scale: Any = None
    overflow: bool = False
    micro_steps: int = 0
    discarded: bool = False
    """Gradients were set to zero after a backward and before any update. The next backward is of the same batch
    (SAM's second pass), or of another one if a batch was fetched."""
    repeats: int = 0
    """Further evaluations of a closure (line search): of the same batch, so no micro-steps."""
    shape: list[int] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    """Counts of micro-batches from the loop itself; they replace the hooks' counts."""
    flops: float | None = None
    """FLOPs of the model, as reported by the loop."""
    samples: int = 0
    padded_tokens: int = 0
    tokens: list[Any] = field(default_factory=list)
    """Token count of each micro-batch, or its mask, which the publisher counts."""
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Waits of the stream for other ranks: the phase, and the CUDA events at both ends."""

    def end_part(self, key: int, name: str) -> None:
        """Move the figures since the last update to the part of the engine or optimizer that has now updated."""
        part = self.parts.get(key)
        if part is None:
            part = self.parts[key] = Part(name)
        part.count += 1
        part.losses.append(self.losses)
        part.lr, part.accumulation = self.lr, self.accumulation
        part.grad_norm, part.loss_scale, part.overflow = self.grad_norm, self.loss_scale, self.overflow
        self.losses, self.accumulation, self.overflow = [], 0, False
        self.lr = self.grad_norm = self.loss_scale = None

    def batches(self) -> BatchesNoted:
        """Return the state of the notes on batches, for ``restore_batches``."""
        return BatchesNoted(self.samples, self.padded_tokens, len(self.tokens), len(self.labels), self.shape)

    def restore_batches(self, before: BatchesNoted) -> None:
        """Remove the batches noted since ``before``: they are not trained on."""
        self.samples, self.padded_tokens, tokens, labels, self.shape = before
        del self.tokens[tokens:], self.labels[labels:]

    def drop_batch(self) -> None:
        """Remove a batch whose gradients were set to zero after its backward: the script left it out."""
        self.discarded, self.micro_steps, self.losses = False, 0, []
        self.restore_batches(BatchesNoted())


class ClosingRaw(NamedTuple):
    """Phases of the training thread after its last step, for the rank's closing record; no update."""

    raw: "StepRaw"


class StepRaw(NamedTuple):
    """One finished optimizer update as the training thread recorded it."""

    number: int
    marks: list[Mark]
    """Marks of the step; the last one is also the next step's first."""
    ended: float
    """Seconds since the epoch at the last mark."""
    notes: Notes
    cost_ns: int
    cpu_ns: int = 0
    """CPU time of the training thread in this step."""
