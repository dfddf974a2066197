"""``deepspeed:`` passes on DeepSpeed's own keys and refuses the rest by name."""

import pytest
from deepspeed.runtime import config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.engine import deepspeed_config
from ftmon.trainer.recipe.preflight import ds_keys
from ftmon.trainer.recipe.preflight.resolve import resolve
from ftmon.trainer.recipe.start import DATA


def test_keys_are_laid_over_what_the_sections_make() -> None:
    words = ["model.config={model_type: qwen2}", f"data.path={DATA}", "run.device=cpu"]
    given = "deepspeed={zero_optimization: {sub_group_size: 1000, overlap_comm: true}, wall_clock_breakdown: true}"
    made = deepspeed_config(resolve(load(None, [*words, given])).config, 1, on_gpu=False)
    assert made["wall_clock_breakdown"] is True
    zero = made["zero_optimization"]
    assert (zero["sub_group_size"], zero["overlap_comm"], zero["stage"]) == (1000, True, 2)


def test_the_tables_are_those_of_the_installed_deepspeed() -> None:
    removed = set(getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}))
    if not removed:
        pytest.skip("this DeepSpeed is older than the tables, which are 0.19's")
    removed |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(ds_keys.REMOVED) == removed
    fields = DeepSpeedZeroConfig.model_fields
    own = {key.rpartition(".")[2] for key in ds_keys.OWN if key.startswith("zero_optimization.")}
    assert ds_keys.ZERO | own == {field.alias or name for name, field in fields.items()}
    assert ds_keys.BF16 | {"enabled"} == set(DeepSpeedBF16Config.model_fields)
    assert ds_keys.FP16 | {"enabled"} == set(DeepSpeedFP16Config.model_fields)
