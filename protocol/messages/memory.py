"""Messages that explain memory: the composition of a phase's peak, and the code that allocated a transient.

The same rules as in ``telemetry``: msgspec structs as msgpack maps, sizes in bytes, times ``*_us`` in microseconds.
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
"""Parts of a peak, in drawing order. ``partitions``: ZeRO's flat partitions that belong to no part before;
``buckets``: communication and reduction buffers; ``activations``: saved in a forward for its backward;
``temporaries``: allocated and freed within the phase; ``other``: a known block of PyTorch with unknown use;
``unattributed``: without evidence, as in a gap of the trace. Bytes without evidence are never assigned to other parts.
"""

Reason = Literal["first", "periodic", "asked", "spike", "leak", "oom"]


class PhaseComposition(msgspec.Struct, frozen=True, omit_defaults=True):
    """Composition of one phase's peak. The values of ``parts`` add up to ``peak_bytes`` exactly."""

    name: str
    peak_bytes: Whole
    """Highest ``allocated`` in the phase (CUDA), or the highest resident set (CPU)."""
    parts: dict[str, Whole]
    """Bytes by part (``PARTS``); empty parts are omitted."""
    at_us: Whole = 0
    """Time of the peak since the step's start."""
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
    """Bytes by part of all storages found by walking engine, model and optimizer, whether in the peak or not."""
    allocated_bytes: Whole = 0
    """At the time of reading, just after the step's end."""
    reserved_bytes: Whole = 0
    entries: Whole = 0
    """Trace entries replayed."""
    walk_us: Whole = 0
    """Cost of walking to the training thread."""
    read_us: Whole = 0
    """Cost of reading the trace to the publisher thread."""
    note: str = ""
    """Limits of the composition, in words; empty: none."""

    @property
    def peak_phase(self) -> PhaseComposition | None:
        """The phase with the step's highest peak; None for a step without phases."""
        return max(self.phases, key=lambda phase: phase.peak_bytes, default=None)


class Cause(msgspec.Struct, tag="cause", frozen=True, omit_defaults=True):
    """The code that allocated the transient of one phase of one step, or (``reason`` ``leak``) memory that stayed."""

    rank: Rank
    step: Whole
    phase: str
    time: Time
    reason: Reason
    transient_bytes: Whole
    """Bytes at the phase's peak above the larger of its start and end; for a leak, bytes left allocated by the step."""
    groups: list[StackGroup]
    """Blocks allocated in the phase and live at its peak, by stack; largest transient bytes first."""
    peak_bytes: Whole = 0
    attributed_bytes: Whole = 0
    """Bytes of the transient that have stacks, including groups omitted from ``groups``."""
    parameter_bytes: Whole = 0
    """One copy of this rank's parameters as the model computes with them (ZeRO-3: gathered)."""
    trainable: Whole = 0
    """Number of elements that this rank's optimizer updates (its partition under ZeRO)."""
    armed_us: Whole = 0
    """Host time of the phase with stacks armed."""
    usual_us: Whole = 0
    """Host time of the phase without stacks; the difference is the cost of the capture."""
    note: str = ""
    read_us: Whole = 0
    """Time to read the trace on the publisher's thread, which holds the GIL for most of it."""
    vocabulary: Whole = 0
    """Size of the model's vocabulary: the number of logits for each position of a batch."""
