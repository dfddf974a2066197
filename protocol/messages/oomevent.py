"""The message of a rank whose allocation failed: the state at that moment, as known to the rank itself.

The rules of ``telemetry`` apply; the message has its own file only because of its length.
"""

from typing import Literal

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
    """The memory that ran out: the CUDA allocator's, or the host's."""
    stack_of: Literal["failing", "training"] = "failing"
    """``training``: the allocating thread had no Python frames (a backward pass); these are the training thread's."""
    micro_step: Whole = 0
    """Micro-steps of this step that were finished or started."""
    steps_done: Whole = 0
    """Steps this process has finished."""
    capacity_bytes: Whole = 0
    """The device's memory; ``device_total_bytes`` is less if this process has a limit."""
    limit: str = ""
    """The limit set on this process, in words."""
    room_bytes: Whole = 0
    """Bytes that the driver (or the host) could still have given to this process within its limits."""
    reserved_free_bytes: Whole = 0
    """Free bytes in reserved memory, in ``free_blocks`` blocks; ``usable_free_bytes`` may serve this request's size."""
    free_blocks: Whole = 0
    largest_free_bytes: Whole = 0
    """The largest free block of reserved memory for a request of this size."""
    usable_free_bytes: Whole = 0
    expandable: bool = False
    """The allocator has expandable segments."""
    largest_shape: list[Whole] = []
    """The largest batch of earlier steps, by number of elements, and its step."""
    largest_shape_step: Whole = 0
    peak_bytes: Whole = 0
    """The highest peak of earlier steps: allocated (CUDA), or resident (CPU)."""
    starts: list[Whole] = []
    """Allocated bytes at the start of steps evenly spaced over the whole run, oldest first."""
    parts: dict[str, Whole] = {}
    """Allocated bytes by part (``memory.PARTS``); they add up to ``allocated_bytes`` if ``parts_note`` is empty."""
    parts_note: str = ""
    """Limits of ``parts``, in words."""
    parameter_bytes: Whole = 0
    """One copy of this rank's parameters."""
    trainable: Whole = 0
    """Number of elements that this rank's optimizer updates."""
    vocabulary: Whole = 0
    """Size of the model's vocabulary; 0: not in its configuration."""
    optimizer: str = ""
    """The optimizer's class and implementation as text: ``AdamW foreach``."""
    checkpointing: bool = False
    """Gradient checkpointing is on."""
    holders: list[StackGroup] = []
    """The stacks that allocated most live memory; empty if stacks were not recorded."""
    segments: list[SegmentUse] = []
    """The segments of reserved memory, largest first, at most 256."""
    snapshot: str = ""
    """The memory snapshot written at that moment, relative to the run directory."""
    snapshot_note: str = ""
    """Why there is no snapshot, or its limits."""
    held: bool = False
    """The rank waits in the failing frame until it is released."""
    hold_seconds: float = 0.0
    """Seconds after which the hold ends by itself; 0: never."""
    console: bool = False
    """A console in the failing frame is allowed."""
    peer_timeout_s: float = 0.0
    """Timeout of the other ranks' collectives (of their process group); 0: unknown."""
    others: str = ""
    """What happens to the other ranks meanwhile, in words."""
    optimizer_class: str = ""
    """The class of the optimizer: ``AdamW``."""
    optimizer_implementation: OptimizerImplementation = ""
    """Implementation of PyTorch's optimizer; empty: unknown, or not PyTorch's."""
