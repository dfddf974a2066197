"""Allocations that fail: the allocator's numbers and the script's stack at that very moment."""

import contextlib
import re
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...protocol.telemetry import Oom
from . import guard
from .memory_cpu import available_bytes

if TYPE_CHECKING:
    from .probe import Probe

_CPU_MESSAGE = re.compile(r"not enough memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
_CPU_SIZE = re.compile(r"tried to allocate (\d+) bytes")
_FRAMES = 40


def watch_cuda(probe: "Probe") -> None:
    """Have PyTorch's allocator tell of every allocation that fails (the script may catch the error and go on)."""
    import torch

    core: Any = torch._C

    def observe(device: int, requested: int, total: int, free: int) -> None:
        # The allocator's lock is not held here, and this is the thread whose allocation failed.
        try:
            memory: Any = probe.device.memory
            now = memory.now() if device == memory.device_index else None
            _hand_over(
                probe,
                requested=requested,
                free=free,
                total=total,
                allocated=now.allocated if now else 0,
                reserved=now.reserved if now else 0,
                message=f"CUDA out of memory on device {device}",
                stack=stack_of(sys._getframe(1)),
            )
        except Exception as error:
            guard.log_error("reporting an out-of-memory error", error)

    core._cuda_attach_out_of_memory_observer(observe)


def report_failed_allocation(probe: "Probe", error: BaseException) -> None:
    """Report an exception that says the CPU allocator had no memory; any other is passed over, a second time too."""
    if getattr(error, "_ftmon_seen", False) or not (isinstance(error, MemoryError) or _is_cpu_oom(error)):
        return
    with contextlib.suppress(AttributeError):
        error._ftmon_seen = True  # type: ignore[attr-defined]
    memory = probe.device.memory
    last = memory.read(probe.tracker.sample)
    if memory.measure == "glibc":
        last = memory.read(memory.sample())
    size = _CPU_SIZE.search(str(error))
    frames: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(_place(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    _hand_over(
        probe,
        requested=int(size.group(1)) if size else 0,
        free=available_bytes(),
        total=probe.device.info.capacity_bytes,
        allocated=last.allocated,
        reserved=last.reserved,
        message=str(error) or type(error).__name__,
        stack=frames[-_FRAMES:],
    )


def stack_of(frame: FrameType | None) -> list[str]:
    """List the frames that lead to ``frame``, innermost last, as ``file:line function``."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        found.append(_place(frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"


def _is_cpu_oom(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "CUDA" not in str(error) and bool(_CPU_MESSAGE.search(str(error)))


def _hand_over(
    probe: "Probe",
    *,
    requested: int,
    free: int,
    total: int,
    allocated: int,
    reserved: int,
    message: str,
    stack: list[str],
) -> None:
    tracker = probe.tracker
    probe.hand_over(
        Oom(
            rank=probe.about.rank,
            step=tracker.step + 1,
            phase=tracker.phase,
            time=time.time(),
            requested_bytes=requested,
            device_free_bytes=free,
            device_total_bytes=total,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            batch_shape=list(tracker.notes.shape),
            message=message,
            stack=stack,
        )
    )
