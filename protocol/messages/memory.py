"""Messages that explain memory: the composition of a phase's peak, and the code that allocated a transient.

The same rules as in ``telemetry``: msgspec structs as msgpack maps, sizes in bytes, times ``*_us`` in microseconds.
"""

from typing import Literal

import msgspec

from ..snapshot.columns import Snapshot
from .telemetry import MemoryMeasure, Oom, ProcessMemory, Rank, StackGroup, Time, Whole

PARTS = (
    "parameters", "gradients", "optimizer_states", "master_copies", "partitions", "buckets", "activations",
    "temporaries", "other", "unattributed",
)  # fmt: skip
"""Parts of a peak, in drawing order. ``partitions``: ZeRO's flat partitions that belong to no part before;
``buckets``: communication and reduction buffers; ``activations``: saved in a forward for its backward;
``temporaries``: allocated and freed within the phase; ``other``: a known block of PyTorch with unknown use;
``unattributed``: without evidence, as in a gap of the trace. Bytes without evidence are never assigned to other parts.
"""
Reason = Literal["first", "periodic", "asked", "spike", "leak", "oom"]


class PhaseComposition(msgspec.Struct, frozen=True, omit_defaults=True):
    """Composition of one phase's peak. The values of ``parts`` add up to ``peak_bytes`` exactly."""

    name: str
    peak_bytes: Whole  # highest `allocated` in the phase (CUDA), or the highest resident set (CPU)
    parts: dict[str, Whole]  # bytes by part (`PARTS`); empty parts are omitted
    at_us: Whole = 0  # time of the peak since the step's start
    reserved_bytes: Whole = 0  # `reserved` at the moment of the peak


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
    allocated_bytes: Whole = 0  # at the time of reading, just after the step's end
    reserved_bytes: Whole = 0
    entries: Whole = 0  # trace entries replayed
    walk_us: Whole = 0  # cost of walking to the training thread
    read_us: Whole = 0  # cost of reading the trace to the publisher thread
    note: str = ""  # limits of the composition, in words; empty: none

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
    attributed_bytes: Whole = 0  # bytes of the transient that have stacks, including groups omitted from `groups`
    parameter_bytes: Whole = 0  # one copy of this rank's parameters as the model computes with them (ZeRO-3: gathered)
    trainable: Whole = 0  # number of elements that this rank's optimizer updates (its partition under ZeRO)
    armed_us: Whole = 0  # host time of the phase with stacks armed
    usual_us: Whole = 0  # host time of the phase without stacks; the difference is the cost of the capture
    note: str = ""
    read_us: Whole = 0  # time to read the trace on the publisher's thread, which holds the GIL for most of it
    vocabulary: Whole = 0  # size of the model's vocabulary: the number of logits for each position of a batch


class StepMark(msgspec.Struct, frozen=True, array_like=True):
    """Start of a phase, and end of the previous one, with the allocator's counters."""

    phase: str
    """Empty: the previous phase continues, and the mark records the peak before the script reset its counters."""
    us: Whole
    allocated: Whole  # bytes allocated
    peak: Whole  # highest allocated bytes since the previous mark
    retries: Whole  # allocations that the allocator has retried so far
    measured: bool  # whether the counters were read here; otherwise they are those of the next mark with a reading


class Sightings(msgspec.Struct, frozen=True, array_like=True):
    """Storages found at one moment, and the part each belongs to; both columns have the same length."""

    us: Whole
    mark: Whole  # index of the mark at that moment; -1: between two marks
    addresses: bytes  # `Q`
    parts: bytes  # `B`: indices into `memory.PARTS`


class StepTrace(msgspec.Struct, tag="step_trace", frozen=True, omit_defaults=True):
    """The CUDA allocator's trace of one step of one rank, and the storages found during the step."""

    rank: Rank
    step: Whole
    time: Time  # when the trace was read, just after the step's end
    device: Whole  # the CUDA device's index
    marks: list[StepMark]  # marks of the step, including its start and its end
    first: Whole  # index of the mark at which the step starts; earlier marks are start-up
    snapshot: Snapshot  # the device's segments and trace, without stacks, streams and annotations
    room: Whole  # capacity of the recorder's ring in entries; a trace of that length may have lost its beginning
    sightings: list[Sightings] = []  # the storages found, by moment
    recomputed: list[tuple[Whole, Whole]] = []
    """Recomputed forwards within a backward: start and end, microseconds since the epoch."""
    reason: Reason = "periodic"  # why this step was captured
    hooked: bool = True  # false: the model is compiled, so there are no hooks between the marks
    known: dict[str, Whole] = {}  # bytes of the storages found by the last walk, by part
    reserved_before: Whole = 0  # reserved bytes when the rank's previous captured step was read; 0 for the first
    walk_us: Whole = 0  # cost of walking to the training thread
    read_us: Whole = 0  # cost of reading the trace to the rank's publisher thread


# The report of an out-of-memory error: the state of every rank, a verdict in words, and remedies in order.
#
# The hub makes it from a rank's ``Oom`` and the state of all other ranks; ``ftmon oom FILE`` makes one from a snapshot.
# The rules are in ``analysis.oom.verdict`` and ``analysis.remedies``.


OomKind = Literal[
    "fragmentation",
    "limit",
    "longer_batch",
    "activations",
    "logits",
    "optimizer_states",
    "optimizer_temporaries",
    "buckets",
    "leak",
    "checkpoint",
    "outside",
    "other_process",
    "too_large",
    "unknown",
]
"""``fragmentation``: enough was free, but not contiguous; ``limit``: a limit on this process refused it;
``longer_batch``: activations of a longer or larger batch than any before; ``activations``: of a batch like earlier
ones; ``logits``: logits and loss; ``optimizer_states``: created in the first step; ``buckets``: communication and
reduction buffers; ``outside``: memory of this process outside PyTorch's allocator; ``too_large``: the run, or this one
request, needs more than the device has; ``unknown``: cannot tell."""


class OomVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why the allocation failed, in words, with the evidence."""

    kind: OomKind
    title: str  # one line, for lists
    text: str  # what happened, a few sentences
    sure: bool = False  # true: the figures exclude other causes; False: this is the likeliest cause
    evidence: list[str] = []  # the figures that support it, one per line
    short_bytes: Whole = 0  # bytes missing for this request


class Remedy(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of configuration or script that reduces memory."""

    kind: str  # `expandable_segments`, `checkpointing`, `micro_batch`, `zero`, `offload`, `fused` and so on
    text: str
    setting: str = ""
    """The setting, such as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``; empty: the script must change."""
    frees_bytes: Whole = 0  # bytes it would free at the moment of the error; 0: unknown
    bound: Literal["", "about", "at most"] = ""  # precision of `frees_bytes`


class RankMoment(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one rank when the allocation failed, as known to the hub."""

    rank: Rank
    state: str
    step: Whole  # current step
    phase: str
    micro_step: Whole = 0
    allocated_bytes: Whole = 0
    reserved_bytes: Whole = 0
    peak_bytes: Whole = 0  # highest allocated bytes of its last finished step (CPU: highest resident set)
    batch_shape: list[Whole] = []  # batch shape of its last finished step
    collective: str = ""  # the collective that it was in; empty: none
    age_s: float = 0.0  # age of these figures
    device: str = ""  # host and index of its device
    device_used_bytes: Whole = 0
    device_total_bytes: Whole = 0


class OomReport(msgspec.Struct, tag="oom_report", frozen=True, omit_defaults=True):
    """Report of one out-of-memory error."""

    rank: Rank
    step: Whole
    phase: str
    time: Time
    oom: Oom
    verdict: OomVerdict
    remedies: list[Remedy] = []  # remedies, in the recommended order
    ranks: list[RankMoment] = []  # all ranks at that moment, the failing one included
    processes: list[ProcessMemory] = []
    """Processes with memory on the rank's device (NVML; on the CPU the ranks' resident memory)."""
    device_used_bytes: Whole = 0  # used by all processes, at the last sample before; 0: not sampled
    path: str = ""  # the report's file, relative to the run directory


class PredictedPhase(msgspec.Struct, frozen=True, omit_defaults=True):
    """Peak memory of one phase of a steady step, in PyTorch's allocator."""

    name: str  # `forward`, `backward` or `optimizer`
    allocated_peak_bytes: Whole
    reserved_peak_bytes: Whole = 0
    parts: dict[str, Whole] = {}  # composition of the allocated peak by part (`memory.PARTS`); the parts add up to it


class PredictedPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank at one sequence length."""

    rank: Rank
    sequence_length: Whole  # length of the rank's batches; if ranks share sequences, of its slices
    phases: list[PredictedPhase]


class Prediction(msgspec.Struct, tag="prediction", frozen=True, omit_defaults=True):
    """Predicted memory of this run's steps, from a dry run of its configuration; or why there is no prediction."""

    time: Time  # when the prediction was made
    points: list[PredictedPoint] = []
    """Points up to the configuration's length, for each rank of the dry run; other ranks are like the nearest one."""
    micro_batch: Whole = 0  # sequences of a micro-batch; times the length, the elements of a batch
    error: float = 0.0  # expected error of an allocated peak, as a share of it
    basis: str = ""  # the measurements that the error is derived from
    gpu: str = ""  # the kind of GPU of the dry run
    nvml_bytes: Whole = 0  # predicted NVML memory at the longest length, for the rank with the most
    step_seconds: float | None = None  # duration of a step at the longest length; None: unknown for this GPU
    refused: str = ""  # why there is no prediction; empty: there is one
    seconds: float = 0.0  # wall-clock time that the dry run took
    cached: bool = False  # it was made for an earlier run of the same configuration
    config: str = ""  # the configuration of the run, as YAML; empty: unknown
