"""Live tensors of a process by size, with their names in frames and in the model."""

import gc
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from ....protocol.text import gib


class _Row(NamedTuple):
    bytes: int
    shape: str
    dtype: str
    device: str
    names: list[str]


class TensorTable:
    """Rows of tensors that print as a table."""

    def __init__(self, rows: list[_Row], total: int, count: int, allocated: int) -> None:
        self.rows = rows
        self._total = total
        self._count = count
        self._allocated = allocated

    def __repr__(self) -> str:
        lines = [
            f"{gib(row.bytes):>12}  {row.shape:<20} {row.dtype:<10} {row.device:<8} {', '.join(row.names)}".rstrip()
            for row in self.rows
        ]
        lines.append(f"{gib(self._total):>12}  in {self._count:,} storages that Python knows")
        rest = self._allocated - self._total
        if rest > 0:
            lines.append(f"{gib(rest):>12}  held by autograd's graph or native code, out of Python's sight")
        return "\n".join(lines)


def storage_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's whole storage; 0 for other objects."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0


def _address(tensor: Any) -> int:
    """Return the address of a tensor's storage; 0: it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return 0


def find_tensors(frames: Sequence[FrameType], device: Any, most: int, allocated: int) -> TensorTable:
    """Find the largest tensors on a device; each storage counts once."""
    import torch

    named = _names(frames)
    found: dict[int, tuple[int, Any, list[str]]] = {}
    for value in gc.get_objects():
        if not issubclass(type(value), torch.Tensor) or value.device.type != device.type:
            continue
        size = storage_bytes(value)
        address = _address(value) if size else 0
        if not address:  # also the fake tensors of torch.compile, which use no memory
            continue
        names = named.get(id(value), [])
        known = found.get(address)
        if known is None:
            found[address] = (size, value, list(names))
        else:
            known[2].extend(name for name in names if name not in known[2])
    order = sorted(found.values(), key=lambda entry: -entry[0])
    rows = [
        _Row(size, str(tuple(value.shape)), str(value.dtype).removeprefix("torch."), str(value.device), names[:4])
        for size, value, names in order[:most]
    ]
    return TensorTable(rows, sum(entry[0] for entry in order), len(order), allocated)


def _names(frames: Sequence[FrameType]) -> dict[int, list[str]]:
    import torch

    found: dict[int, list[str]] = {}
    modules: list[tuple[str, Any]] = []
    for frame in reversed(frames):
        for name, value in list(frame.f_locals.items()):
            if issubclass(type(value), torch.Tensor):
                found.setdefault(id(value), []).append(f"{name} ({frame.f_code.co_name})")
            elif issubclass(type(value), torch.nn.Module) and all(value is not module for _, module in modules):
                modules.append((name, value))
    for owner, module in reversed(modules):
        for name, value in module.named_parameters():
            if id(value) not in found:
                found[id(value)] = [f"{owner}.{name}"]
            if value.grad is not None:
                found.setdefault(id(value.grad), [f"{owner}.{name}.grad"])
    return found
