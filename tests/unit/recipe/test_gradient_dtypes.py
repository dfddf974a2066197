"""Which data types gradients are accumulated and reduced in, and what is refused."""

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.demo import DATA
from ftmon.trainer.recipe.engine.ds_config import deepspeed_config
from ftmon.trainer.recipe.preflight import resolve

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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["zero.stage=0", "training.precision=bf16", "zero.grad_accum_dtype=fp32"],
            "zero.grad_accum_dtype is fp32, but DeepSpeed accumulates in bf16 at zero.stage 0; use zero.stage=1",
        ),
        (
            ["training.precision=bf16", "zero.communication_dtype=fp16"],
            "zero.communication_dtype is fp16, but training.precision is bf16; use fp32",
        ),
        (
            ["deepspeed={communication_data_type: bf16}"],
            "deepspeed.communication_data_type is decided by zero.communication_dtype; set that",
        ),
        (
            ["deepspeed={data_types: {grad_accum_dtype: bf16}}"],
            "deepspeed.data_types.grad_accum_dtype is decided by zero.grad_accum_dtype; set that",
        ),
    ],
)
def test_what_deepspeed_could_not_do_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve.resolve(load(None, BASE + words))
