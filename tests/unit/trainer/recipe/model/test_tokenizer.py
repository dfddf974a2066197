"""Tokenizers that lack a token."""

from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config import schema as settings
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.model import tokenizer
from transformers import PreTrainedTokenizerFast


def saved(folder: Path, **tokens: str) -> Config:
    core = tokenizer.train(lambda: ["a text to learn from"] * 4, 300).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=core, **tokens).save_pretrained(folder)
    return Config(tokenizer=settings.Tokenizer(name=str(folder)))


def test_a_tokenizer_without_padding_pads_with_its_end_and_one_without_an_end_is_refused(tmp_path: Path) -> None:
    made: Any = tokenizer.load(saved(tmp_path / "end", eos_token=tokenizer.END), None)
    assert made.pad_token == made.eos_token == tokenizer.END
    with pytest.raises(ConfigError) as refused:
        tokenizer.load(saved(tmp_path), None)
    assert str(refused.value).startswith(f"tokenizer.name: the tokenizer of {tmp_path} has no end-of-sequence token")
    assert "set eos_token in its tokenizer_config.json" in str(refused.value)
