"""The message of a rank whose allocation failed: everything it knows of that moment itself.

All of ``telemetry`` holds here too; the message is part of it, and only its length put it into a file of its own.
"""

from typing import Literal, get_args

import msgspec

from .blocks import MemoryMeasure, SegmentUse, StackGroup
from .bounds import Rank, Time, Whole

OptimizerImplementation = Literal["", "foreach", "fused", "for-loop"]


class Oom(msgspec.Struct, tag="oom", frozen=True, omit_defaults=True):
    """An allocation failed because memory ran out: the allocator's numbers at that moment."""

    rank: Rank
    step: Whole
    phase: str
    time: Time
    requested_bytes: Whole
    device_free_bytes: Whole
    device_total_bytes: Whole
    allocated_bytes: Whole
    reserved_bytes: Whole
    batch_shape: list[Whole] = []
    message: str = ""
    stack: list[str] = []
    """Python frames, innermost last, as ``file:line function``."""
    measure: MemoryMeasure = "cuda"
    """Whose memory it was: the CUDA allocator's, or the host's."""
    stack_of: Literal["failing", "training"] = "failing"
    """``training``: the allocating thread had no Python frames (a backward pass): they are the training thread's."""
    micro_step: Whole = 0
    """Micro-steps of this step that were done or begun."""
    steps_done: Whole = 0
    """Steps this process has finished."""
    capacity_bytes: Whole = 0
    """The device's memory; ``device_total_bytes`` is less where a limit is set on this process."""
    limit: str = ""
    """The limit set on this process, in words."""
    room_bytes: Whole = 0
    """What this process could still have got from the driver (or the host), its limits minded."""
    reserved_free_bytes: Whole = 0
    """Free in reserved memory, in ``free_blocks`` pieces; ``usable_free_bytes`` of it for a request of this size."""
    free_blocks: Whole = 0
    largest_free_bytes: Whole = 0
    """The largest free block of reserved memory for a request of this size."""
    usable_free_bytes: Whole = 0
    expandable: bool = False
    """There are expandable segments."""
    largest_shape: list[Whole] = []
    """The largest batch of the steps before, by its elements, and the step that had it."""
    largest_shape_step: Whole = 0
    peak_bytes: Whole = 0
    """The highest peak of the steps before: allocated (CUDA), or resident (CPU)."""
    starts: list[Whole] = []
    """Allocated at the beginning of steps, evenly spaced over the whole run, oldest first."""
    parts: dict[str, Whole] = {}
    """What was allocated, by part (``memory.PARTS``); adds up to ``allocated_bytes`` where ``parts_note`` is empty."""
    parts_note: str = ""
    """What limits ``parts``, in words."""
    parameter_bytes: Whole = 0
    """One copy of this rank's parameters."""
    trainable: Whole = 0
    """How many numbers this rank's optimizer updates."""
    vocabulary: Whole = 0
    """Size of the model's vocabulary; 0 where its configuration has none."""
    optimizer: str = ""
    """The optimizer's class and implementation in words for a person: ``AdamW foreach``."""
    checkpointing: bool = False
    """Gradient checkpointing is on."""
    holders: list[StackGroup] = []
    """Who held most, by allocating stack; empty where stacks were not recorded."""
    segments: list[SegmentUse] = []
    """The segments of reserved memory, largest first, at most 256."""
    snapshot: str = ""
    """The memory snapshot written at that moment, relative to the run directory."""
    snapshot_note: str = ""
    """Why there is none, or what limits it."""
    held: bool = False
    """The rank waits in the failing frame until it is released."""
    hold_seconds: float = 0.0
    """It lets go by itself after this long; 0: never."""
    console: bool = False
    """A console in the failing frame is allowed."""
    peer_timeout_s: float = 0.0
    """After this long in a collective the other ranks give up (their process group's timeout); 0: not known."""
    others: str = ""
    """What happens to the other ranks meanwhile, in words."""
    optimizer_class: str = ""
    """The class of the optimizer: ``AdamW``."""
    optimizer_implementation: OptimizerImplementation = ""
    """How PyTorch's optimizer updates; empty: not known, or not one of PyTorch's."""

    def __post_init__(self) -> None:
        """Fill the optimizer's fields of a message that has only its words, as earlier versions sent."""
        if self.optimizer and not self.optimizer_class:
            name, _, implementation = self.optimizer.partition(" ")
            msgspec.structs.force_setattr(self, "optimizer_class", name)
            if implementation in get_args(OptimizerImplementation):
                msgspec.structs.force_setattr(self, "optimizer_implementation", implementation)
