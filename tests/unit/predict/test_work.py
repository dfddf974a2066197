"""What is counted of a step's operations."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from ftmon.trainer.predict.record import Counting
from torch._subclasses import FakeTensor, FakeTensorMode

pytest.importorskip("torch.nn.attention.varlen")  # registers the operation

HEADS, WIDTH = 4, 32


def attention_flops(tokens: int, documents: int, pairs_a_token: float | None = None) -> float:
    """Return the FLOPs that are counted of causal attention over packed documents, of the same length if not said."""
    with FakeTensorMode() as mode:

        def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
            return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda"))

        query, key, value, out = (on_gpu(tokens, HEADS, WIDTH) for _ in range(4))
        borders = on_gpu(documents + 1, dtype=torch.int32)
    counting = Counting(1)
    counting.pairs_a_token = pairs_a_token
    longest = tokens // documents
    call: Any = torch.ops.torch_attn._varlen_attn.default
    counting.count(call, (query, key, value, borders, borders, longest, longest, True), {}, out, 0)
    (operation,) = counting.work().operations
    assert operation.attention
    return operation.flops


def test_packed_documents_do_not_see_each_other() -> None:
    one = attention_flops(4096, 1)
    # Two products of 2 FLOPs for each pair, half of the pairs.
    assert one == 2 * 2 * HEADS * WIDTH * 4096**2 / 2
    assert attention_flops(8 * 4096, 8) == 8 * one


def test_documents_of_a_data_set_take_their_own_pairs() -> None:
    # Two products of 2 FLOPs for each pair.
    assert attention_flops(4096, 3, pairs_a_token=100.5) == 2 * 2 * HEADS * WIDTH * 4096 * 100.5
