"""Composition of a device's used memory, from NVML's figures and those of a rank's allocator.

NVML reports processes, not tensors; PyTorch's allocator reports tensors, not the memory of CUDA and NCCL. Combined, in
bytes:

* ``allocated``: sum of the parts of a composition;
* ``unused`` = reserved - allocated: cached by PyTorch, free or lost to rounding and fragmentation;
* ``context`` = the process's used (NVML) - reserved: the CUDA context, its modules, buffers of NCCL and cuBLAS;
* ``others``: memory of other processes on the device (NVML);
* ``unexplained`` = used (NVML, of the device) - all processes: the driver's own.

The two sources are read at different moments, so ``context`` or ``unexplained`` may be negative; they are not clipped,
so that the figures always add up to ``used``.
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
    """Combine the figures of a rank's allocator with NVML's sample of its device.

    Args:
        allocated: bytes PyTorch had allocated, ``Composition.allocated_bytes`` or a phase's peak.

    Returns:
        None if NVML lists no process of that rank (in a container it may not see any).
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
