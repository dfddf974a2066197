"""A captured step as its rank recorded it: numbers alone, from which the hub finds what the step's peaks consist of.

The same rules as in ``telemetry``: msgspec structs as msgpack maps, bytes are bytes, times ``us`` are microseconds
since the epoch. Columns are those of ``protocol.snapshot.model``.
"""

import msgspec

from ..snapshot.model import Snapshot
from .bounds import Rank, Time, Whole
from .memory import Reason


class StepMark(msgspec.Struct, frozen=True, array_like=True):
    """A phase's beginning, and so the end of the one before it, with the allocator's counters."""

    phase: str
    """Empty: the previous phase continues, and the mark records the peak before the script reset its counters."""
    us: Whole
    allocated: Whole
    """Bytes allocated."""
    peak: Whole
    """The highest that was allocated since the mark before."""
    retries: Whole
    """Allocations that the allocator has tried again so far."""
    measured: bool
    """Whether the counters were read here; otherwise they are those of the next mark at which they were."""


class Sightings(msgspec.Struct, frozen=True, array_like=True):
    """Storages that were seen at one moment, and what each is for; as many values in both columns."""

    us: Whole
    mark: Whole
    """The index of the mark at which it was; -1: between two."""
    addresses: bytes
    """``Q``"""
    parts: bytes
    """``B``: indices into ``memory.PARTS``."""


class StepTrace(msgspec.Struct, tag="step_trace", frozen=True, omit_defaults=True):
    """What the CUDA allocator did in one step of one rank, and which storages were seen while it did."""

    rank: Rank
    step: Whole
    time: Time
    """When the trace was read, just after the step's end."""
    device: Whole
    """The CUDA device's index."""
    marks: list[StepMark]
    """The step's, its beginning and its end included."""
    first: Whole
    """The index of the mark that the step is counted from: start-up lies before it."""
    snapshot: Snapshot
    """The device's segments and trace as they were read, without stacks, streams and notes."""
    room: Whole
    """How many entries the recorder's ring has room for: a trace of that many may have lost its beginning."""
    sightings: list[Sightings] = []
    """Which storages were seen, and when."""
    recomputed: list[tuple[Whole, Whole]] = []
    """When, in a backward, a part of the model went forward again: from and to, microseconds since the epoch."""
    reason: Reason = "periodic"
    """Why this step was captured."""
    hooked: bool = True
    """False: compiled code runs there, so nothing was watched between the marks."""
    known: dict[str, Whole] = {}
    """Bytes of the storages that the last walk found, by part."""
    reserved_before: Whole = 0
    """Bytes that were reserved when the rank's last captured step was read; 0 for the first."""
    walk_us: Whole = 0
    """What walking cost the training thread."""
    read_us: Whole = 0
    """What reading the trace cost the rank's publisher thread."""
