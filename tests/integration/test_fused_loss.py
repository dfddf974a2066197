"""The loss in chunks with a compiled kernel: PyTorch starts compilers for it."""

from typing import Any

import pytest
import torch
from ftmon.trainer.recipe.model.loss import linear_cross_entropy


@pytest.mark.usefixtures("compiling")
def test_compiled_the_loss_and_the_gradients_are_the_same_for_every_chunk() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(50, 16, generator=generator), torch.randn(200, 16, generator=generator)
    targets = torch.randint(0, 200, (50,), generator=generator)
    results: list[Any] = []
    for compiled in (False, True):
        hidden, weight = (value.clone().requires_grad_() for value in values)
        loss = linear_cross_entropy(hidden, weight, None, targets, chunk=16, compiled=compiled)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(results[1], results[0])
