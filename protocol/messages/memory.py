"""Messages that explain memory: what a phase's peak is made of, and which code a transient came from.

The same rules as in ``telemetry``: msgspec structs as msgpack maps, bytes are bytes, times ``*_us`` are microseconds.
"""

from typing import Literal

import msgspec

from .blocks import StackGroup as StackGroup
from .bounds import Rank, Time, Whole
from .telemetry import MemoryMeasure

PARTS = (
    "parameters",
    "gradients",
    "optimizer_states",
    "master_copies",
    "partitions",
    "buckets",
    "activations",
    "temporaries",
    "other",
    "unattributed",
)
"""What a peak may be made of, in the order it is drawn. ``partitions``: ZeRO's flat partitions that are none of the
parts before; ``buckets``: communication and reduction buffers; ``activations``: saved in a forward for its backward;
``temporaries``: allocated and freed within the phase; ``other``: held by PyTorch, of a known block but of no known use;
``unattributed``: without evidence (a gap in the trace, say). A part is never spread over others.
"""

Reason = Literal["first", "periodic", "asked", "spike", "leak", "oom"]


class PhaseComposition(msgspec.Struct, frozen=True, omit_defaults=True):
    """Composition of one phase's peak. The values of ``parts`` add up to ``peak_bytes`` exactly."""

    name: str
    peak_bytes: Whole
    """``allocated`` at its highest in the phase (CUDA), or the highest resident set (CPU)."""
    parts: dict[str, Whole]
    """Bytes by part (``PARTS``); parts of nothing are left out."""
    at_us: Whole = 0
    """When the peak was, from the step's start."""
    reserved_bytes: Whole = 0
    """``reserved`` at the moment of the peak."""


class Composition(msgspec.Struct, tag="composition", frozen=True, omit_defaults=True):
    """Composition of the peaks of one step of one rank."""

    rank: Rank
    step: Whole
    time: Time
    measure: MemoryMeasure
    phases: list[PhaseComposition]
    reason: Reason = "periodic"
    known: dict[str, Whole] = {}
    """Bytes of the storages that were found by walking engine, model and optimizer, by part; what there is at all."""
    allocated_bytes: Whole = 0
    """When it was read, just after the step's end."""
    reserved_bytes: Whole = 0
    entries: Whole = 0
    """Trace entries replayed."""
    walk_us: Whole = 0
    """What walking cost the training thread."""
    read_us: Whole = 0
    """What reading the trace cost the publisher thread."""
    note: str = ""
    """What limits it, in words; empty while nothing does."""

    @property
    def peak_phase(self) -> PhaseComposition | None:
        """The phase that makes the step's peak, or None for a step without phases."""
        return max(self.phases, key=lambda phase: phase.peak_bytes, default=None)


class Cause(msgspec.Struct, tag="cause", frozen=True, omit_defaults=True):
    """Which code the transient of one phase of one step came from, or (``reason`` ``leak``) what stayed."""

    rank: Rank
    step: Whole
    phase: str
    time: Time
    reason: Reason
    transient_bytes: Whole
    """Bytes above the larger of the phase's start and end at its peak; for a leak, what the step left behind."""
    groups: list[StackGroup]
    """What was allocated in the phase and live at its peak, by stack; most bytes that came and went first."""
    peak_bytes: Whole = 0
    attributed_bytes: Whole = 0
    """Bytes of the transient that have stacks, including groups that were cut off."""
    parameter_bytes: Whole = 0
    """One copy of this rank's parameters as the model computes with them (ZeRO-3: gathered)."""
    trainable: Whole = 0
    """How many numbers this rank's optimizer updates (its partition under ZeRO)."""
    armed_us: Whole = 0
    """Host time of the phase with stacks armed."""
    usual_us: Whole = 0
    """Host time of the phase without stacks: the difference is the cost of the capture."""
    note: str = ""
    read_us: Whole = 0
    """Time to read the trace on the publisher's thread, which holds the GIL for most of it."""
    vocabulary: Whole = 0
    """How many tokens the model knows: logits are that many numbers for each position of a batch."""
