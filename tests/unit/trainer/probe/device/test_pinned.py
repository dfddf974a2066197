"""Buffers of the copies from the device. The device is the host here, so its memory is not pinned."""

from collections import deque
from typing import Any

import pytest
import torch
from ftmon.trainer.probe.device import cuda


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the buffers that were made."""
    sizes: list[int] = []
    empty = torch.empty

    def pageable(size: int, *, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        sizes.append(size)
        return empty(size, **options)

    monkeypatch.setattr(cuda.torch, "empty", pageable)
    monkeypatch.setattr(cuda, "_free", {})
    monkeypatch.setattr(cuda, "_total", 0)
    monkeypatch.setattr(cuda, "_copy", lambda *_: False)
    return sizes


def test_a_value_that_is_never_read_returns_its_buffer(made: list[int]) -> None:
    for number in range(100):
        cuda.fetch_scalar(torch.tensor(7.0))
        norm = cuda.fetch_scalar(torch.tensor(float(number)))
        assert cuda.read(norm) == number
    assert len(made) <= 3
    assert cuda._total == sum(made)


def test_a_value_on_its_way_keeps_its_buffer_and_the_longest_free_one_is_used_first(made: list[int]) -> None:
    values: deque[Any] = deque(cuda.fetch(torch.full((100,), float(number))) for number in range(4))
    assert [int(value.tensor()[99]) for value in values] == [0, 1, 2, 3]
    first = values.popleft().buffer.address
    values.popleft()
    later: Any = cuda.fetch(torch.zeros(100))
    assert later.buffer.address == first
    assert [int(value.tensor()[0]) for value in values] == [2, 3]
    assert made == [512] * 4


def test_beyond_the_limit_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MOST_BYTES", 2 * cuda.SMALLEST)
    kept = [cuda.fetch_scalar(torch.tensor(1.0)) for _ in range(3)]
    assert [each is None for each in kept] == [False, False, True]
    kept.clear()
    assert cuda.fetch_scalar(torch.tensor(1.0)) is not None
