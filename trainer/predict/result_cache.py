"""Caches results of operations on fake tensors by function, shapes, strides, data types and numbers.

PyTorch's cache of fake results (``FakeTensorMode.cache``) also has storage offsets in its keys. ZeRO's parameters are
views into one flat buffer, so each layer's operations would miss it.
"""

from typing import Any, NamedTuple

import torch
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_aten: Any = torch.ops.aten
_fake: Any = FakeTensor
MISSING: Any = object()
"""Returned by ``kept`` for a result that is not cached."""
_NEVER: Any = object()
_NUMBERS = (int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_ABSOLUTE_OFFSETS = frozenset((_aten.as_strided.default, _aten.as_strided_.default))
_VIEWS = frozenset((_aten._unsafe_view.default,))
"""Operations that return their argument's storage without declaring it."""
_VARYING = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)


class _Made(NamedTuple):
    """A tensor that an operation returns."""

    shape: Any
    stride: Any
    dtype: Any
    device: Any
    requires_grad: bool
    argument: int = -1
    """Position of the argument whose storage it shares; -1: it has its own."""
    offset: int = 0
    """Offset relative to that argument's."""


class _Same(NamedTuple):
    """An operation returns an argument itself."""

    argument: int


class ResultCache:
    """Returns an operation's earlier result for tensors of the same kind; for one fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kept: dict[Any, Any] = {}
        self._cacheable: dict[Any, bool] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the cache key of a call; None if its result cannot be cached."""
        cacheable = self._cacheable.get(func)
        if cacheable is None:
            cacheable = self._cacheable[func] = _is_cacheable(func)
        if not cacheable:
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not self._add(parts, args):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._add(parts, (value,)):
                return None
        return tuple(parts)

    def kept(self, key: Any, args: tuple[Any, ...]) -> Any:
        """Return a new result of a call with this key; ``MISSING`` if none is cached."""
        found = self._kept.get(key, MISSING)
        if found is MISSING or found is _NEVER:
            return MISSING
        if isinstance(found, list):
            return [self._make(one, args) for one in found]
        return self._make(found, args)

    def keep(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Cache a call's result, if one of the same kind can be made without the call."""
        if key in self._kept:
            return
        storages = {one.untyped_storage()._cdata for one in _tensors((args, tuple(kwargs.values())))}
        if type(result) is list:
            parts = [self._part(func, args, one, storages) for one in result]
            self._kept[key] = _NEVER if _NEVER in parts else parts
        else:
            self._kept[key] = self._part(func, args, result, storages)

    def _add(self, parts: list[Any], values: Any) -> bool:
        for value in values:
            kind = type(value)
            if isinstance(value, FakeTensor):
                tensor: Any = value
                if (
                    tensor.fake_mode is not self._mode
                    or tensor.constant is not None
                    or tensor.layout is not torch.strided
                    or tensor.dtype.is_complex
                ):
                    return False
                parts += (tensor.dtype, tensor.shape, tensor.stride(), tensor.fake_device, tensor.requires_grad)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._add(parts, value):
                    return False
            elif isinstance(value, _NUMBERS):
                parts += (kind, value)
            else:
                return False
        return True

    def _part(self, func: Any, args: tuple[Any, ...], tensor: Any, storages: set[int]) -> Any:
        """Return the recipe of a result; None: the value itself, ``_NEVER``: it cannot be made again."""
        if tensor is None:
            return None
        for position, one in enumerate(args):
            if one is tensor:
                return _Same(position)
        kind: Any = type(tensor)
        if kind is not FakeTensor:
            return _NEVER
        if tensor.constant is not None or tensor.layout is not torch.strided or tensor.dtype.is_complex:
            return _NEVER
        made = _Made(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, tensor.requires_grad)
        if tensor.untyped_storage()._cdata in storages:
            return self._view(func, args, tensor, made)
        if func.is_view or tensor.storage_offset():
            return _NEVER
        again = self._make(made, args)
        same = again.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        return made if same and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(tensor) else _NEVER

    def _view(self, func: Any, args: tuple[Any, ...], tensor: Any, made: _Made) -> Any:
        positions = [number for number, one in enumerate(args) if isinstance(one, FakeTensor)]
        if not (func.is_view or func in _VIEWS) or func in _ABSOLUTE_OFFSETS or len(positions) != 1:
            return _NEVER
        base: Any = args[positions[0]]
        if base.dtype != tensor.dtype:
            return _NEVER
        return made._replace(argument=positions[0], offset=tensor.storage_offset() - base.storage_offset())

    def _make(self, kept: Any, args: tuple[Any, ...]) -> Any:
        if kept is None:
            return None
        if type(kept) is _Same:
            return args[kept.argument]
        shape, stride, dtype, device, requires_grad, argument, offset = kept
        mode: Any = self._mode
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
            if argument >= 0:
                base = args[argument]
                empty.set_(base.untyped_storage(), base.storage_offset() + offset, shape, stride)
        return _fake(mode, empty, device)


def _is_cacheable(func: Any) -> bool:
    return is_builtin(func) and not any(tag in func.tags for tag in _VARYING)


def _tensors(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
