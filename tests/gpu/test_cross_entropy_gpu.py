"""The kernel of the chunked cross entropy on a GPU, against full logits in fp64."""

from typing import Any

import pytest
import torch
from ftmon.trainer.recipe.model.cross_entropy import LogitTransform, linear_cross_entropy

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 8e-3}
"""Relative difference of the gradients that the rounding of the weights' type explains."""


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(2.0, 5.0)])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "vocabulary", "chunk"), [(50, 200, 7), (300, 9001, 128), (257, 4096, 0)])
def test_the_kernels_losses_and_gradients_are_those_of_full_logits(
    transform: LogitTransform, dtype: torch.dtype, tokens: int, vocabulary: int, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    # Logits of some 5, as trained models have them; the last columns and the first are among the targets.
    hidden = torch.randn(tokens, 64, generator=generator).to("cuda", dtype)
    weight = (torch.randn(vocabulary, 64, generator=generator) * 0.6).to("cuda", dtype)
    bias = torch.randn(vocabulary, generator=generator).to("cuda", dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[:2] = torch.tensor([0, vocabulary - 1])
    targets = targets.cuda()
    exact = [value.double().requires_grad_() for value in (hidden, weight, bias)]
    logits = transform.apply(torch.nn.functional.linear(*exact))
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (expected / 7).backward()
    leaves: list[Any] = [value.clone().requires_grad_() for value in (hidden, weight, bias)]
    loss = linear_cross_entropy(*leaves, targets, transform, chunk)
    (loss / 7).backward()
    with torch.no_grad():
        evaluated = linear_cross_entropy(*leaves, targets, transform, chunk)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5 if dtype == torch.float32 else 3e-3)
    assert float(evaluated) == pytest.approx(float(loss), rel=1e-6)
    for mine, true in zip(leaves, exact, strict=True):
        assert float((mine.grad - true.grad).norm() / true.grad.norm()) < TOLERANCES[dtype]


def test_a_logit_that_is_not_finite_makes_the_loss_so() -> None:
    hidden, weight = torch.ones(3, 8, device="cuda"), torch.ones(100, 8, device="cuda")
    weight[7, 0] = float("nan")
    targets = torch.arange(3, device="cuda")
    assert torch.isnan(linear_cross_entropy(hidden, weight, None, targets))
