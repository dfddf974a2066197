"""The shape of the small models that tests of the recipe make, a folder with one, and the one rank that makes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from ftmon.trainer.recipe.start import DATA

SMALL_SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def write_model_and_data(folder: Path) -> None:
    """Write a model of random weights as ``model``, with a tokenizer, and records as ``data.jsonl``."""
    from ftmon.trainer.recipe.model.tokenizer import train
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copy(DATA, folder / "data.jsonl")
    records = [json.loads(line) for line in DATA.read_text().splitlines()]
    made: Any = train(lambda: (" ".join(map(str, record.values())) for record in records), 400)
    shape = SMALL_SHAPE | {"vocab_size": len(made), "max_position_embeddings": 256, "pad_token_id": made.pad_token_id}
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).save_pretrained(folder / "model")
    made.save_pretrained(folder / "model")


class OneRank:
    """Stands for the ranks: this process alone, on the CPU."""

    has_values = True
    on_gpu = False
    size = 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    note = log

    def all_agree(self, mine: bool) -> bool:
        return mine
