"""Kept results of operations on fake tensors are what PyTorch's fake tensors compute."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ftmon.trainer.predict.record import MISSING, ResultCache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Operation = Callable[[Any], Any]
foreach_add: Any = vars(torch)["_foreach_add"]


class Cached(TorchDispatchMode):
    """Takes results from a cache, and counts those that it had to ask fake tensors for."""

    def __init__(self, cache: ResultCache) -> None:
        super().__init__()
        self.cache = cache
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = self.cache.key(func, args, kwargs)
        found = MISSING if key is None else self.cache.kept(key, args)
        if found is MISSING:
            self.asked.append(str(func))
            found = func(*args, **kwargs)
            if key is not None:
                self.cache.keep(key, func, args, kwargs, found)
        return found


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    mode = FakeTensorMode()
    with mode:
        yield mode


OPERATIONS: dict[str, Operation] = {
    "product": lambda x: x @ x.t(),
    "slice and add": lambda x: x[2:6, 1:3] + 1,
    "transposed copy": lambda x: x.transpose(0, 1).contiguous(),
    "other type": lambda x: x.to(torch.bfloat16),
    "bytes": lambda x: x.view(torch.uint8),
    "in place": lambda x: x.mul_(2),
    "strided at a place": lambda x: x.as_strided((2, 2), (2, 1), 3),
    "two results": lambda x: x.max(dim=0).values,
    "several": lambda x: torch.cat(x.split(4)),
    "foreach": lambda x: foreach_add([x, x[1:]], 1.0)[1],
    "copied into": lambda x: x[:4].copy_(x[4:]),
    "norm": lambda x: torch.linalg.vector_norm(x.float()),
    "reshaped": lambda x: x.reshape(-1)[4:].unsqueeze(0).expand(3, -1),
}


def facts(tensor: Any) -> tuple[Any, ...]:
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kept_result_is_what_fake_tensors_compute_at_another_place_of_the_buffer(
    fake: FakeTensorMode, name: str
) -> None:
    operation = OPERATIONS[name]
    buffer = torch.empty(4096, device="cpu")
    cached = Cached(ResultCache(fake))
    for offset in (0, 64, 1024, 640):
        layer = buffer[offset : offset + 64].view(8, 8)
        expected = operation(layer)
        with cached:
            found = operation(layer)
        assert facts(found) == facts(expected)
        shares = expected.untyped_storage()._cdata == buffer.untyped_storage()._cdata
        assert (found.untyped_storage()._cdata == buffer.untyped_storage()._cdata) == shares


def test_parameters_at_different_places_of_one_buffer_are_computed_once(fake: FakeTensorMode) -> None:
    buffer = torch.empty(4096)
    x = torch.empty(3, 8)
    cached = Cached(ResultCache(fake))
    asked: list[int] = []
    for layer in range(4):
        weight = buffer[layer * 64 : layer * 64 + 64].view(8, 8)
        with cached:
            torch.nn.functional.linear(x, weight).relu_()
        asked.append(sum(name.startswith("aten.") for name in cached.asked))
    assert asked[0] == asked[-1] > 0, cached.asked
