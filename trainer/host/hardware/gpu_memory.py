"""Checks that GPU memory is free after a kill, from NVML's list of processes and from the devices' totals.

In a container NVML may list the pids of another namespace, or none. The processes are therefore also searched before
the kill: if they were not found then, their absence afterwards proves nothing, and the devices' totals decide.
"""

import contextlib
import time
from collections.abc import Collection
from typing import NamedTuple

import pynvml

from ....protocol.text import gib

_POLL_SECONDS = 0.2


class GpuUse(NamedTuple):
    """One sample of all GPUs of this host."""

    held: dict[int, int]
    """Bytes held by each requested pid that NVML lists."""
    used: dict[int, int]
    """Memory in use on each GPU, by all processes."""
    devices: frozenset[int] = frozenset()
    """The GPUs on which they hold it."""


def gpu_use(pids: Collection[int]) -> GpuUse | None:
    """Sample the GPUs; None without NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    held: dict[int, int] = {}
    used: dict[int, int] = {}
    devices: set[int] = set()
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            used[index] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids:
                    devices.add(index)
                    held[process.pid] = held.get(process.pid, 0) + int(process.usedGpuMemory or 0)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return GpuUse(held, used, frozenset(devices))


def wait_until_free(pids: Collection[int], seconds: float) -> GpuUse | None:
    """Sample until none of ``pids`` holds GPU memory, for ``seconds`` at most; return the last sample."""
    deadline = time.monotonic() + seconds
    while True:
        found = gpu_use(pids)
        if found is None or not found.held or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_SECONDS)


def verdict(before: GpuUse | None, after: GpuUse | None) -> tuple[bool, str]:
    """Return whether memory is known to be still held after a kill, from samples before and after, and the text."""
    if before is None or after is None:
        return False, "NVML cannot tell whether GPU memory is free"
    if after.held:
        listed = ", ".join(f"{gib(size)} of pid {pid}" for pid, size in after.held.items())
        return True, f"NVML still lists {listed}"
    # Other GPUs are excluded, because another user's process that starts there would make a kill appear failed.
    theirs = before.devices or before.used.keys()
    was, now = (sum(look.used.get(device, 0) for device in theirs) for look in (before, after))
    fell = f"the GPUs' memory in use went from {gib(was)} to {gib(now)}"
    if before.held:
        return False, f"their GPU memory is free: {fell}"
    return False, f"NVML does not list this host's processes (another pid namespace?), but {fell}"
