"""Messages about a run's health that change slowly: data loaders, compilations, checksums, disks, and GPUs' faults.

Times called ``time`` are seconds since the epoch on the sender's clock; sizes are bytes.
"""

import msgspec

from .bounds import Name, Rank, Time, Whole


class DataLoaderInfo(msgspec.Struct, frozen=True):
    """Settings of the PyTorch DataLoader that a rank trains from."""

    workers: Whole = 0
    """``num_workers``; 0: the training thread loads by itself."""
    prefetch_factor: Whole = 0
    """Batches that each worker loads ahead; 0 without workers."""
    pin_memory: bool = False
    persistent_workers: bool = False
    cpus: Whole = 0
    """Processors that the rank's process may use, divided by the ranks of its host."""


class Compilation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One frame that ``torch.compile`` (Dynamo) compiled."""

    name: str
    """The function and where it is: ``forward (model.py:40)``."""
    step: Whole = 0
    """Current step when the rank's publisher detected it."""
    seconds: float = 0.0
    reason: str = ""
    """Why it was compiled again, Dynamo's words; empty for the first time."""
    failed: str = ""
    """Why it could not be, the exception's type; empty: it was."""


class Compiles(msgspec.Struct, tag="compiles", frozen=True, omit_defaults=True):
    """What ``torch.compile`` compiled on a rank since the message before; sent at most once a second."""

    rank: Rank
    time: Time
    total: Whole
    """Frames compiled since the process began."""
    functions: list[Compilation] = []


class ParameterSum(msgspec.Struct, frozen=True, array_like=True):
    """Checksums of one parameter, or of a part of it. Encoded as an array of three."""

    name: str
    """As in the model; a part of a large one ends with the range of its elements, ``[0:1048576]``."""
    total: float
    """Sum of the elements in double precision."""
    norm: float
    """Euclidean norm of the elements."""


class Checksum(msgspec.Struct, tag="checksum", frozen=True, omit_defaults=True):
    """Checksums of some replicated parameters after an update; equal on all ranks of a data-parallel run."""

    rank: Rank
    step: Whole
    time: Time
    parameters: list[ParameterSum]
    cost_us: Whole = 0
    """What it cost the training thread."""


class BatchLoss(msgspec.Struct, tag="batch_loss", frozen=True, omit_defaults=True):
    """The loss of a step's first micro-step, taken now and then: ranks with equal inputs must have equal ones."""

    rank: Rank
    step: Whole
    time: Time
    inputs: Name
    """Fingerprint of what the dataloader gave and the model was called with."""
    loss: float
    """What was backpropagated, before any loss scale."""
    precision: float = 0.0
    """Relative difference from which on rounding no longer explains one."""
    cost_us: Whole = 0
    """What it cost the training thread."""


class Volume(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file system that the run writes to."""

    path: str
    """A directory on it that the run uses."""
    use: str
    """What for: ``run directory``, ``output``, ``working directory``, ``TMPDIR`` or ``/dev/shm``."""
    free_bytes: Whole
    """Available to this user."""
    total_bytes: Whole


class DiskSpace(msgspec.Struct, tag="disks", frozen=True, omit_defaults=True):
    """Free space on the file systems that the run uses on a host; sent when it changed, and once a minute."""

    host: Name
    time: Time
    volumes: list[Volume]


class DeviceHealth(msgspec.Struct, tag="device_health", frozen=True, omit_defaults=True):
    """Faults and links of a GPU by NVML; None: this card or driver does not report it.

    Sent when it changed, and once a minute.
    """

    host: Name
    index: Whole
    time: Time
    uuid: Name = ""
    ecc_corrected: Whole | None = None
    """Since the driver was loaded."""
    ecc_uncorrected: Whole | None = None
    remap_pending: bool = False
    """A memory row is to be remapped at the next reset of the GPU."""
    remap_failed: bool = False
    pcie_gen: Whole | None = None
    pcie_gen_max: Whole | None = None
    """The fastest that the device and its slot allow."""
    pcie_width: Whole | None = None
    pcie_width_max: Whole | None = None
    pcie_replays: Whole | None = None
    nvlinks_up: Whole | None = None


class Xid(msgspec.Struct, tag="xid", frozen=True, omit_defaults=True):
    """An error that NVIDIA's driver reported (an XID)."""

    host: Name
    time: Time
    code: Whole
    index: int = -1
    """NVML's index of the GPU; -1: not known."""
    bus: Name = ""
    """PCI address, as the kernel's log writes it."""
    text: str = ""
    """The driver's line in the kernel's log; empty when NVML reported it."""
