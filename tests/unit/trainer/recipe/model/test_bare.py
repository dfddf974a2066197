"""Sizes of a model with random weights: what is given stays, whatever name the model type has for it."""

from typing import Any

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.model.bare import bare_config


@pytest.mark.parametrize(
    ("sizes", "positions"),
    [
        ("{model_type: gpt2}", 2048),
        ("{model_type: gpt2, n_positions: 32}", 32),
        ("{model_type: gpt2, max_position_embeddings: 64}", 64),
        ("{model_type: llama, max_position_embeddings: 128}", 128),
        ("{model_type: mamba}", None),
    ],
)
def test_positions_are_those_given_or_the_sequence_length(sizes: str, positions: int | None) -> None:
    config = load(None, [f"model.config={sizes}", "training.sequence_length=2048"]).config
    made: Any = bare_config(config, 500)
    assert getattr(made, "max_position_embeddings", None) == positions
    assert made.vocab_size == 512


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            "{model_type: llama, hidden_size: 33, num_attention_heads: 4}",
            "model.config: The hidden size (33) is not a multiple of the number of attention heads (4)",
        ),
        ("{model_type: llama, num_hidden_layers: 0}", "model.config.num_hidden_layers: must be at least 1, not 0"),
        ("{model_type: gpt2, n_layer: 0}", "model.config.n_layer: must be at least 1, not 0"),
        ("{model_type: qwen2, num_attention_heads: 0}", "model.config.num_attention_heads: must be at least 1, not 0"),
        (
            "{model_type: llama, num_hidden_layers: 2, per_layer_config: {1: {num_key_value_heads: 5}}}",
            "model.config.num_attention_heads: 32 is not a multiple of num_key_value_heads, 5",
        ),
        ("{model_type: qwen2, vocab_size: -5}", "model.config.vocab_size: must be at least 1, not -5"),
    ],
)
def test_sizes_of_which_no_model_can_be_made_are_refused(sizes: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bare_config(load(None, [f"model.config={sizes}"]).config, 500)
    assert words in str(raised.value)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_a_setting_that_only_the_model_declares_is_no_unknown_one(kind: str) -> None:
    own = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    made: Any = bare_config(load(None, [f"model.config={own | {'head_dim': 32}}"]).config, 500)
    assert made.head_dim == 32
    with pytest.raises(ConfigError, match=f"model.config.head_dims: {kind} has no such setting"):
        bare_config(load(None, [f"model.config={own | {'head_dims': 32}}"]).config, 500)


def test_a_setting_that_differs_between_layers_is_kept() -> None:
    sizes = "{model_type: gemma4_text, num_hidden_layers: 6, head_dim: 32, per_layer_config: {5: {head_dim: 64}}}"
    made: Any = bare_config(load(None, [f"model.config={sizes}"]).config, 500)
    assert [layer.head_dim for layer in made.per_layer_config] == [32] * 5 + [64]


@pytest.mark.parametrize(
    ("kind", "own", "name"),
    [("llama", "rope_theta", "rope_theta"), ("gpt_neox", "rotary_pct", "partial_rotary_factor")],
)
def test_older_names_of_rotary_settings_are_accepted(kind: str, own: str, name: str) -> None:
    made: Any = bare_config(load(None, [f"model.config={{model_type: {kind}, {own}: 0.5}}"]).config, 500)
    assert made.rope_parameters[name] == 0.5
