"""DeepSpeed's configuration, and the norm of all gradients, taken together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.engine import compute_together, deepspeed_config
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.start import DATA

BASE = ["model.config={model_type: llama}", f"data.path={DATA}", "run={device: cpu, ranks: 1}"]


def settings_of(*words: str) -> dict[str, Any]:
    return deepspeed_config(resolve.resolve(load(None, [*BASE, *words])).config, 1, False)


@pytest.mark.parametrize(
    ("precision", "zero", "accumulated", "reduced"),
    [
        ("bf16", "{stage: 2}", "fp32", "fp32"),
        ("bf16", "{stage: 0}", "fp32", "fp32"),
        ("bf16", "{stage: 0, grad_accum_dtype: bf16}", "bf16", "fp32"),
        ("fp32", "{stage: 0}", "fp32", "fp32"),
        ("bf16", "{stage: 1, grad_accum_dtype: bf16}", "bf16", "fp32"),
        ("bf16", "{stage: 3, communication_dtype: bf16}", "fp32", "bf16"),
    ],
)
def test_gradients_are_fp32_unless_asked_for(precision: str, zero: str, accumulated: str, reduced: str) -> None:
    settings = settings_of(f"training.precision={precision}", f"zero={zero}")
    assert settings["data_types"]["grad_accum_dtype"] == accumulated
    assert settings["communication_data_type"] == reduced


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_master_weights_deepspeed_keeps_no_fp32_copy(stage: int) -> None:
    settings = settings_of(
        "training.precision=bf16", "optimizer={master_weights: none, kind: adamw_bf16}", f"zero.stage={stage}"
    )
    assert settings.get("bf16", {}).get("bf16_master_weights_and_grads", False) is (stage > 0)
    assert ("bf16" in settings) is (stage > 0)
    # At stage 0 DeepSpeed is not told of bf16, and compares this with its own precision.
    assert settings["data_types"]["grad_accum_dtype"] == ("bf16" if stage else "fp32")


@pytest.mark.parametrize(
    ("words", "ranks", "stage"),
    [
        (["training.precision=bf16", "zero.stage=0"], 1, 1),
        (["training.precision=bf16", "zero.stage=0"], 4, 1),
        (["training.precision=bf16", "zero.stage=2"], 1, 1),
        (["training.precision=bf16", "zero.stage=2"], 4, 2),
        (["training.precision=bf16", "zero={stage: 2, grad_accum_dtype: bf16}"], 1, 2),
        (["training.precision=bf16", "zero={stage: 2, offload_optimizer: true}"], 1, 2),
        (["training.precision=bf16", "zero.stage=3"], 1, 3),
        (["zero.stage=0"], 1, 0),
        (["zero.stage=2"], 1, 2),
    ],
)
def test_half_precision_runs_at_stage_1_where_nothing_is_partitioned(words: list[str], ranks: int, stage: int) -> None:
    config = resolve.resolve(load(None, [*BASE, *words])).config
    assert deepspeed_config(config, ranks, False)["zero_optimization"]["stage"] == stage


def test_keys_are_laid_over_what_the_sections_make() -> None:
    made = settings_of(
        "deepspeed={zero_optimization: {sub_group_size: 1000, overlap_comm: true}, wall_clock_breakdown: true}"
    )
    assert made["wall_clock_breakdown"] is True
    zero = made["zero_optimization"]
    assert (zero["sub_group_size"], zero["overlap_comm"], zero["stage"]) == (1000, True, 2)


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
    gradients[0][0] = float("inf")
    assert not optimizer.get_grad_norm_direct(gradients, params, norm_type).isfinite()
