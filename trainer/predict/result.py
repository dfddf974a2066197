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
    """Composition of the allocated peak, by the parts of the memory screen; they add up to it. Empty for ``init``."""


class Rank(msgspec.Struct, frozen=True):
    """One rank's memory."""

    rank: int
    phases: dict[str, Phase]
    """``init``, ``forward``, ``backward``, ``optimizer``."""
    host_bytes: int
    """Host memory of its tensors: offloaded states and page-locked buffers, without the process itself."""
    needed_bytes: int = 0
    """Minimum of reservable memory for every allocation to succeed, found by replays of the trace; below the reserved
    peak if cached memory can be freed."""
    nvml_bytes: int = 0
    """Memory of the process according to NVML at its peak: reserved, the CUDA context and NCCL's buffers."""

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
    """Highest over the ranks."""
    fits: bool | None = None
    """Whether every rank's allocations fit; None without a capacity."""
    fails_in: str = ""
    """The phase whose allocation does not fit."""
    needed_bytes: int = 0
    """Highest over the ranks."""
    step_seconds: float | None = None
    """Time of an optimizer step; None if the table has no rates of the GPU. Its error and basis: ``time.total``."""
    tokens_per_second: float | None = None
    """Tokens per second of all ranks."""
    mfu: float | None = None
    """Model FLOPs utilisation (``protocol.messages.throughput``); None if the model's FLOPs are not known."""
    price_per_million_tokens: float | None = None
    """Price in the currency of the GPU hour's price; None without that."""
    run_seconds: float | None = None
    """Time of all optimizer steps; None if their number is not known (``training.max_steps``)."""
    run_price: float | None = None
    """Price of the run, given a price of a GPU hour; without evaluation, checkpoints and the start."""
    time: StepTime | None = None
    """Parts of the step's time."""
    fits_on: list[str] = []
    """Kinds of GPU (``FIT_TABLE``) on which every allocation fits, besides the CUDA context and NCCL."""


class WhatIf(msgspec.Struct, frozen=True):
    """A change of the run, predicted by a separate dry run."""

    name: str
    change: str
    fits: bool
    needed_bytes: int
    """Minimum of memory that PyTorch must be able to reserve."""
    saved_bytes: int
    """Reduction relative to the unchanged run."""
    host_bytes: int
    """Host memory of the rank with the most, as in the table of the phases."""
    step_seconds: float
    slower: float
    """GPU time per sample relative to the unchanged run."""
    price_per_million_tokens: float | None = None
    refused: str = ""
    """Reason of a missing prediction, with which the figures are invalid."""


class Holds(msgspec.Struct, frozen=True):
    """Largest sequence length and micro-batch."""

    gpu: str
    """The kind of GPU; empty: the given capacity."""
    capacity_bytes: int
    """Limit of PyTorch's reserved memory on it."""
    sequence_length: Largest
    """Largest length at the requested micro-batch, within 0.8 %."""
    micro_batch: Largest
    """Largest micro-batch at the longest requested length."""


class RiskyStep(msgspec.Struct, frozen=True):
    """An optimizer step of the first epoch, by its longest micro-batch."""

    step: int
    """Number of the step, from 1."""
    rank: int
    rows: list[int]
    """Numbers of the examples, as in the rehearsal."""
    places: list[str]
    """Place of each row's records: ``train.jsonl:12``."""
    length: int
    """Padded length of its rows, in tokens."""


class DataRisk(msgspec.Struct, frozen=True):
    """Whether every step of the first epoch fits."""

    steps: int
    """Steps of the epoch."""
    longest: RiskyStep
    largest_length: int | None
    """The largest occurring length that fits, or None."""
    failing_steps: int
    """Number of steps that do not fit."""
    failing: list[RiskyStep]
    """The first steps that do not fit."""
    epoch_seconds: float | None = None
    """Time of an epoch's optimizer steps at ``training.sequence_length``, without evaluation, checkpoints and start."""
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
    """Bytes on the GPU besides PyTorch's reserved memory, with their expected error."""
    notes: list[str] = []
    """Assumptions."""
    capacity_bytes: int | None = None
    gpu: str = ""
    """The kind of GPU of the dry run and the time."""
    trainable: int = 0
    """Number of trained parameters."""
    checkpoint_bytes: int = 0
    """Disk space of one checkpoint for a resume, of all ranks."""
    price_per_gpu_hour: float | None = None
    expected_errors: dict[str, Figure] = {}
    """By figure: its expected error as a share, and the basis of that; ``value`` is 0."""
    data: DataRisk | None = None
    """With ``--data``: the steps of the first epoch that do not fit."""
    positions: int = 0
    """The model's maximum sequence length in tokens; 0: not known."""
    largest: list[Holds] = []
    """With ``--largest``: by kind of GPU, or for the capacity."""
    batch_pieces: list[Piece] = []
    """With ``--largest``: the highest phase's peak over the micro-batch, at the longest length."""
    what_if: list[WhatIf] = []
    """Changes at the longest length: fitting ones by GPU time per sample, then the others by missing bytes."""
    sequence_parallel_size: int = 1
    """Ranks that share each sequence."""
    versions: dict[str, str] = {}
