"""Detects the capture of a CUDA graph: work that the probe recorded into one would be replayed for ever.

A query of the stream costs 3 us at each phase boundary, where every cache is cold. Every capture from Python goes
through ``torch.cuda.CUDAGraph``, so its two methods are wrapped once, and the query is a read of a number.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from .. import guard
from ..replace import replace

_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``."""
under_way = 0
"""Number of captures that have begun and not ended."""


def install(torch: Any) -> None:
    """Wrap ``torch.cuda.CUDAGraph``, once; CUDA is running."""
    graph: Any = torch.cuda.CUDAGraph
    try:
        replace(graph, "capture_begin", _beginning)
        replace(graph, "capture_end", _ending)
    except (AttributeError, TypeError) as error:
        guard.log_error("captures of CUDA graphs are not noticed", error)


def allow_queries() -> None:
    """Let this thread query events while another captures a graph: by default that breaks the capture.

    The mode is the thread's own (``cuThreadExchangeStreamCaptureMode`` of the CUDA driver API); PyTorch's watchdog of
    NCCL does the same.
    """
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    except (OSError, AttributeError) as error:
        guard.log_error("events cannot be asked for during captures of CUDA graphs", error)


def _beginning(real: Callable[..., Any]) -> Callable[..., Any]:
    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        global under_way
        under_way += 1
        try:
            return real(*args, **kwargs)
        except BaseException:
            under_way -= 1
            raise

    return capture_begin


def _ending(real: Callable[..., Any]) -> Callable[..., Any]:
    def capture_end(*args: Any, **kwargs: Any) -> Any:
        global under_way
        try:
            return real(*args, **kwargs)
        finally:
            under_way = max(0, under_way - 1)

    return capture_end
