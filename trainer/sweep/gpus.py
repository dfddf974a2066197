"""Checks that the GPUs are empty again after a run: a measurement on a GPU in use by others is invalid."""

import time
from collections.abc import Collection

from ...protocol.text import gib
from ..host.hardware.gpu_memory import GpuUse, gpu_use, wait_until_free

_SECONDS = 30.0
_POLL_SECONDS = 0.5
_TOLERANCE = 512 << 20
"""Allowed increase of a device's used memory: contexts of other processes appear and disappear."""


def before() -> GpuUse | None:
    """Sample the GPUs before a run; None without NVML."""
    return gpu_use(())


def still_held(earlier: GpuUse | None, pids: Collection[int], devices: Collection[int]) -> str:
    """Wait until the run's GPUs are as empty as before it; return the memory still in use in words, or empty.

    Args:
        earlier: the sample before the run.
        pids: process ids of the run's ranks.
        devices: the run's GPUs according to NVML; empty: not known, so all are compared.
    """
    if earlier is None:
        return ""
    after = wait_until_free(pids, _SECONDS)
    if after is not None and after.held:
        return "NVML still lists " + ", ".join(f"{gib(size)} of pid {pid}" for pid, size in after.held.items())
    deadline = time.monotonic() + _SECONDS
    while after is not None:
        more = {
            device: size - earlier.used.get(device, size)
            for device, size in after.used.items()
            if (not devices or device in devices) and size - earlier.used.get(device, size) > _TOLERANCE
        }
        if not more:
            break
        if time.monotonic() >= deadline:
            return ", ".join(f"GPU {device} has {gib(size)} more in use than before" for device, size in more.items())
        time.sleep(_POLL_SECONDS)
        after = gpu_use(pids)
    return ""
