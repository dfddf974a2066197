"""A prediction: the JSON of ``ftmon predict --json``."""

import msgspec

from ...protocol.analysis.estimates.curve import Piece
from ...protocol.analysis.estimates.figure import Figure
from ...protocol.analysis.estimates.largest import Largest
from ...protocol.analysis.estimates.roofline import StepTime


class Phase(msgspec.Struct, frozen=True):
    """Highest memory of one phase, from PyTorch's allocator's point of view."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    parts: dict[str, int] = {}
    """What the allocated peak consists of, by the words of the memory screen; they add up to it. None of ``init``."""


class Rank(msgspec.Struct, frozen=True):
    """One rank's memory."""

    rank: int
    phases: dict[str, Phase]
    """``init``, ``forward``, ``backward``, ``optimizer``."""
    host_bytes: int
    """Host memory of its tensors: offloaded states and page-locked buffers, without the process itself."""
    needed_bytes: int = 0
    """The least that PyTorch must be allowed to reserve for every allocation to succeed, found by replays of the trace;
    below the reserved peak where cached memory can be given back."""
    nvml_bytes: int = 0
    """What NVML shows for the process at its peak: reserved, the CUDA context and NCCL's buffers."""

    @property
    def peak_phase(self) -> str:
        """The phase with the highest allocated peak."""
        return max(self.phases, key=lambda name: self.phases[name].allocated_peak_bytes)

    @property
    def allocated_peak_bytes(self) -> int:
        """Highest allocated memory of all phases."""
        return max(phase.allocated_peak_bytes for phase in self.phases.values())

    @property
    def reserved_peak_bytes(self) -> int:
        """Highest reserved memory of all phases."""
        return max(phase.reserved_peak_bytes for phase in self.phases.values())


class Point(msgspec.Struct, frozen=True):
    """Memory at one sequence length and micro-batch."""

    sequence_length: int
    micro_batch: int
    ranks: list[Rank]
    host_bytes: int
    """Host memory of all ranks' tensors."""
    nvml_bytes: int
    """The highest of the ranks."""
    fits: bool | None = None
    """Whether every rank's allocations fit; None without a capacity."""
    fails_in: str = ""
    """The phase whose allocation does not fit."""
    needed_bytes: int = 0
    """The highest of the ranks."""
    step_seconds: float | None = None
    """Of an optimizer step; None where the table has no rates of the GPU. Its error and basis: ``time.total``."""
    tokens_per_second: float | None = None
    """Of all ranks."""
    mfu: float | None = None
    """Model FLOPs utilisation (``protocol.messages.throughput``); None where the model's FLOPs are not known."""
    price_per_million_tokens: float | None = None
    """With a price of a GPU hour, in its currency."""
    run_seconds: float | None = None
    """Of all optimizer steps; None where their number is not known (``training.max_steps``)."""
    run_price: float | None = None
    """Of the run, with a price of a GPU hour; evaluation, checkpoints and the start are not counted."""
    time: StepTime | None = None
    """What the step's time goes to."""
    fits_on: list[str] = []
    """Kinds of GPU (``FIT_TABLE``) on which every allocation fits, beside the CUDA context and NCCL."""


class WhatIf(msgspec.Struct, frozen=True):
    """A change of the run, predicted by a dry run of its own."""

    name: str
    change: str
    fits: bool
    needed_bytes: int
    """What PyTorch must be allowed to reserve."""
    saved_bytes: int
    """Less than the run as it is."""
    host_bytes: int
    """Of the rank that holds the most, as in the table of the phases."""
    step_seconds: float
    slower: float
    """GPU time a sample over that of the run as it is."""
    price_per_million_tokens: float | None = None
    refused: str = ""
    """Why there is no prediction; the figures do not count then."""


class Holds(msgspec.Struct, frozen=True):
    """How long sequences and how large micro-batches can be."""

    gpu: str
    """The kind of GPU; empty: the capacity that was given."""
    capacity_bytes: int
    """What PyTorch may reserve on it."""
    sequence_length: Largest
    """At the micro-batch that was asked for; within 0.8 %."""
    micro_batch: Largest
    """At the longest length that was asked for."""


class RiskyStep(msgspec.Struct, frozen=True):
    """An optimizer step of the first epoch, by its longest micro-batch."""

    step: int
    """From 1."""
    rank: int
    rows: list[int]
    """Numbers of the examples, as the rehearsal names them."""
    places: list[str]
    """Where the records of each row stand: ``train.jsonl:12``."""
    length: int
    """That its rows are padded to, in tokens."""


class DataRisk(msgspec.Struct, frozen=True):
    """Whether every step of the first epoch fits."""

    steps: int
    """Of the epoch."""
    longest: RiskyStep
    largest_length: int | None
    """The largest of the lengths that occur that fits; None: none does."""
    failing_steps: int
    """Steps that do not fit."""
    failing: list[RiskyStep]
    """The first of them."""
    epoch_seconds: float | None = None
    """Of an epoch's optimizer steps at ``training.sequence_length``; without evaluation, checkpoints and the start."""
    epoch_price: float | None = None
    """With a price of a GPU hour, in its currency."""


class Prediction(msgspec.Struct, frozen=True):
    """The answer of ``ftmon predict``."""

    model: str
    parameters: int
    ranks: int
    points: list[Point]
    pieces: list[Piece] = []
    """With several lengths: the highest phase's peak over the length as straight pieces."""
    beside_pytorch: Figure | None = None
    """Bytes on the GPU beside what PyTorch reserves, with their expected error."""
    notes: list[str] = []
    """What was assumed."""
    capacity_bytes: int | None = None
    gpu: str = ""
    """The kind of GPU that the dry run and the time are of."""
    trainable: int = 0
    """Parameters that are trained."""
    checkpoint_bytes: int = 0
    """Disk space of one checkpoint that can be resumed from, of all ranks."""
    price_per_gpu_hour: float | None = None
    expected_errors: dict[str, Figure] = {}
    """By figure: its expected error as a share and what it was measured on; ``value`` is 0."""
    data: DataRisk | None = None
    """With ``--data``: which steps of the first epoch do not fit."""
    positions: int = 0
    """Tokens of the longest sequence that the model is made for; 0: not known."""
    largest: list[Holds] = []
    """With ``--largest``: by kind of GPU, or of the capacity."""
    batch_pieces: list[Piece] = []
    """With ``--largest``: the highest phase's peak over the micro-batch, at the longest length."""
    what_if: list[WhatIf] = []
    """Changes at the longest length: those that fit by GPU time a sample, then the others by missing bytes."""
    sequence_parallel_size: int = 1
    """Ranks that share each sequence."""
    versions: dict[str, str] = {}
