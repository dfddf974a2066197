"""Sizes of a model with random weights: what is given stays, whatever name the model type has for it."""

from typing import Any

import pytest
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.model.bare import bare_config


@pytest.mark.parametrize(
    ("sizes", "positions"),
    [
        ("{model_type: gpt2}", 2048),
        ("{model_type: gpt2, n_positions: 32}", 32),
        ("{model_type: gpt2, max_position_embeddings: 64}", 64),
        ("{model_type: llama, max_position_embeddings: 128}", 128),
    ],
)
def test_positions_are_those_given_or_the_sequence_length(sizes: str, positions: int) -> None:
    config = load(None, [f"model.config={sizes}", "training.sequence_length=2048"]).config
    made: Any = bare_config(config, 500)
    assert made.max_position_embeddings == positions
    assert made.vocab_size == 512
