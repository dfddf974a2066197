"""Which processes hold memory of this host's GPUs, asked of NVML for the moment after a kill."""

import contextlib
import time
from collections.abc import Collection

import pynvml

_LOOK_SECONDS = 0.2


def held_by(pids: Collection[int]) -> dict[int, int] | None:
    """Return the GPU memory, in bytes, of those of ``pids`` that hold any; None when NVML cannot tell.

    Where NVML sees another pid namespace than ours (some containers) its pids match none of ours, and nothing is found.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    held: dict[int, int] = {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids:
                    held[process.pid] = held.get(process.pid, 0) + int(process.usedGpuMemory or 0)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return held


def wait_released(pids: Collection[int], seconds: float) -> dict[int, int] | None:
    """Wait until none of ``pids`` holds GPU memory; return what is still held at the end (None: cannot tell)."""
    deadline = time.monotonic() + seconds
    while True:
        held = held_by(pids)
        if not held or time.monotonic() >= deadline:
            return held
        time.sleep(_LOOK_SECONDS)
