"""The kernel of the chunked cross entropy on a GPU, against full logits in fp64."""

from typing import Any

import pytest
import torch
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.model.cross_entropy import GradientSum, LogitTransform, linear_cross_entropy, sum_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(2.0, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "vocabulary", "chunk"), [(50, 200, 7), (300, 9001, 128), (257, 4096, 0)])
def test_the_kernels_losses_and_gradients_are_as_exact_as_of_full_logits(transform, dtype, tokens, vocabulary, chunk):
    generator = torch.Generator().manual_seed(3)
    # Logits of some 5, as trained models have them; the last columns and the first are among the targets.
    hidden = torch.randn(tokens, 64, generator=generator).to("cuda", dtype)
    weight = (torch.randn(vocabulary, 64, generator=generator) * 0.6).to("cuda", dtype)
    bias = torch.randn(vocabulary, generator=generator).to("cuda", dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[:2] = torch.tensor([0, vocabulary - 1])
    targets = targets.cuda()

    def result(made: torch.dtype, chunked: bool) -> tuple[float, list[Any]]:
        leaves: list[Any] = [value.to(made, copy=True).requires_grad_() for value in (hidden, weight, bias)]
        if chunked:
            loss = linear_cross_entropy(*leaves, targets, transform, chunk)
        else:
            logits = torch.nn.functional.linear(*leaves)
            logits = transform.apply(logits if made == torch.float64 else logits.float())
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        (loss / 7).backward()
        with torch.no_grad():
            evaluated = linear_cross_entropy(*leaves, targets, transform, chunk) if chunked else loss
        assert float(evaluated) == pytest.approx(loss.item(), rel=1e-6)
        return loss.item(), [leaf.grad.double() for leaf in leaves]

    exact, plain, mine = result(torch.float64, False), result(dtype, False), result(dtype, True)
    assert mine[0] == pytest.approx(exact[0], rel=1e-5 if dtype == torch.float32 else 3e-3)
    for true, full, one in zip(exact[1], plain[1], mine[1], strict=True):
        assert (one - true).norm() <= 1.5 * (full - true).norm() + 1e-6 * true.norm()


def test_a_logit_that_is_not_finite_makes_the_loss_so() -> None:
    hidden, weight = torch.ones(3, 8, device="cuda"), torch.ones(100, 8, device="cuda")
    weight[7, 0] = float("nan")
    assert torch.isnan(linear_cross_entropy(hidden, weight, None, torch.arange(3, device="cuda")))


@pytest.mark.parametrize("size", [1, 1_000_003, 1 << 24])
def test_the_kernel_of_sums_has_the_results_of_fp32(size: int) -> None:
    from ftmon.trainer.recipe.model import kernels

    generator = torch.Generator().manual_seed(1)
    start = torch.randn(size, generator=generator).cuda()
    gradient, factor = torch.randn(size, generator=generator).cuda().bfloat16(), torch.tensor(1 / 37.3, device="cuda")
    total = start.clone()
    kernels.write(total, gradient, add=True)
    assert torch.equal(total, start + gradient.float())
    kernels.write(total, gradient)
    assert torch.equal(total, gradient.float())
    scaled = gradient.clone()
    kernels.write(scaled, scaled, factor)
    assert torch.equal(scaled, (gradient.float() * factor).bfloat16())


def test_sums_over_micro_batches_get_the_gradients_of_a_tied_embedding() -> None:
    torch.manual_seed(0)
    embedding: Any = torch.nn.Embedding(5000, 256, padding_idx=3, dtype=torch.bfloat16, device="cuda")
    exact: Any = torch.nn.Embedding(5000, 256, padding_idx=3, _weight=embedding.weight.detach().double())
    total = torch.full((5000, 256), torch.nan, device="cuda")
    embedding.weight.gradient_sum = GradientSum(total, [False], 0)
    sum_rows(embedding)
    for factor in (0.5, 0.25):
        ids = torch.randint(0, 60, (2, 700), device="cuda")
        targets = torch.randint(0, 5000, (1400,), device="cuda")
        rows = embedding(ids).flatten(0, 1)
        (linear_cross_entropy(rows, embedding.weight, None, targets, chunk=256, factor=factor) * factor).backward()
        logits = exact(ids).flatten(0, 1) @ exact.weight.t()
        (torch.nn.functional.cross_entropy(logits, targets, reduction="sum") * factor).backward()
    assert embedding.weight.grad is None
    assert float((total - exact.weight.grad).norm()) <= 2e-2 * float(exact.weight.grad.norm())
