"""Which optimizer goes with which stage, offload, adapters and precision; the rest is refused in one line."""

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.demo import DATA
from ftmon.trainer.recipe.engine.ds_config import deepspeed_config
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.preflight.consistency import optimizer_refusal

BASE = ["model.config={model_type: llama}", f"data.path={DATA}", "run={device: cpu, ranks: 1}"]
BF16 = "training.precision=bf16"
NONE = "optimizer.master_weights=none"
MUON = ["optimizer.kind=muon", "optimizer.max_grad_norm=0"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["optimizer.kind=adamw_bf16", "zero={stage: 2, offload_optimizer: true}"],
            "zero.offload_optimizer cannot be used with optimizer.kind=adamw_bf16; use optimizer.kind=auto",
        ),
        (
            ["optimizer.kind=adamw_8bit", "zero={stage: 3, offload_optimizer: true}"],
            "zero.offload_optimizer cannot be used with optimizer.kind=adamw_8bit; use optimizer.kind=auto",
        ),
        (
            [*MUON, "zero={stage: 1, offload_optimizer: true}"],
            "zero.offload_optimizer cannot be used with optimizer.kind=muon; use optimizer.kind=auto",
        ),
        ([*MUON, "lora.rank=4"], "optimizer.kind muon cannot be used with lora.rank"),
        (["optimizer.kind=muon", "zero.stage=2"], "optimizer.max_grad_norm must be 0 with optimizer.kind=muon"),
        ([NONE, BF16], "optimizer.master_weights none needs optimizer.kind=adamw_bf16 or adamw_8bit"),
        ([NONE, BF16, *MUON], "optimizer.master_weights none needs optimizer.kind=adamw_bf16 or adamw_8bit"),
        ([NONE, "optimizer.kind=adamw_bf16"], "optimizer.master_weights none needs training.precision=bf16, not fp32"),
        (
            [NONE, BF16, "optimizer.kind=adamw_8bit", "lora.rank=4"],
            "optimizer.master_weights none cannot be used with lora.rank",
        ),
        (
            [NONE, BF16, "optimizer.kind=adamw_8bit", "zero={stage: 1, grad_accum_dtype: fp32}"],
            "zero.grad_accum_dtype fp32 needs fp32 master weights at zero.stage 1",
        ),
        (
            [NONE, BF16, "optimizer.kind=adamw_8bit", "zero={stage: 0, grad_accum_dtype: fp32}"],
            "zero.grad_accum_dtype is fp32, but DeepSpeed accumulates in bf16 at zero.stage 0",
        ),
        (
            ["optimizer.kind=adamw_8bit", "zero={stage: 3, offload_parameters: true}"],
            "zero.offload_parameters cannot be used with optimizer.kind=adamw_8bit; use optimizer.kind=auto",
        ),
        (
            [*MUON, "model.compile=layers", "data.packing=true"],
            "model.compile cannot be used with optimizer.kind=muon on the CPU",
        ),
        (["zero={stage: 2, offload_parameters: true}"], "zero.offload_parameters needs zero.stage 3"),
        (
            ["zero.stage=3", "deepspeed={zero_optimization: {offload_param: {device: nvme, nvme_path: /tmp}}}"],
            "deepspeed.zero_optimization.offload_param nvme cannot be used",
        ),
        (
            ["zero.stage=3", "deepspeed={zero_optimization: {offload_optimizer: {nvme_path: /tmp}}}"],
            "deepspeed.zero_optimization.offload_optimizer nvme cannot be used",
        ),
        (
            ["zero.stage=2", "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"],
            "deepspeed.zero_optimization.offload_optimizer.device is decided by zero.offload_optimizer; set that",
        ),
        (
            ["deepspeed={zero_optimization: {zenflow: {topk_ratio: 0.1}}}"],
            "deepspeed.zero_optimization.zenflow cannot be used: it decides itself",
        ),
        (
            ["deepspeed={bf16: {bf16_master_weights_and_grads: true}}"],
            "deepspeed.bf16.bf16_master_weights_and_grads is decided by optimizer.master_weights; set that",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_place_and_the_fix(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve.resolve(load(None, BASE + words))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["adamw_bf16", "adamw_8bit", "muon"])
def test_fp16_is_refused(kind: str) -> None:
    config = load(None, [*BASE, f"optimizer.kind={kind}"]).config
    assert optimizer_refusal(config, "fp16") == (
        "training.precision",
        f"fp16 cannot be used with optimizer.kind={kind}; use bf16",
    )


@pytest.mark.parametrize("kind", ["adamw_bf16", "adamw_8bit"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_rest_goes_together(kind: str, stage: int) -> None:
    words = [f"optimizer.kind={kind}", f"zero.stage={stage}"]
    for more in ([], [BF16], [BF16, NONE], ["lora.rank=4"]):
        resolve.resolve(load(None, [*BASE, *words, *more]))
    resolve.resolve(load(None, [*BASE, f"zero.stage={stage}", *MUON]))
    resolve.resolve(load(None, [*BASE, "zero.stage=0", "optimizer.kind=muon"]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_master_weights_deepspeed_keeps_no_fp32_copy(stage: int) -> None:
    words = [BF16, NONE, "optimizer.kind=adamw_bf16", f"zero.stage={stage}"]
    settings = deepspeed_config(resolve.resolve(load(None, BASE + words)).config, 1, False)
    assert settings.get("bf16", {}).get("bf16_master_weights_and_grads", False) is (stage > 0)
    assert ("bf16" in settings) is (stage > 0)
    # At stage 0 DeepSpeed is not told of bf16, and compares this with its own precision.
    assert settings["data_types"]["grad_accum_dtype"] == ("bf16" if stage else "fp32")
