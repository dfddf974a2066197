"""Follows allocations and frees of a dry run: a dispatch mode that tracks every storage."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .result_cache import MISSING, ResultCache
from .trace import Trace
from .work import Counting

_aten: Any = torch.ops.aten
_prim: Any = torch.ops.prim

Hidden = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called after an operation with its arguments and result; records its CUDA kernels' further allocations."""


class Recorder(TorchDispatchMode):
    """Records allocations and frees of fake tensors' storages into a trace, in order, by device and stream."""

    def __init__(self, trace: Trace, hidden: dict[Any, Hidden], counting: Counting, mode: FakeTensorMode) -> None:
        super().__init__()
        self._results = ResultCache(mode)
        self.trace = trace
        self.counting = counting
        self.stream = 0
        self._hidden = hidden
        self._known: dict[int, Any] = {}
        self._lock = threading.RLock()
        self.in_backward = False
        self._recomputing = -1
        """Event at which the recomputation of checkpointed layers began; -1: none is under way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its allocations."""
        if func is _prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        special = _SCALARS.get(func)
        if special is not None:
            return special(args)
        if self.in_backward and torch.is_grad_enabled() != (self._recomputing >= 0):
            self._recompute()
        hidden = self._hidden.get(func)
        results = self._results
        key = results.key(func, args, kwargs)
        result = MISSING if key is None else results.kept(key, args)
        if result is MISSING:
            result = func(*args, **kwargs)
            if key is not None:
                results.keep(key, func, args, kwargs, result)
        self._see(result)
        self.counting.count(func, args, kwargs, result, self.stream)
        if hidden is not None:
            hidden(self, func, args, kwargs, result)
        return result

    def _recompute(self) -> None:
        """Record the start or end of recomputation: only then a backward pass records a graph."""
        if self._recomputing < 0:
            self._recomputing = len(self.trace.events)
            return
        self.trace.recomputed.append((self._recomputing, len(self.trace.events)))
        self._recomputing = -1

    def _see(self, result: Any) -> None:
        if isinstance(result, FakeTensor):
            self.follow(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._see(part)

    def follow(self, tensor: Any) -> None:
        """Record the allocation of a tensor's storage, unless it is known, and later its free."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        size = storage.nbytes()
        handle = self.trace.allocate(size, tensor.fake_device.type, self.stream)
        self._known[address] = (weakref.ref(storage, lambda _: self._gone(address)), handle)

    def _gone(self, address: int) -> None:
        entry = self._known.pop(address, None)
        if entry is not None:
            self.trace.free(entry[1])

    def handle_of(self, tensor: Any) -> int | None:
        """Return the trace's handle of a tensor's storage; None if it is not followed."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def rename(self, tensor: Any, device: str) -> None:
        """Count a tensor's storage on another device (``pinned``: page-locked host memory)."""
        handle = self.handle_of(tensor)
        if handle is not None:
            self.trace.move(handle, device)

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Generator[None]:
        """Count allocations in the body to a stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


def _scalar(args: tuple[Any, ...]) -> Any:
    """Return a substitute for a fake tensor's value: 1.0 keeps gradients finite; 0 and False mean nothing found."""
    constant = getattr(args[0], "constant", None)
    if constant is not None:
        return constant.item()
    dtype = args[0].dtype
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


_SCALARS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.equal.default: lambda args: True,
}
