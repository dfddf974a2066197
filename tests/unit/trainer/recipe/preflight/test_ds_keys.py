"""``deepspeed:`` passes on DeepSpeed's own keys and refuses the rest by name."""

import pytest
from deepspeed.runtime import config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from ftmon.trainer.recipe.preflight import ds_keys


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
