"""Which optimizer goes with which stage, offload, adapters and precision; the rest is refused in one line."""

import pytest
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.engine.engine import deepspeed_config
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.preflight.consistency import optimizer_refusal
from ftmon.trainer.recipe.start import DATA

BASE = ["model.config={model_type: llama}", f"data.path={DATA}", "run={device: cpu, ranks: 1}"]
BF16 = "training.precision=bf16"
NONE = "optimizer.master_weights=none"
MUON = ["optimizer.kind=muon", "optimizer.max_grad_norm=0"]


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
