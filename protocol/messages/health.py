"""Messages about a run's health: data loaders, compilations, disks, and GPU faults.

Times called ``time`` are seconds since the epoch on the sender's clock; sizes are bytes.
"""

import msgspec

from .bounds import Name, Rank, Time, Whole


class DataLoaderInfo(msgspec.Struct, frozen=True):
    """Settings of the PyTorch DataLoader that a rank trains from."""

    workers: Whole = 0
    """``num_workers``; 0: the training thread loads the batches."""
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
    """Why it was compiled again, as reported by Dynamo; empty for the first compilation."""
    failed: str = ""
    """The type of the exception with which the compilation failed; empty: it succeeded."""


class Compiles(msgspec.Struct, tag="compiles", frozen=True, omit_defaults=True):
    """Frames that ``torch.compile`` compiled on a rank since the previous message; sent at most once a second."""

    rank: Rank
    time: Time
    total: Whole
    """Frames compiled since the process began."""
    functions: list[Compilation] = []


class Volume(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file system that the run writes to."""

    path: str
    """A directory on this file system that the run uses."""
    use: str
    """Purpose: ``run directory``, ``output``, ``working directory``, ``TMPDIR`` or ``/dev/shm``."""
    free_bytes: Whole
    """Available to this user."""
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
    ecc_corrected: Whole | None = None
    """Corrected errors since the driver was loaded."""
    ecc_uncorrected: Whole | None = None
    remap_pending: bool = False
    """A memory row will be remapped at the next reset of the GPU."""
    remap_failed: bool = False


class Xid(msgspec.Struct, tag="xid", frozen=True, omit_defaults=True):
    """An error that NVIDIA's driver reported (an XID)."""

    host: Name
    time: Time
    code: Whole
    index: int = -1
    """NVML's index of the GPU; -1: unknown."""
    bus: Name = ""
    """PCI address as in the kernel log."""
    text: str = ""
    """The driver's line in the kernel log; empty if NVML reported it."""
