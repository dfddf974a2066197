"""Linear layers of one input are one matrix product in compiled code, with the same results."""

from typing import Any

import pytest
import torch
from ftmon.trainer.recipe.model.merged_linears import merge


class Block(torch.nn.Module):
    """Layers of one input, as in an attention with a frozen adapter's base, and one of another input."""

    def __init__(self, bias: bool, frozen: bool, width: int = 24) -> None:
        super().__init__()
        self.query = torch.nn.Linear(16, 40, bias=bias)
        self.key = torch.nn.Linear(16, 8, bias=bias)
        self.value = torch.nn.Linear(16, width, bias=bias)
        self.value.requires_grad_(not frozen)
        self.out = torch.nn.Linear(40, 16, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.query(hidden) * self.key(hidden).sum(-1, keepdim=True)
        return self.out(mixed) + self.value(hidden)[..., :16].tanh()


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("frozen", "expected"), [(False, 3), (True, 2)])
def test_merged_layers_have_the_results_and_gradients_of_separate_ones(bias: bool, frozen: bool, expected: int) -> None:
    torch.manual_seed(0)
    block = Block(bias, frozen)
    results: list[Any] = []
    counts: list[int] = []

    def merged(module: Any, _: Any) -> Any:
        counts.append(merge(module.graph))
        module.graph.lint()
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    for forward in (block.forward, torch.compile(block.forward, backend=merged, dynamic=False)):
        block.zero_grad()
        hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = forward(hidden)
        out.square().sum().backward()
        results.append([out, hidden.grad, *(one.grad for one in block.parameters())])
    assert counts == [expected]
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.usefixtures("compiling")
def test_layers_that_fill_a_gpu_stay_apart() -> None:
    block = Block(bias=False, frozen=False)
    block.query, block.key, block.value = (torch.nn.Linear(16, 2048, bias=False) for _ in range(3))
    block.out = torch.nn.Linear(2048, 16)
    counts: list[int] = []

    def count(module: Any, _: Any) -> Any:
        counts.append(merge(module.graph))
        return module.forward

    torch._dynamo.reset()
    torch.compile(block.forward, backend=count, dynamic=False)(torch.randn(2, 5, 16))
    assert counts == [0]
