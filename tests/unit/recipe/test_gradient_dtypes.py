"""Which data types gradients are accumulated and reduced in, and what is refused."""

import pytest
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.engine.engine import deepspeed_config
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
