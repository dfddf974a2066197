"""The norm of all gradients, taken together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.engine import compute_together, deepspeed_config
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.start import DATA

BASE = ["model.config={model_type: llama}", f"data.path={DATA}", "run={device: cpu, ranks: 1}"]


@pytest.mark.parametrize(
    ("words", "accumulated", "reduced"),
    [
        (["zero.stage=2", "training.precision=bf16"], "fp32", "fp32"),
        (["zero.stage=0", "training.precision=bf16"], "bf16", "fp32"),
        (["zero.stage=0", "training.precision=fp32"], "fp32", "fp32"),
        (["zero.stage=1", "training.precision=bf16", "zero.grad_accum_dtype=bf16"], "bf16", "fp32"),
        (["zero.stage=3", "training.precision=bf16", "zero.communication_dtype=bf16"], "fp32", "bf16"),
    ],
)
def test_gradients_are_fp32_unless_asked_for(words: list[str], accumulated: str, reduced: str) -> None:
    settings = deepspeed_config(resolve.resolve(load(None, BASE + words)).config, 1, False)
    assert settings["data_types"]["grad_accum_dtype"] == accumulated
    assert settings["communication_data_type"] == reduced


def of_each(gradients: Any, params: Any, norm_type: float = 2) -> "torch.Tensor":
    """As DeepSpeed takes it, tensor by tensor."""
    norms = [torch.linalg.vector_norm(one.double(), ord=norm_type) for one, _ in zip(gradients, params, strict=False)]
    return torch.stack(norms).pow(norm_type).sum().pow(1 / norm_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [2, 3])
def test_the_norm_is_that_of_each_gradient(dtype: "torch.dtype", norm_type: float) -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(count, generator=generator).to(dtype) for count in (1, 1000, 70_000)]
    padding: Any = torch.full((8,), float("nan"))
    padding._zero_padding = True
    optimizer: Any = SimpleNamespace(get_grad_norm_direct=of_each)
    compute_together(optimizer)
    params = [object()] * 3
    given = [*gradients, padding] if norm_type == 2 else gradients
    found = optimizer.get_grad_norm_direct(given, params, norm_type)
    assert found.item() == pytest.approx(of_each(gradients, params, norm_type).item(), rel=1e-12)


def test_one_gradient_that_is_not_finite_is_seen() -> None:
    optimizer: Any = SimpleNamespace(get_grad_norm_direct=of_each)
    compute_together(optimizer)
    gradients = [torch.ones(3), torch.tensor([1.0, float("inf")])]
    assert not optimizer.get_grad_norm_direct(gradients, [object(), object()]).isfinite()
