"""Messages a rank's probe sends, and the device samples of a host.

All are msgspec structs encoded as msgpack maps: an unknown field is ignored, a new field has a default, and a tag is
never reused for another type. Times named ``*_us`` are microseconds; ``time`` and ``started`` are seconds since the
epoch on the sender's clock; memory is in bytes.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..host.machine import ModelFlops

# Bounds of numbers in messages: decoding refuses values outside them. They protect receivers from a rank of 2^60, for
# which a receiver would allocate, and from times outside the calendar.
MAX_RANKS = 16_384  # ranks are below this; -1 means the launcher, or no rank
MAX_WHOLE = 2**53  # integers up to this are exact in a double; sums of many such numbers fit 64 bits
Rank = Annotated[int, Meta(ge=-1, lt=MAX_RANKS)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A count or a number of bytes, in the range of an SQLite column. (A script may request 2**62 bytes and be refused.)"""
Stage = Annotated[int, Meta(ge=0, le=3)]  # a ZeRO stage
LAST_TIME = 1e11
Time = Annotated[float, Meta(ge=0.0, lt=LAST_TIME)]
"""Seconds since the epoch, up to the year 5138; neither infinite nor NaN."""
Gauge = Annotated[float, Meta(ge=-1e6, le=1e9)]  # a measured value: a temperature, a power, a share
Flops = Annotated[float, Meta(ge=0.0, le=1e30)]  # a number of floating-point operations
Sequence = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]
Name = Annotated[str, Meta(max_length=256)]


class DataLoaderInfo(msgspec.Struct, frozen=True):
    """Settings of the PyTorch DataLoader that a rank trains from."""

    workers: Whole = 0  # `num_workers`; 0: the training thread loads the batches
    prefetch_factor: Whole = 0  # batches that each worker loads ahead; 0 without workers
    pin_memory: bool = False
    persistent_workers: bool = False
    cpus: Whole = 0  # processors that the rank's process may use, divided by the ranks of its host
    iterable: bool = False  # it reads an IterableDataset, of which each worker has a copy


class Compilation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One frame that ``torch.compile`` (Dynamo) compiled."""

    name: str  # the function and where it is: `forward (model.py:40)`
    step: Whole = 0  # current step when the rank's publisher detected it
    seconds: float = 0.0
    reason: str = ""  # why it was compiled again, as reported by Dynamo; empty for the first compilation
    failed: str = ""  # the type of the exception with which the compilation failed; empty: it succeeded


class Compiles(msgspec.Struct, tag="compiles", frozen=True, omit_defaults=True):
    """Frames that ``torch.compile`` compiled on a rank since the previous message; sent at most once a second."""

    rank: Rank
    time: Time
    total: Whole  # frames compiled since the process began
    functions: list[Compilation] = []


class Volume(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file system that the run writes to."""

    path: str  # a directory on this file system that the run uses
    use: str  # purpose: `run directory`, `output`, `working directory`, `TMPDIR` or `/dev/shm`
    free_bytes: Whole  # available to this user
    total_bytes: Whole


class DiskSpace(msgspec.Struct, tag="disks", frozen=True, omit_defaults=True):
    """Free space on the file systems that the run uses on a host; sent when it changed, and once a minute."""

    host: Name
    time: Time
    volumes: list[Volume]


class DeviceHealth(msgspec.Struct, tag="device_health", frozen=True, omit_defaults=True):
    """Faults of a GPU's memory from NVML; None: not reported by this card or driver.

    Sent when it changed, and once a minute.
    """

    host: Name
    index: Whole
    time: Time
    uuid: Name = ""
    ecc_corrected: Whole | None = None  # corrected errors since the driver was loaded
    ecc_uncorrected: Whole | None = None
    remap_pending: bool = False  # a memory row will be remapped at the next reset of the GPU
    remap_failed: bool = False


class Xid(msgspec.Struct, tag="xid", frozen=True, omit_defaults=True):
    """An error that NVIDIA's driver reported (an XID)."""

    host: Name
    time: Time
    code: Whole
    index: int = -1  # NVML's index of the GPU; -1: unknown
    bus: Name = ""  # PCI address as in the kernel log
    text: str = ""  # the driver's line in the kernel log; empty if NVML reported it


MemoryMeasure = Literal["cuda", "glibc"]
"""Source of ``allocated`` and ``reserved``: PyTorch's CUDA allocator, or glibc (mallinfo2)."""


class StackGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks with the same allocating stack."""

    bytes: Whole
    count: Whole
    frames: list[str]  # `file:line function`, innermost last
    largest_bytes: Whole = 0
    kept_bytes: Whole = 0  # the part of `bytes` that outlived the phase: growth, not transient


class SegmentUse(msgspec.Struct, frozen=True, array_like=True):
    """Use of one segment of the CUDA caching allocator. Encoded as an array, because there are hundreds."""

    size_bytes: Whole
    allocated_bytes: Whole
    largest_free_bytes: Whole
    free_blocks: Whole
    flags: str = ""
    """``s``: serves requests up to 1 MiB only; ``e``: expandable; ``p``: in a private pool; empty: none of these."""


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
    stack: list[str] = []  # Python frames, innermost last, as `file:line function`
    measure: MemoryMeasure = "cuda"  # the memory that ran out: the CUDA allocator's, or the host's
    stack_of: Literal["failing", "training"] = "failing"
    """``training``: the allocating thread had no Python frames (a backward pass); these are the training thread's."""
    micro_step: Whole = 0  # micro-steps of this step that were finished or started
    steps_done: Whole = 0  # steps this process has finished
    capacity_bytes: Whole = 0  # the device's memory; `device_total_bytes` is less if this process has a limit
    limit: str = ""  # the limit set on this process, in words
    room_bytes: Whole = 0
    """Bytes that the driver (or the host) could still have given to this process within its limits."""
    reserved_free_bytes: Whole = 0
    """Free bytes in reserved memory, in ``free_blocks`` blocks; ``usable_free_bytes`` may serve this request's size."""
    free_blocks: Whole = 0
    largest_free_bytes: Whole = 0  # the largest free block of reserved memory for a request of this size
    usable_free_bytes: Whole = 0
    expandable: bool = False  # the allocator has expandable segments
    largest_shape: list[Whole] = []  # the largest batch of earlier steps, by number of elements, and its step
    largest_shape_step: Whole = 0
    peak_bytes: Whole = 0  # the highest peak of earlier steps: allocated (CUDA), or resident (CPU)
    starts: list[Whole] = []  # allocated bytes at the start of steps evenly spaced over the whole run, oldest first
    parts: dict[str, Whole] = {}
    """Allocated bytes by part (``memory.PARTS``); they add up to ``allocated_bytes`` if ``parts_note`` is empty."""
    parts_note: str = ""  # limits of `parts`, in words
    parameter_bytes: Whole = 0  # one copy of this rank's parameters
    trainable: Whole = 0  # number of elements that this rank's optimizer updates
    vocabulary: Whole = 0  # size of the model's vocabulary; 0: not in its configuration
    optimizer: str = ""  # the optimizer's class and implementation as text: `AdamW foreach`
    checkpointing: bool = False  # gradient checkpointing is on
    holders: list[StackGroup] = []  # the stacks that allocated most live memory; empty if stacks were not recorded
    segments: list[SegmentUse] = []  # the segments of reserved memory, largest first, at most 256
    snapshot: str = ""  # the memory snapshot written at that moment, relative to the run directory
    snapshot_note: str = ""  # why there is no snapshot, or its limits
    held: bool = False  # the rank waits in the failing frame until it is released
    hold_seconds: float = 0.0  # seconds after which the hold ends by itself; 0: never
    console: bool = False  # a console in the failing frame is allowed
    peer_timeout_s: float = 0.0  # timeout of the other ranks' collectives (of their process group); 0: unknown
    others: str = ""  # what happens to the other ranks meanwhile, in words
    optimizer_class: str = ""  # the class of the optimizer: `AdamW`
    optimizer_implementation: OptimizerImplementation = ""
    """Implementation of PyTorch's optimizer; empty: unknown, or not PyTorch's."""


PHASES = ("init", "data", "generate", "forward", "backward", "optimizer", "eval", "checkpoint", "idle")
"""All phases of a rank, in drawing order. ``generate``: the rollout of a step (GRPO, PPO)."""
STEP_PHASES = ("data", "forward", "backward", "optimizer")  # the phases of an ordinary step, in order
PAUSES = ("eval", "checkpoint")  # phases in which training pauses: throughput does not count them


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One memory figure over a phase: bytes at its start, at its end, and the highest in between.

    Encoded as an array of three integers: a step carries up to twenty of them.
    """

    start: Whole
    end: Whole
    peak: Whole

    @property
    def transient(self) -> int:
        """Bytes allocated and freed again: the peak minus the larger of start and end."""
        return max(0, self.peak - max(self.start, self.end))

    @property
    def growth(self) -> int:
        """Bytes that stayed allocated (negative: were freed): end minus start."""
        return self.end - self.start


class PhaseRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One phase of one step of one rank, aggregated over the phase's occurrences in all micro-steps.

    ``allocated`` and ``reserved`` follow ``Hello.memory_measure``. On the CPU glibc keeps no high-water mark, so their
    ``peak`` is the larger of start and end, and the phase's true peak is in ``resident`` (resident set size).
    """

    name: str
    start_us: Whole  # first start of the phase, from the step's start
    host_us: Whole  # host time spent in the phase, summed over micro-steps
    allocated: Span
    reserved: Span
    device_us: Whole | None = None
    """Device time between CUDA events at the phase's ends; None on the CPU or when the events were not read."""
    active: Span | None = None
    requested: Span | None = None
    resident: Span | None = None  # resident set size of the process (CPU only)
    count: Whole = 1  # number of occurrences aggregated (micro-steps)
    allocations: Whole = 0  # blocks allocated during the phase (CUDA only)
    frees: Whole = 0
    allocated_bytes: Whole = 0  # bytes allocated during the phase, whether or not they were freed again (CUDA only)
    collective_us: Whole = 0
    """Host time spent inside collective calls during the phase, and inside DDP's reducer once this rank's own
    gradients were computed."""
    collectives: Whole = 0  # collective calls entered during the phase
    waited_us: Whole | None = None
    """Device time for which the stream waited for other ranks inside DDP's reducer, or for its buffers (part of
    ``device_us``); None: not measured. On the CPU that time is in ``collective_us``."""
    coarse: bool = False
    """Memory was not read at both ends of the phase: its spans are those of the stretch of phases between two reads
    that it is a part of; ``allocations``, ``frees`` and ``allocated_bytes`` are 0."""

    @property
    def peak_span(self) -> Span:
        """The figure whose peak is a true high-water mark: ``resident`` where it is measured, else ``allocated``."""
        return self.resident if self.resident is not None else self.allocated


class DeviceInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The device on which a rank computes. Memory graphs are scaled to ``capacity_bytes``."""

    kind: Literal["cuda", "cpu"]
    index: Whole
    name: str
    capacity_bytes: Whole
    uuid: str = ""


class SelfDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to make a rank on the hub's host write its stacks while native code holds the GIL.

    On ``signal``, sent to the thread ``receiver``, faulthandler writes the stacks of all threads to ``path``. The
    signal may be sent only while the process catches it, ``descriptor`` is open on that file, and native code holds
    the GIL: otherwise faulthandler could follow a frame that no longer exists, and the process would die of SIGSEGV.
    """

    signal: Whole
    receiver: Whole  # kernel thread id of the probe's own thread, so that no other thread's system call is interrupted
    descriptor: Whole
    path: str
    thread: str  # the training thread's name in faulthandler's output, such as `0x00007f2a5c3fe740`
    training: Whole  # the training thread's kernel thread id


class Hello(msgspec.Struct, tag="hello", frozen=True, omit_defaults=True):
    """A rank's first message, and its answer to ``identify`` when a new hub adopts it."""

    rank: Rank
    local_rank: Rank
    world_size: Whole
    host: Name
    pid: Whole
    start_ticks: Whole
    """Process start time in clock ticks since boot (field 22 of /proc/PID/stat); with the pid it names a process."""
    device: DeviceInfo
    memory_measure: MemoryMeasure
    time: Time
    versions: dict[str, str] = {}
    """Versions of ``python``, ``torch``, ``deepspeed``, ``transformers`` and ``ftmon``, if installed."""
    deepspeed_config: dict[str, Any] | None = None
    zero_stage: Stage | None = None
    micro_batch: Whole | None = None
    grad_accumulation: Whole | None = None
    precision: str = ""
    model: str = ""
    parameters: Whole = 0
    trainable_parameters: Whole = 0
    framework: str = ""  # the monitored framework: `deepspeed`, `transformers`, `ddp`, `fsdp` or `pytorch`
    argv: list[str] = []
    backend: str = ""  # torch.distributed's backend, such as `nccl` or `gloo`
    sends_logs: bool = False
    """True: this rank sends its own log lines; False: the hub reads them from the run directory's log files."""
    self_dump: SelfDump | None = None  # how to get its stacks from another process; None: not possible
    loader: DataLoaderInfo | None = None  # the DataLoader that it trains from; None until it has fetched from one
    launch: Name = ""
    """The process that launched this host's ranks, ``PID-START_TICKS``; equal for the ranks of one host and job."""
    restart: Whole = 0  # number of its job's restart by `torchrun --max-restarts`
    flops: ModelFlops | None = None  # FLOPs of the model; None: unknown, as for models that are not token decoders
    matmul_precision: Literal["", "bf16", "fp16", "tf32", "fp32"] = ""
    """Data type of the matrix products, which may differ from that of the parameters (autocast, TF32)."""
    pipeline_stage: Whole | None = None
    """The rank's (first) pipeline stage; it counts the parameters of its stages only. None: no pipeline parallelism."""


class Plan(msgspec.Struct, tag="plan", frozen=True, omit_defaults=True):
    """Planned length of the run; sent by ftmon's trainer or the TrainerCallback."""

    rank: Rank
    total_steps: Whole
    epochs: float | None = None
    output_dir: str = ""
    evaluate_every: Whole = 0  # steps between two evaluations; 0: none during training, or unknown
    evaluate_at_end: bool = False
    """Whether there is an evaluation after the last step even if that is no multiple of ``evaluate_every``."""
    checkpoint_every: Whole = 0  # steps between two checkpoints; 0: none during training, or unknown
    checkpoint_at_end: bool = False
    first_step: Whole = 0  # steps already made by the run that this process resumes


class Update(msgspec.Struct, frozen=True, omit_defaults=True):
    """Figures of one of several engines or optimizers (generator and discriminator, actor and critic) in one step."""

    name: str  # the class of an engine's model, or of an optimizer; a number follows if there are several
    count: Whole = 1  # updates it made in the step
    micro_steps: Whole = 0  # backward passes that led to them
    loss: float | None = None  # the loss it minimised, averaged over its updates
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    overflow: bool = False  # the loss scaler skipped its update


class Signs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Figures of one step by which faults that raise no error are found. Zero or empty: fine, or not looked at."""

    labelled: Whole = 0  # micro-batches with labels, if some of them have no label that counts
    unlabelled: Whole = 0  # micro-batches whose labels are all ignored
    labelled_after: Whole = 0
    """The last step before whose labels were examined, if some between were not and there are ``unlabelled`` ones."""
    ends: Whole = 0  # end-of-sequence tokens of the model among the inputs, without padding, that could be labels
    learned_ends: Whole = 0  # end-of-sequence tokens among the labels
    begun_twice: Whole = 0  # micro-batches of which each row begins with two beginning-of-sequence tokens of the model
    padding: Whole = 0  # labels in the loss that are padding after padding, by the attention mask
    padding_of: Whole = 0  # labels in the loss of the micro-batches that were looked at for it, if there are such ones
    mixed: Whole = 0  # micro-batches with rows of several documents that attend to each other
    mixed_by: Literal["", "mask", "cache", "batch", "encoder", "4-D mask", "numbers"] = ""
    """Why the model ignores where its documents begin: a mask is passed, it makes a cache, several rows, it is an
    encoder, a 4-D mask shows the document before, or a 2-D mask numbers documents."""
    mixed_after: Whole = 0  # the last step before that was examined for it, if some between were not
    weights: Literal["", "same", "nan"] = ""
    """``same``: no sampled weight has changed since the sample before; ``nan``: one is not finite."""
    put_back: bool = False
    """Before each of the first updates the sampled weights were the same, though the update before had changed them."""
    overwritten: bool = False
    """An engine's update by Adam moved half of the sampled weights by more than 10 times the learning rate: it made
    them of fp32 copies of other weights."""
    unloaded: bool = False
    """Before it a ZeRO-3 engine loaded the weights of a checkpoint alone, and still has those that it had."""
    evaluating: bool = False  # the trained model was in evaluation mode, and has layers that behave differently there
    evaluating_part: str = ""
    """Name of a part that was in evaluation mode, has such layers and is trained, though the model was not."""
    weights_lost: bool = False
    """Weights were not finite before this update, nor was the loss: an earlier update made them so."""
    pending: Whole = 0  # micro-batches of an earlier pass over the data that are part of this update
    dropped: Whole = 0  # micro-batches at the end of an earlier pass whose gradients were set to zero before an update
    left_out: Whole = 0
    """Parameters that have gradients and that no optimizer updates, at the first update or after 100 steps."""
    left_out_first: str = ""  # name of the first of them
    detached: Whole = 0
    """Parameters, most elements of an optimizer, that have had no gradient in the first updates and after 100 steps."""
    detached_first: str = ""  # name of the first of them
    no_gradients: bool = False  # no parameter of the optimizer had a gradient at this update
    zero_gradients: bool = False  # the sampled gradients of the update before, at the beginning, were all exactly 0
    apart: bool = False
    """None of the step's gradients was reduced over the ranks: DDP was inside ``no_sync`` in each micro-batch."""
    clipped: Literal["", "zero", "scaled", "discarded", "replaced", "late", "kept"] = ""
    """Gradients were clipped to a norm of zero, or before a loss scaler had divided them by its scale, or set to zero
    between the backward and the update, or so those of all micro-batches but the last of each update so far; or they
    were clipped after their update, or not set to zero before the backward of this one."""
    repeated: Whole = 0  # micro-batches with the data of the one before
    shifted: Literal["", "never", "once", "twice"] = ""
    """By how many positions the labels of the loss are shifted against the inputs, in the steps that compare them;
    ``once`` is correct, and only sent after another value."""


class Step(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """One optimizer update of one rank with all its phases, sent once its device times are known.

    If several engines or optimizers train, it is an update of one of them (``updates`` has those of the others).
    """

    rank: Rank
    step: Whole  # 1 for the first optimizer update; continues after a resume
    started: Time
    host_us: Whole  # host time of the whole step, between-phase time included
    phases: list[PhaseRecord]
    device_us: Whole | None = None
    micro_steps: Whole = 1
    loss: float | None = None
    """The loss of this step on this rank: losses that the script normalises itself, and losses of one micro-batch, are
    summed; others are averaged over the micro-steps."""
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    overflow: bool = False  # the loss scaler skipped this update
    batch_shape: list[Whole] = []
    """Shape of the largest micro-batch's input ids (or first tensor), such as [micro_batch, sequence_length]."""
    samples: Whole = 0
    """Samples of all micro-batches. If several ranks share batches, this rank's part: an equal share with tensor
    parallelism, all on the first stage of a pipeline. The same holds for ``tokens``, ``padded_tokens``, ``flops``."""
    tokens: Whole = 0  # tokens of all micro-batches, without padding if a mask is known
    padded_tokens: Whole = 0  # tokens of all micro-batches, padding included
    retries: Whole = 0  # cudaMalloc retries (allocator flushes) since the process began
    ooms: Whole = 0  # out-of-memory errors the allocator raised since the process began
    probe_us: Whole = 0  # cost of ftmon itself to the training thread in this step
    dropped: Whole = 0  # messages this probe has dropped since it began
    label_tokens: Whole = 0
    """Number of labels that ``loss`` is a mean over: the rank's weight in a mean over ranks. 0: unknown, or the loss is
    already normalised over all ranks; ranks then have equal weights."""
    updates: list[Update] = []
    """If other engines or optimizers have updated since the step before: the first 32 that did, in order, the step's
    own included. A step is an update of what ``ftmon.watch`` names, of an engine, or of the first that stepped."""
    cpu_us: Whole = 0  # CPU time of the training thread in this step; 0: not measured
    flops: Flops = 0.0  # FLOPs of the model for this rank's tokens of the step, as defined in `throughput`; 0: unknown
    fetch_us: Whole | None = None
    """Host time of the training thread in its DataLoaders, part of ``data``; None: it used none. The rest of ``data``
    is the script's own work on the batch."""
    batch_id: Whole = 0
    """CRC-32 over the input ids (or first tensors) of its micro-batches; 0: unknown. Equal: the same data."""
    signs: Signs | None = None  # none: nothing to tell
    memory_every: Whole = 1
    """Every how many steps memory is read at each boundary of phases; in the others, phases are ``coarse``."""

    def phase(self, name: str) -> PhaseRecord | None:
        """Return the record of the phase ``name``; None if the step had no such phase."""
        return next((record for record in self.phases if record.name == name), None)

    @property
    def peak_phase(self) -> PhaseRecord | None:
        """The phase with the highest memory peak, of a stretch of coarse ones the longest; None: no phases."""
        return max(self.phases, key=lambda record: (record.peak_span.peak, record.host_us), default=None)

    def owns_peak(self, record: PhaseRecord, highest: int) -> bool:
        """Return whether a record's peak counts as that of its phase.

        The peak of a coarse stretch does, for its longest phase, if it exceeds ``highest``, that of all phases so far.
        """
        return not record.coarse or (record.peak_span.peak > highest and record is self.peak_phase)

    @property
    def training_us(self) -> int:
        """Host time without evaluations and checkpoints."""
        return max(0, self.host_us - sum([record.host_us for record in self.phases if record.name in PAUSES]))


class Closing(msgspec.Struct, tag="closing", frozen=True, omit_defaults=True):
    """A rank's phases after its last step, such as a final evaluation or a save; sent as it ends. Not a step."""

    rank: Rank
    step: Whole  # the last finished step; 0: none
    started: Time
    host_us: Whole
    phases: list[PhaseRecord]
    device_us: Whole | None = None


class Evaluation(msgspec.Struct, tag="evaluation", frozen=True, omit_defaults=True):
    """The result of an evaluation over all ranks; sent by one rank. One step may have several, for several splits.

    A resumed run first sends the best earlier evaluation, with only its loss.
    """

    rank: Rank
    step: Whole  # the last finished step
    time: Time  # end of the evaluation
    name: Name = "evaluation"  # the split or data set
    loss: float | None = None  # mean over the label tokens of all ranks
    perplexity: float | None = None
    label_tokens: Whole = 0  # label tokens of all ranks, each counted once; 0: unknown
    seconds: float = 0.0
    best: bool = False  # no evaluation of this name had a lower loss before
    metrics: dict[str, float] = {}  # other results by name, such as `accuracy`


class Checkpoint(msgspec.Struct, tag="checkpoint", frozen=True, omit_defaults=True):
    """A checkpoint is complete on disk; sent by one rank."""

    rank: Rank
    step: Whole
    time: Time
    path: str
    bytes: Whole = 0  # size of all its files; 0: unknown
    seconds: float = 0.0
    """Time from its start until it was complete; training waits for only a part of it if it is written in the
    background."""
    best: bool = False  # it has the lowest evaluation loss so far


class CheckpointFailed(msgspec.Struct, tag="checkpoint_failed", frozen=True, omit_defaults=True):
    """A checkpoint could not be written, and training continues; sent by one rank."""

    rank: Rank
    step: Whole  # the last finished step
    time: Time
    path: str  # the intended path
    error: str  # the reason, such as `No space left on device`
    kept: str = ""  # the newest complete checkpoint; empty: none


class EarlyStop(msgspec.Struct, tag="early_stop", frozen=True, omit_defaults=True):
    """The training ends before its planned end because evaluations no longer improve; sent by one rank."""

    rank: Rank
    step: Whole  # the last step
    time: Time
    evaluations: Whole  # evaluations in a row without a new lowest loss
    best_loss: float | None = None  # the lowest evaluation loss
    best_step: Whole = 0  # the step of that evaluation; 0: unknown


SAID = ("settings", "note")  # names of activities that take no time: their text is said, beside what else goes on


class Activity(msgspec.Struct, tag="activity", frozen=True, omit_defaults=True):
    """An activity of a run other than its steps; sent at its start, at most twice a second, and at its end."""

    rank: Rank
    time: Time
    name: Name  # `rehearsal`, `evaluation`, `checkpoint`, `export`, `data`, `resume` ...
    step: Whole = 0  # the last finished step
    text: str = ""  # detail as text, such as what is rehearsed and the result
    done: Whole = 0
    total: Whole = 0  # number of parts, such as batches; 0: unknown
    over: bool = False
    seconds: float = 0.0  # seconds since its start


class Heartbeat(msgspec.Struct, tag="beat", frozen=True, omit_defaults=True):
    """Current phase of a rank: sent when the phase changed, at most ten times a second, and when nothing else was sent.

    Only the training thread changes ``progress``, so a heartbeat with an unchanged ``progress`` proves only that the
    process lives.
    """

    rank: Rank
    step: Whole  # current step: the last finished step plus one
    phase: str
    phase_started: Time
    progress: Whole
    time: Time
    micro_step: Whole = 0
    collectives: Whole = 0  # collective calls entered since the process group was made
    collective: str = ""
    """The collective whose call has not returned, such as ``all_gather_into_tensor``; empty outside of one."""
    last_collective: str = ""
    step_collectives: Whole = 0
    """Collective calls entered in the current step. They are comparable between ranks whose totals differ since
    start-up, and so show which rank has not entered a collective.
    """
    group: str = ""  # PyTorch's name for the process group of `collective`, or of `last_collective` outside of one
    group_sequence: Whole = 0
    """Number of that group's collectives this rank has entered; equal numbers mean the same call on all its ranks."""
    size: Whole = 0  # elements of that collective's tensor; 0: none, or a list of tensors
    allocated: Whole = 0
    reserved: Whole = 0
    resident: Whole = 0
    dropped: Whole = 0
    held_since: Time = 0.0
    """Start of the hold at an out-of-memory error (``--on-oom hold``), seconds since the epoch; 0: not held."""
    left_out: Whole = 0  # batches fetched in a row, of a DataLoader that it trains on, without a backward


class AllocatorPhase(msgspec.Struct, frozen=True, omit_defaults=True):
    """Allocator events of one phase within a window of the flight recorder."""

    name: str
    allocations: Whole = 0
    frees: Whole = 0
    allocated_bytes: Whole = 0
    freed_bytes: Whole = 0
    largest: list[Whole] = []  # the largest single allocations, bytes, descending
    segment_allocations: Whole = 0
    segment_frees: Whole = 0
    segment_bytes: Whole = 0  # growth of reserved memory by cudaMalloc minus cudaFree
    host_us: Whole = 0  # host time of all occurrences of the phase: the denominator of rates


class AllocatorEvents(msgspec.Struct, tag="events", frozen=True, omit_defaults=True):
    """Numbers from the allocator's own trace of one sampled step; never stacks."""

    rank: Rank
    step: Whole
    time: Time
    phases: list[AllocatorPhase]
    entries: Whole = 0  # trace entries read
    read_us: Whole = 0  # cost of reading them (on the publisher thread)
    host_us: Whole = 0  # host time of the whole step
    retries: Whole = 0  # number of times in the step that the allocator released all cached memory (cudaMalloc retries)
    allocated_bytes: Whole = 0  # at the time of reading, like all following fields
    reserved_bytes: Whole = 0
    reserved_growth_bytes: Whole = 0  # growth since the previous sampled step; 0 for the first
    free_bytes: Whole = 0  # free bytes in reserved memory
    largest_free_block_bytes: Whole = 0
    rounding_bytes: Whole = 0  # bytes of allocated blocks beyond the requested size
    pending_bytes: Whole = 0  # bytes freed by the program that a stream still uses
    segments: Whole = 0


class SnapshotTaken(msgspec.Struct, tag="snapshot", frozen=True, omit_defaults=True):
    """A memory snapshot was written into the run directory."""

    rank: Rank
    step: Whole
    time: Time
    path: str
    bytes: Whole
    reason: str
    entries: Whole = 0


class LogLine(msgspec.Struct, tag="log", frozen=True, omit_defaults=True):
    """One line of a rank's output. Rank -1 is the launcher. Control characters are removed by the sender's side."""

    rank: Rank
    time: Time
    stream: Literal["out", "err", "launcher", "ftmon"]
    text: str


class Failure(msgspec.Struct, tag="failure", frozen=True, omit_defaults=True):
    """An exception left the script's main thread."""

    rank: Rank
    step: Whole
    phase: str
    time: Time
    error: str
    traceback: str = ""


TakenBy = Literal["", "probe", "signal", "py-spy", "outside"]


class Stacks(msgspec.Struct, tag="stacks", frozen=True, omit_defaults=True):
    """Python stacks of all threads of a rank, in the format of ``faulthandler``."""

    rank: Rank
    time: Time
    text: str
    reason: str = ""
    thread: str = ""  # the training thread's name in `text`; empty: unknown
    taken_by: TakenBy = ""
    """``probe``: the rank answered; ``signal``: native code held the GIL, and faulthandler wrote them on a signal;
    ``py-spy``: read by py-spy, with native frames; ``outside``: read from its memory by py-spy, without a pause."""


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True, omit_defaults=True):
    """A rank is about to end in an orderly way; its last message."""

    rank: Rank
    time: Time
    step: Whole
    reason: Literal["finished", "failed", "stopped"]
    text: str = ""
    dropped: Whole = 0
    pending: Whole = 0  # micro-batches whose gradients no update has used


class LostEdit(msgspec.Struct, tag="lost_edit", frozen=True, omit_defaults=True):
    """A script changed parameters inside DeepSpeed's ``GatheredParameters``, and the change does not last."""

    rank: Rank
    step: Whole  # the last finished step
    time: Time
    parameters: list[str]  # names, at most 8; shapes where there are none
    count: Whole  # number of changed parameters
    where: str  # the script's frame: `file:line function`
    overwritten: bool = False
    """True: the next update overwrites it from the fp32 copy; False: it is lost at once (no ``modifier_rank``)."""


class StopAsked(msgspec.Struct, tag="stop_asked", frozen=True, omit_defaults=True):
    """A rank was asked to end, and its script does when it next checks: it handles SIGTERM, or supports ``ftmon stop``.

    Sent once in a rank's life, at the first request.
    """

    rank: Rank
    time: Time
    step: Whole  # the last finished step
    phase: str
    phase_started: Time
    by: Literal["SIGTERM", "ftmon stop"] = "SIGTERM"
    grace_s: float = 0.0  # seconds after which the rank is killed (`--stop-grace`); 0: it is not
    done: Whole = 0  # batches of the evaluation under way that are done
    total: Whole = 0  # all of its batches; 0: unknown, or there is no evaluation


class ProcessMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process that holds memory of a device. ``rank`` is None if it does not belong to this run."""

    pid: Whole
    used_bytes: Whole
    rank: Rank | None = None
    name: str = ""


class DeviceSample(msgspec.Struct, tag="device", frozen=True, omit_defaults=True):
    """One sample of a device: NVML for a GPU; /proc for the host itself (``kind`` ``host``). None: cannot be read."""

    host: Name
    kind: Literal["gpu", "host"]
    index: Whole
    name: Name
    time: Time
    used_bytes: Whole
    total_bytes: Whole
    uuid: Name = ""
    utilization_percent: Gauge | None = None
    """Share of the last sampling period in which a kernel ran (NVML), or busy CPU share (host)."""
    power_w: Gauge | None = None
    power_limit_w: Gauge | None = None
    temperature_c: Gauge | None = None
    sm_clock_mhz: Whole | None = None
    memory_clock_mhz: Whole | None = None
    throttle_reasons: list[str] = []
    processes: list[ProcessMemory] = []
