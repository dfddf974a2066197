"""Storages of one device: address, size and part of each. A shared storage counts once."""

from collections.abc import Iterator
from typing import Any, NamedTuple

_DEEPEST = 5


class Held(NamedTuple):
    """A storage: bytes, and the part of ``protocol.messages.memory.PARTS`` it belongs to."""

    bytes: int
    part: str


class Storages:
    """The storages found on one device, by address; the first claim of a storage decides its part.

    Args:
        cuda_index: the CUDA device's index; None: memory of the host.
    """

    def __init__(self, cuda_index: int | None) -> None:
        self.cuda_index = cuda_index
        self.held: dict[int, Held] = {}

    def add(self, part: str, value: Any) -> None:
        """Claim the storages of every tensor in ``value`` (a tensor, or containers of them) for ``part``."""
        for tensor in tensors(value):
            place = self.place(tensor)
            if place is not None:
                self.held.setdefault(place[0], Held(place[1], part))

    def place(self, tensor: Any) -> tuple[int, int] | None:
        """Return (address, bytes) of a tensor's storage; None when it has none on this device."""
        index = self.cuda_index
        if tensor.device.type != "cpu" if index is None else not (tensor.is_cuda and tensor.get_device() == index):
            return None
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            return None  # a tensor without a storage of its own (fake, functional, sparse)
        return (address, size) if address and size else None

    def by_part(self) -> dict[str, int]:
        """Sum up bytes by part."""
        sums: dict[str, int] = {}
        for size, part in self.held.values():
            sums[part] = sums.get(part, 0) + size
        return sums


def tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors in a tensor or in nested lists, tuples and dictionaries; of a subclass, its inner tensors."""
    if value is None or depth > _DEEPEST:
        return
    if hasattr(value, "untyped_storage"):
        local = getattr(value, "_local_tensor", None)  # torch.distributed's DTensor
        inner = getattr(value, "__tensor_flatten__", None)
        if local is not None:
            yield from tensors(local, depth + 1)
        elif inner is not None:
            yield from (getattr(value, name) for name in inner()[0])
        else:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one, depth + 1)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one, depth + 1)
