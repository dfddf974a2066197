"""Cross entropy in chunks of tokens equals that of full logits, with its gradients."""

from typing import Any

import pytest
import torch
from ftmon.trainer.recipe.model.cross_entropy import (
    GradientSum,
    LogitTransform,
    chunk_tokens,
    linear_cross_entropy,
    sum_rows,
)
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(2.0, 5.0)])
@pytest.mark.parametrize("chunk", [7, 64, 0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_and_gradients_equal_those_of_full_logits(transform: LogitTransform, chunk: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(50, 16, generator=generator)
    weight = torch.randn(200, 16, generator=generator)
    bias = torch.randn(200, generator=generator) if with_bias else None
    targets = torch.randint(0, 200, (50,), generator=generator)
    exact = [value.double().requires_grad_() for value in (hidden, weight, bias) if value is not None]
    logits = torch.nn.functional.linear(*exact)
    expected = torch.nn.functional.cross_entropy(transform.apply(logits), targets, reduction="sum")
    (expected / 7).backward()
    leaves = [value.clone().requires_grad_() for value in (hidden, weight, bias) if value is not None]
    loss = linear_cross_entropy(*leaves[:2], leaves[2] if with_bias else None, targets, transform, chunk)
    (loss / 7).backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for mine, true in zip(leaves, exact, strict=True):
        assert float((mine.grad - true.grad).norm() / true.grad.norm()) < 1e-6


def test_in_bf16_the_gradients_are_as_near_to_the_exact_ones_as_those_of_full_logits() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(400, 32, generator=generator).bfloat16()
    weight = torch.randn(500, 32, generator=generator).bfloat16() * 0.2
    targets = torch.randint(0, 500, (400,), generator=generator)

    def grads(exactly: bool, chunk: int) -> list[Any]:
        leaves = [(value.double() if exactly else value.clone()).requires_grad_() for value in (hidden, weight)]
        if chunk:
            loss = linear_cross_entropy(leaves[0], leaves[1], None, targets, chunk=chunk)
        else:
            logits = torch.nn.functional.linear(*leaves)
            loss = torch.nn.functional.cross_entropy(logits if exactly else logits.float(), targets, reduction="sum")
        loss.backward()
        return [leaf.grad.double() for leaf in leaves]

    exact, plain, chunked = grads(True, 0), grads(False, 0), grads(False, 50)
    for true, full, mine in zip(exact, plain, chunked, strict=True):
        assert (mine - true).norm() <= 1.5 * (full - true).norm()


def test_without_labels_gradients_are_zero_a_frozen_weight_gets_none_and_a_chunk_fits_its_size() -> None:
    hidden, weight = torch.randn(0, 16, requires_grad=True), torch.randn(200, 16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, None, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert float(loss) == 0.0
    assert not weight.grad.any()
    hidden, weight = torch.randn(9, 16, requires_grad=True), torch.randn(200, 16)
    linear_cross_entropy(hidden, weight, None, torch.zeros(9, dtype=torch.long)).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert chunk_tokens(151_936, trained=False) * 151_936 * 4 <= 1 << 28
    assert 1 << 29 < chunk_tokens(151_936, trained=True) * 151_936 * 4 <= 1 << 30
    assert chunk_tokens(151_936, trained=True, logit_bytes=2) * 151_936 * 2 <= 1 << 30
    assert chunk_tokens(32_000, trained=False) > chunk_tokens(151_936, trained=False)


class Made(TorchDispatchMode):
    """Collects the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(result.shape)} if isinstance(result, torch.Tensor) else set()
        return result


def test_an_evaluation_computes_the_same_loss_and_no_gradient() -> None:
    hidden, weight = torch.randn(9, 16, requires_grad=True), torch.randn(200, 16, requires_grad=True)
    targets = torch.arange(9)
    trained = linear_cross_entropy(hidden, weight, None, targets, chunk=4)
    with torch.no_grad(), Made() as made:
        loss = linear_cross_entropy(hidden, weight, None, targets, chunk=4)
    assert torch.equal(loss, trained)
    assert (4, 200) in made.shapes
    assert not made.shapes & {(200, 16), (9, 16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_sums_over_micro_batches_get_the_gradients_of_head_and_embedding(tied: bool, dtype: torch.dtype) -> None:
    embedding = torch.nn.Embedding(50, 16, padding_idx=3, dtype=dtype)
    head = embedding.weight if tied else torch.nn.Parameter(torch.randn(50, 16, dtype=dtype))
    weights: list[Any] = [embedding.weight] if tied else [embedding.weight, head]
    totals, written = [torch.full((50, 16), torch.nan) for _ in weights], [False] * len(weights)
    for place, weight in enumerate(weights):
        weight.gradient_sum = GradientSum(totals[place], written, place)
    exact: Any = torch.nn.Embedding(50, 16, padding_idx=3, _weight=embedding.weight.detach().double())
    exact_head = exact.weight if tied else head.detach().double().requires_grad_()
    sum_rows(embedding)
    for ids, factor in ((torch.tensor([[3, 3, 7], [7, 7, 9]]), 0.25), (torch.tensor([[1, 3, 49]]), 0.125)):
        targets = (ids.flatten() * 5) % 50
        rows = torch.tanh(embedding(ids)).flatten(0, 1)
        (linear_cross_entropy(rows, head, None, targets, chunk=4, factor=factor) * factor).backward()
        logits = torch.tanh(exact(ids)).flatten(0, 1) @ exact_head.t()
        (torch.nn.functional.cross_entropy(logits, targets, reduction="sum") * factor).backward()
    assert written == [True] * len(weights)
    assert all(weight.grad is None for weight in weights)
    room = 1e-5 if dtype == torch.float32 else 2e-2
    for total, reference in zip(totals, [exact.weight, exact_head], strict=False):
        assert float((total - reference.grad).norm()) <= room * float(reference.grad.norm())
    # Without a factor, as outside of a step, gradients are autograd's.
    linear_cross_entropy(rows.detach(), head, None, targets).backward()
    assert head.grad is not None
