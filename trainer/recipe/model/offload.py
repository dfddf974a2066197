"""Keeps saved activations in host memory between forward and backward.

On a GPU copies run on a separate stream, from and to page-locked memory: out while the next layer computes, back before
the backward pass needs them. The training thread never waits for the device. On the CPU the same code copies from host
memory to host memory.
"""

from collections import deque
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_AHEAD = 2
"""Number of tensors copied back ahead of their use, and of copies out that may be under way."""


class Saved:
    """One activation in host memory; autograd holds one reference for each time it was saved."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, before: "Saved | None") -> None:
        self.host = host
        # While this reference exists, no other storage gets the address that identifies this one.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.device = tensor.device
        self.before = ref(before) if before is not None else None
        """The activation saved before it, which the backward pass needs after it."""
        self.uses = 1
        """Number of times it was saved and not yet unpacked."""
        self.out: Any = None
        """CUDA event after the copy to the host."""
        self.back: torch.Tensor | None = None
        """The copy on the device."""
        self.returned: Any = None
        """CUDA event after the copy to the device."""


class HostOffload:
    """Moves tensors that autograd saves to host memory, within the contexts that ``hooks`` returns.

    Args:
        model: its parameters are never moved, as they stay on the device in any case.
        least_bytes: smaller tensors stay on the device.
    """

    def __init__(self, model: torch.nn.Module, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in model.parameters():
            # ZeRO-3 replaces a partitioned parameter by an empty tensor.
            self._parameters.setdefault(int(getattr(parameter, "ds_numel", parameter.numel())), []).append(parameter)
        self._stream: Any = None
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._known: WeakValueDictionary[Any, Saved] = WeakValueDictionary()
        self._last: ref[Saved] | None = None
        self.moved_bytes = 0
        """Bytes copied to the host so far."""

    def hooks(self, *, all_sizes: bool) -> saved_tensors_hooks:
        """Return a context in which saved tensors are moved; with ``all_sizes``, small ones too."""
        least = 0 if all_sizes else self._least_bytes
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, least), self._unpack)

    def _pack(self, tensor: torch.Tensor, least_bytes: int) -> Any:
        if tensor.nbytes < least_bytes or not _movable(tensor) or self._is_parameter(tensor):
            return tensor
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        known = self._known.get(key)
        if known is not None and not known.storage.expired():
            known.uses += 1
            return known
        saved = Saved(tensor, self._host_tensor(tensor), self._last() if self._last is not None else None)
        self._copy_out(tensor, saved)
        self._known[key] = saved
        self._last = ref(saved)
        self.moved_bytes += tensor.nbytes
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, Saved):
            return saved
        self._fetch(saved)
        back = saved.back
        assert back is not None
        if saved.returned is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.returned)
        saved.uses -= 1
        if saved.uses <= 0:
            saved.back = saved.returned = None
        before = saved
        for _ in range(_AHEAD):
            found = before.before() if before.before is not None else None
            if found is None:
                break
            before = found
            if before.uses > 0:
                self._fetch(before)
        return back

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, torch.nn.Parameter):
            return True
        # A transposed view of a weight, as matrix products save it, has the weight's size and address. Under ZeRO-3
        # the address is that of the gathered weight, which changes.
        place = tensor.data_ptr()
        return any(parameter.data_ptr() == place for parameter in self._parameters.get(tensor.numel(), ()))

    def _host_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )

    def _side_stream(self, device: torch.device) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _copy_out(self, tensor: torch.Tensor, saved: Saved) -> None:
        if not tensor.is_cuda:
            saved.host.copy_(tensor)
            return
        compute, side = torch.cuda.current_stream(tensor.device), self._side_stream(tensor.device)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            saved.host.copy_(tensor, non_blocking=True)
            saved.out = side.record_event()
        # The tensor's memory may be used again once the compute stream has waited for the copy.
        self._leaving.append((tensor, saved.out))
        while len(self._leaving) > _AHEAD:
            _, event = self._leaving.popleft()
            compute.wait_event(event)

    def _fetch(self, saved: Saved) -> None:
        """Begin the copy back to the device, unless it has begun."""
        if saved.back is not None:
            return
        if saved.device.type != "cuda":
            saved.back = saved.host.clone()
            return
        compute, side = torch.cuda.current_stream(saved.device), self._side_stream(saved.device)
        while self._leaving:
            _, event = self._leaving.popleft()
            compute.wait_event(event)
        # Allocated on the compute stream, which may still be using this memory.
        saved.back = torch.empty_strided(
            saved.host.size(), saved.host.stride(), dtype=saved.host.dtype, device=saved.device
        )
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            saved.back.copy_(saved.host, non_blocking=True)
            saved.returned = side.record_event()
        # If the backward pass ends early, the memory is not reused before the copy is complete.
        saved.back.record_stream(side)


def _movable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain, of floating point, and fills its memory without gaps or overlaps."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_floating_point():
        return False
    if tensor.layout != torch.strided:
        return False
    order = sorted(range(tensor.dim()), key=lambda place: -tensor.stride(place))
    return tensor.permute(order).is_contiguous()
