"""The shape of the small models that tests of the recipe make, and the one rank that makes them."""

import torch

SMALL_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


class OneRank:
    """Stands for the ranks: this process alone, on the CPU."""

    has_values = True
    on_gpu = False
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    def all_agree(self, mine: bool) -> bool:
        return mine
