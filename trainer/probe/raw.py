"""What the training thread hands over: raw marks and notes, made sense of on the publisher thread."""

from typing import Any, NamedTuple


class Mark(NamedTuple):
    """A phase's beginning (and so its predecessor's end)."""

    phase: str
    """Empty: the phase before goes on, and only the peak in ``memory`` counts (the script reset its counters)."""
    ns: int
    """``time.perf_counter_ns``."""
    memory: Any
    """The memory back end's raw sample, its peaks those since the mark before; None: the next mark's figures serve."""
    event: Any
    """A recorded CUDA event, or None; where ``memory`` is None too, the next mark's event serves."""
    collectives: int
    """Collective calls entered so far."""
    collective_ns: int
    """Host time spent in collective calls so far."""


class Notes:
    """What a step in the making has gathered. Numbers may still be on their way from the device (see ``values``)."""

    __slots__ = (
        "grad_norm",
        "loss_scale",
        "losses",
        "lr",
        "micro_steps",
        "overflow",
        "padded_tokens",
        "reported_loss",
        "samples",
        "shape",
        "sum_losses",
        "tokens",
    )

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.sum_losses = False
        """The script divides its micro-steps' losses itself, so they add up to the step's loss."""
        self.reported_loss: float | None = None
        self.lr: Any = None
        self.grad_norm: Any = None
        self.loss_scale: Any = None
        self.overflow = False
        self.micro_steps = 0
        self.shape: list[int] = []
        self.samples = 0
        self.padded_tokens = 0
        self.tokens: list[Any] = []
        """A number for each micro-batch, or its mask, to be counted by the publisher."""


class StepRaw(NamedTuple):
    """One finished optimizer update as the training thread saw it."""

    number: int
    marks: list[Mark]
    """The last one is the step's end and the next step's beginning."""
    ended: float
    """Seconds since the epoch at the last mark."""
    notes: Notes
    cost_ns: int
