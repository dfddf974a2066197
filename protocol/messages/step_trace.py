"""A captured step as recorded by its rank: numbers from which the hub computes the composition of the step's peaks.

The same rules as in ``telemetry``: msgspec structs as msgpack maps, sizes in bytes, times ``us`` in microseconds
since the epoch. Columns are those of ``protocol.snapshot.model``.
"""

import msgspec

from ..snapshot.model import Snapshot
from .bounds import Rank, Time, Whole
from .memory import Reason


class StepMark(msgspec.Struct, frozen=True, array_like=True):
    """Start of a phase, and end of the previous one, with the allocator's counters."""

    phase: str
    """Empty: the previous phase continues, and the mark records the peak before the script reset its counters."""
    us: Whole
    allocated: Whole
    """Bytes allocated."""
    peak: Whole
    """Highest allocated bytes since the previous mark."""
    retries: Whole
    """Allocations that the allocator has retried so far."""
    measured: bool
    """Whether the counters were read here; otherwise they are those of the next mark with a reading."""


class Sightings(msgspec.Struct, frozen=True, array_like=True):
    """Storages found at one moment, and the part each belongs to; both columns have the same length."""

    us: Whole
    mark: Whole
    """Index of the mark at that moment; -1: between two marks."""
    addresses: bytes
    """``Q``"""
    parts: bytes
    """``B``: indices into ``memory.PARTS``."""


class StepTrace(msgspec.Struct, tag="step_trace", frozen=True, omit_defaults=True):
    """The CUDA allocator's trace of one step of one rank, and the storages found during the step."""

    rank: Rank
    step: Whole
    time: Time
    """When the trace was read, just after the step's end."""
    device: Whole
    """The CUDA device's index."""
    marks: list[StepMark]
    """Marks of the step, including its start and its end."""
    first: Whole
    """Index of the mark at which the step starts; earlier marks are start-up."""
    snapshot: Snapshot
    """The device's segments and trace, without stacks, streams and annotations."""
    room: Whole
    """Capacity of the recorder's ring in entries; a trace of that length may have lost its beginning."""
    sightings: list[Sightings] = []
    """The storages found, by moment."""
    recomputed: list[tuple[Whole, Whole]] = []
    """Recomputed forwards within a backward: start and end, microseconds since the epoch."""
    reason: Reason = "periodic"
    """Why this step was captured."""
    hooked: bool = True
    """False: the model is compiled, so there are no hooks between the marks."""
    known: dict[str, Whole] = {}
    """Bytes of the storages found by the last walk, by part."""
    reserved_before: Whole = 0
    """Reserved bytes when the rank's previous captured step was read; 0 for the first."""
    walk_us: Whole = 0
    """Cost of walking to the training thread."""
    read_us: Whole = 0
    """Cost of reading the trace to the rank's publisher thread."""
