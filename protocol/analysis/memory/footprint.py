"""What a device's used memory consists of: NVML's figures joined with those of a rank's allocator. Pure arithmetic.

NVML knows processes and no tensors, PyTorch's allocator knows tensors and not what CUDA and NCCL take beside it. Put
together, with everything in bytes and each line a subtraction:

* ``allocated``: what the parts of a composition add up to;
* ``unused`` = reserved - allocated: cached by PyTorch, free or lost to rounding and fragmentation;
* ``context`` = the process's used (NVML) - reserved: the CUDA context, its modules, NCCL's and cuBLAS' own buffers;
* ``others``: what NVML lists for other processes on the device;
* ``unexplained`` = used (NVML, of the device) - all processes: the driver's own.

The two sides are read at different moments. A ``context`` or ``unexplained`` below zero is that gap: it is kept as it
is, so that the lines always add up to ``used``.
"""

import msgspec

from ...messages.telemetry import DeviceSample


class Footprint(msgspec.Struct, frozen=True):
    """A device's used memory, in bytes; ``allocated`` to ``unexplained`` add up to ``used``."""

    allocated: int
    unused: int
    context: int
    others: int
    unexplained: int
    used: int
    total: int

    @property
    def free(self) -> int:
        """Free bytes."""
        return self.total - self.used


def footprint(allocated: int, reserved: int, sample: DeviceSample, rank: int) -> Footprint | None:
    """Join a rank's allocator with NVML's sample of its device.

    Args:
        allocated: bytes PyTorch had allocated, ``Composition.allocated_bytes`` or a phase's peak.
        reserved: bytes it had reserved at the same moment.
        sample: of the rank's device, read close to it.
        rank: the rank.

    Returns:
        None when NVML lists no process of that rank (in a container it may not see any).
    """
    own = sum(process.used_bytes for process in sample.processes if process.rank == rank)
    if not own:
        return None
    others = sum(process.used_bytes for process in sample.processes if process.rank != rank)
    return Footprint(
        allocated=allocated,
        unused=reserved - allocated,
        context=own - reserved,
        others=others,
        unexplained=sample.used_bytes - own - others,
        used=sample.used_bytes,
        total=sample.total_bytes,
    )
