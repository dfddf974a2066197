"""Detects failing allocations as they fail, reports them to the hub, and (``--on-oom hold``) waits there.

On CUDA the allocator itself calls the handler, in the failing thread and before the stack unwinds. On the CPU the
exception is the only source: it passes a hook while its traceback keeps the frames alive.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from .. import guard
from ..rank.context import RankContext
from .hold import Hold
from .report import Failed, OomReporter, frames_to, host_room

_CPU_MESSAGE = re.compile(r"not enough memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
_CPU_SIZE = re.compile(r"tried to allocate (\d+) bytes")
_CUDA_FIGURES = {
    "requested": re.compile(r"Tried to allocate ([\d.]+) ([KMGT]?i?B|bytes)"),
    "total": re.compile(r"total capacity of ([\d.]+) ([KMGT]?i?B)|; ([\d.]+) ([KMGT]?i?B) total capacity"),
    "free": re.compile(r"of which ([\d.]+) ([KMGT]?i?B|bytes) is free|; ([\d.]+) ([KMGT]?i?B|bytes) free"),
    "allocated": re.compile(r"([\d.]+) ([KMGT]?i?B|bytes) (?:is allocated by PyTorch|already allocated)"),
    "unallocated": re.compile(r"([\d.]+) ([KMGT]?i?B|bytes) is reserved by PyTorch but unallocated"),
}
"""PyTorch's own message (c10/cuda/CUDACachingAllocator.cpp), now and before 2.2."""
_CUDA_INDEX = re.compile(r"\bGPU (\d+)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DRIVER_MESSAGE = re.compile(r"CUDA error: out of memory|CUDA driver error: out of memory|Cuda failure .*out of memory")


class AllocationFailures:
    """Detects failing allocations, and holds the rank if requested."""

    def __init__(
        self, rank: RankContext, reporter: OomReporter, hold: Hold, check_device: Callable[[], object]
    ) -> None:
        self._rank = rank
        self._reporter = reporter
        self._hold = hold
        self._look_at_device = check_device
        self._watching = False
        """Whether CUDA's allocator reports failures."""

    def await_cuda(self) -> None:
        """Make PyTorch's allocator report failures as soon as the script has CUDA running.

        A model that does not fit fails before any hook sees the device: in ``from_pretrained`` under ``zero.Init``, in
        ``deepspeed.initialize``. PyTorch calls functions queued here in the thread that initialises CUDA.
        """
        import torch

        lazy_call: Any = getattr(torch.cuda, "_lazy_call", None)
        if torch.version.cuda is None or lazy_call is None:
            return

        def attach() -> None:
            try:
                self.watch_cuda()
            except Exception as error:  # it would be raised from the script's own call
                guard.log_error("watching CUDA's allocator", error)

        lazy_call(attach)

    def watch_cuda(self) -> None:
        """Make PyTorch's allocator report every failing allocation (the script may catch the error and go on)."""
        if self._watching:
            return
        self._watching = True
        import torch

        core: Any = torch._C

        def observe(device: int, requested: int, total: int, free: int) -> None:
            # The allocator's lock is not held here, and this is the thread whose allocation failed.
            if self._hold.here:
                return  # tried by a console, which shows the failure
            try:
                if not self._rank.device.settled and self._rank.guard.is_training_thread():
                    self._look_at_device()
                frames = frames_to(sys._getframe(0).f_back)
                lines = [frame.f_lineno for frame in frames]
                failed = Failed(requested, free, total, f"CUDA out of memory on device {device}", frames, lines, device)
                held = self._reporter.send_report(failed)
                if held:
                    self._hold.wait(failed.frames, requested, torch.device("cuda", device))
            except Exception as error:
                guard.log_error("reporting an out-of-memory error", error)

        core._cuda_attach_out_of_memory_observer(observe)

    def report(self, error: BaseException) -> None:
        """Report an exception of the CPU allocator; other exceptions and repetitions are ignored.

        Also reports driver allocations outside PyTorch's allocator (NCCL, pinned memory).
        """
        if getattr(error, "_ftmon_seen", False):
            return
        if type(error).__name__ == "OutOfMemoryError" and isinstance(error, RuntimeError) and not self._reporter.ooms:
            self._report_cuda(error)
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
        if driver and self._rank.device.memory.measure == "cuda":
            index = self._rank.device.memory.device_index
            available, total = torch.cuda.mem_get_info(index)
        frames, lines = frames_of(error.__traceback__)
        words = str(error) or type(error).__name__
        held = self._reporter.send_report(failed := Failed(requested, available, total, words, frames, lines, index))
        if held:
            self._hold.wait(
                failed.frames, requested, torch.device("cpu") if index is None else torch.device("cuda", index)
            )

    def _report_cuda(self, error: RuntimeError) -> None:
        """Report PyTorch's error if its allocator reported none: CUDA started unseen, or another allocator failed."""
        with contextlib.suppress(AttributeError):
            error._ftmon_seen = True  # type: ignore[attr-defined]
        text = str(error)
        found = {name: _bytes_in(pattern, text) for name, pattern in _CUDA_FIGURES.items()}
        index = _CUDA_INDEX.search(text)
        device = int(index.group(1)) if index else 0
        frames, lines = frames_of(error.__traceback__)
        failed = Failed(found["requested"], found["free"], found["total"], text, frames, lines, device)
        if found["allocated"]:
            failed.known = found["allocated"], found["allocated"] + found["unallocated"]
        if self._reporter.send_report(failed):
            import torch

            self._hold.wait(failed.frames, failed.requested, torch.device("cuda", device))


def _bytes_in(pattern: "re.Pattern[str]", text: str) -> int:
    found = pattern.search(text)
    if found is None:
        return 0
    number, unit = [group for group in found.groups() if group is not None][:2]
    return int(float(number) * _UNITS[unit])


def frames_of(trace: TracebackType | None) -> tuple[list[FrameType], list[int]]:
    """List the frames of a traceback, those above it included, outermost first, and the line each was at.

    A frame may have continued after the exception (in a ``finally``), so its line is the traceback's.
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
