"""Allocations that fail: seen at that very moment, told to the hub, and (``--on-oom hold``) waited at.

On CUDA the allocator itself calls, in the thread whose allocation failed and before anything unwinds. On the CPU the
exception is what there is: a hook sees it on its way up, while its traceback keeps the frames alive.
"""

import contextlib
import re
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from . import guard
from .oommoment import Failed, host_room, tell

if TYPE_CHECKING:
    from .probe import Probe

_CPU_MESSAGE = re.compile(r"not enough memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
_CPU_SIZE = re.compile(r"tried to allocate (\d+) bytes")
_DRIVER_MESSAGE = re.compile(r"CUDA error: out of memory|CUDA driver error: out of memory|Cuda failure .*out of memory")


def watch_cuda(probe: "Probe") -> None:
    """Have PyTorch's allocator tell of every allocation that fails (the script may catch the error and go on)."""
    import torch

    core: Any = torch._C

    def observe(device: int, requested: int, total: int, free: int) -> None:
        # The allocator's lock is not held here, and this is the thread whose allocation failed.
        if probe.hold.here:
            return  # a console tried something, and will be told that it failed
        try:
            frames = frames_to(sys._getframe(0).f_back)
            lines = [frame.f_lineno for frame in frames]
            failed = Failed(requested, free, total, f"CUDA out of memory on device {device}", frames, lines, device)
            held = tell(probe, failed)
            if held:
                probe.hold.wait(failed.frames, requested, torch.device("cuda", device))
        except Exception as error:
            guard.log_error("reporting an out-of-memory error", error)

    core._cuda_attach_out_of_memory_observer(observe)


def report_failed_allocation(probe: "Probe", error: BaseException) -> None:
    """Report an exception that says the CPU allocator had no memory; any other is passed over, a second time too.

    What the CUDA driver refused somebody else than PyTorch's allocator (NCCL, pinned memory) is told too.
    """
    if getattr(error, "_ftmon_seen", False):
        return
    driver = isinstance(error, RuntimeError) and bool(_DRIVER_MESSAGE.search(str(error)))
    if not (driver or isinstance(error, MemoryError) or _is_cpu_oom(error)):
        return
    with contextlib.suppress(AttributeError):
        error._ftmon_seen = True  # type: ignore[attr-defined]
    size = _CPU_SIZE.search(str(error))
    requested = int(size.group(1)) if size else 0
    import torch

    available, total, _ = host_room()
    index = None
    if driver and probe.device.memory.measure == "cuda":
        index = probe.device.memory.device_index
        available, total = torch.cuda.mem_get_info(index)
    frames, lines = frames_of(error.__traceback__)
    words = str(error) or type(error).__name__
    held = tell(probe, failed := Failed(requested, available, total, words, frames, lines, index))
    if held:
        probe.hold.wait(failed.frames, requested, torch.device("cpu") if index is None else torch.device("cuda", index))


def frames_to(frame: FrameType | None) -> list[FrameType]:
    """List the frames that lead to ``frame``, outermost first."""
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def frames_of(trace: TracebackType | None) -> tuple[list[FrameType], list[int]]:
    """List the frames of a traceback, those above it included, outermost first, and the line each was at.

    A frame that the exception has left stands elsewhere by now (in a ``finally``, say): its line is the traceback's.
    """
    if trace is None:
        return [], []
    found = frames_to(trace.tb_frame.f_back)
    lines = [frame.f_lineno for frame in found]
    while trace is not None:
        found.append(trace.tb_frame)
        lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return found, lines


def _is_cpu_oom(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "CUDA" not in str(error) and bool(_CPU_MESSAGE.search(str(error)))
