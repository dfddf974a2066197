"""Copies from the device into pinned host memory that the training thread pays little for.

``Tensor.copy_`` costs 29 us at a phase boundary, where every cache is cold, the driver's own call 16 us (measured on an
H200). So the copy is the driver's, ``cuMemcpyDtoHAsync`` (CUDA Driver API, "Memory Management"), on the current stream,
with nothing allocated on the device. The host's buffers are never given back to PyTorch: a copy that nobody read may
still be on its way. They are used again instead, and there is a bound to what they take.
"""

import ctypes
from collections import deque
from typing import Any, NamedTuple

from . import capture, guard

SMALLEST = 64
MOST_BYTES = 64 * 2**20
"""Beyond these, a value is not fetched: a number less to show, but never more memory."""

_free: dict[int, deque[Any]] = {}
"""Free buffers by size, a power of two."""
_kept: list[Any] = []
"""Every buffer there is."""
_copy: Any = None


class Fetched(NamedTuple):
    """A tensor on its way to the host."""

    buffer: Any
    dtype: Any
    shape: Any

    def tensor(self) -> Any:
        """Give the tensor on the host; the stream must have come past the copy."""
        return _view(self.buffer, self.dtype, self.shape)


def fetch(tensor: Any) -> Fetched | None:
    """Begin to copy a CUDA tensor to the host.

    None when it cannot be had: a graph is being captured, or too much is on its way.
    """
    global _copy
    if capture.under_way:
        return None
    size = max(SMALLEST, 1 << (tensor.nbytes - 1).bit_length()) if tensor.nbytes else SMALLEST
    free = _free.get(size)
    buffer = free.pop() if free else _make(size)
    if buffer is None:
        return None
    if _copy is None:
        _copy = _find_copy()
    if not _copy(buffer, tensor):
        _view(buffer, tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)
    return Fetched(buffer, tensor.dtype, tensor.shape)


def give_back(fetched: Fetched) -> None:
    """Have a buffer used again, once what is in it has been read."""
    buffer = fetched.buffer
    _free[buffer.nbytes].append(buffer)


def _view(buffer: Any, dtype: Any, shape: Any) -> Any:
    return buffer[: dtype.itemsize * shape.numel()].view(dtype).view(shape)


def _make(size: int) -> Any:
    import torch

    if sum(buffer.nbytes for buffer in _kept) + size > MOST_BYTES:
        return None
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    _free.setdefault(size, deque())
    _kept.append(buffer)
    return buffer


def _find_copy() -> Any:
    """Give a function that has the driver copy (buffer, tensor), and says whether it could."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        copy: Any = driver.cuMemcpyDtoHAsync_v2
    except (OSError, AttributeError) as error:
        guard.log_error("the driver's copy is not to be had", error)
        return lambda _buffer, _tensor: False
    copy.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int

    import torch

    core: Any = torch._C
    stream_of: Any = core._cuda_getCurrentRawStream
    current: Any = core._cuda_getDevice

    def by_driver(buffer: Any, tensor: Any) -> bool:
        device = tensor.device.index
        if device != current() or not tensor.is_contiguous():
            return False
        return copy(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes, stream_of(device)) == 0

    return by_driver
