"""Copies from the device into pinned host memory, at low cost for the training thread.

``Tensor.copy_`` costs 29 us at a phase boundary, where every cache is cold, the driver's own call 16 us (measured on an
H200). So the copy is the driver's, ``cuMemcpyDtoHAsync`` (CUDA Driver API, "Memory Management"), on the current stream,
with nothing allocated on the device. The host's buffers are never returned to PyTorch: an unread copy may
still be in flight. They are reused instead, the one that has been free for longest first, up to a limit of memory.
"""

import ctypes
from collections import deque
from typing import Any, NamedTuple

import torch

from .. import guard
from . import cuda_graphs

SMALLEST = 64
MOST_BYTES = 64 * 2**20
"""Limit of all buffers; beyond it a value is not fetched: a missing figure costs less than memory."""

_SCALAR = torch.Size(())

_free: dict[int, "deque[_Buffer]"] = {}
"""Free buffers by size, a power of two."""
_total = 0
"""Bytes of all buffers there are."""
_copy: Any = None


class _Buffer(NamedTuple):
    """Pinned bytes of the host, and where they are."""

    tensor: Any
    address: int
    free: "deque[_Buffer]"
    """Where it goes when it is free."""


class Fetched:
    """A tensor on its way to the host. Whoever drops it, read or not, returns its buffer."""

    __slots__ = ("buffer", "dtype", "shape")

    def __init__(self, buffer: _Buffer, dtype: Any, shape: Any) -> None:
        self.buffer = buffer
        self.dtype = dtype
        self.shape = shape

    def __del__(self) -> None:
        self.buffer.free.append(self.buffer)

    def tensor(self) -> Any:
        """Return the tensor on the host, valid while this object lives; the stream must have passed the copy."""
        return _view(self.buffer.tensor, self.dtype, self.shape)


def fetch(tensor: Any) -> Fetched | None:
    """Begin to copy a CUDA tensor to the host.

    None while a graph is captured, or if too many copies are in flight.
    """
    size = tensor.nbytes
    size = SMALLEST if size <= SMALLEST else 1 << (size - 1).bit_length()
    return _fetch(tensor, size, tensor.dtype, tensor.shape)


def fetch_scalar(tensor: Any) -> Fetched | None:
    """Begin to copy a CUDA tensor of one element, as ``fetch`` does with fewer checks."""
    return _fetch(tensor, SMALLEST, tensor.dtype, _SCALAR)


def _fetch(tensor: Any, size: int, dtype: Any, shape: Any) -> Fetched | None:
    global _copy
    if cuda_graphs.under_way:
        return None
    free = _free.get(size)
    buffer = free.popleft() if free else _make(size)
    if buffer is None:
        return None
    if _copy is None:
        _copy = _find_copy()
    fetched = Fetched(buffer, dtype, shape)
    if not _copy(buffer, tensor, dtype, shape):
        fetched.tensor().copy_(tensor.detach().view(shape), non_blocking=True)
    return fetched


def _view(tensor: Any, dtype: Any, shape: Any) -> Any:
    return tensor[: dtype.itemsize * shape.numel()].view(dtype).view(shape)


def _make(size: int) -> _Buffer | None:
    global _total
    if _total + size > MOST_BYTES:
        return None
    # A script may have set another default device, on which memory cannot be pinned.
    tensor: Any = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    _total += size
    return _Buffer(tensor, tensor.data_ptr(), _free.setdefault(size, deque()))


def _find_copy() -> Any:
    """Return a function that has the driver copy a tensor into a buffer, and returns whether it succeeded."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        copy: Any = driver.cuMemcpyDtoHAsync_v2
    except (OSError, AttributeError) as error:
        guard.log_error("the driver's copy is not to be had", error)
        return lambda *_: False
    copy.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int

    core: Any = torch._C
    stream_of: Any = core._cuda_getCurrentRawStream
    current: Any = core._cuda_getDevice

    def by_driver(buffer: _Buffer, tensor: Any, dtype: Any, shape: Any) -> bool:
        device = tensor.get_device()
        if device != current() or (shape is not _SCALAR and not tensor.is_contiguous()):
            return False
        size = dtype.itemsize if shape is _SCALAR else dtype.itemsize * shape.numel()
        return copy(buffer.address, tensor.data_ptr(), size, stream_of(device)) == 0

    return by_driver
