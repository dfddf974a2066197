"""Variable-length attention on a GPU: isolated documents, with the logits and gradients of each document alone."""

from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.model import attention
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]


class OneRank:
    has_values = True
    on_gpu = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    def all_agree(self, mine: bool) -> bool:
        return mine


def model_of(kind: str, **values: Any) -> Any:
    torch.manual_seed(0)
    settings = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
        **values,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)


@pytest.mark.parametrize(("kind", "values"), [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 32})])
def test_documents_of_packed_rows_have_the_logits_and_gradients_they_have_alone(kind: str, values: Any) -> None:
    model = model_of(kind, **values)
    world = cast(Any, OneRank())
    assert attention.set_up(model, Config(), world), world.said
    assert model.config._attn_implementation == attention.VARLEN
    lengths = [[100, 27, 1], [64, 64]]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 512, (2, 128), generator=generator)
    numbers = torch.tensor([[n for n, length in enumerate(row, 1) for _ in range(length)] for row in lengths])
    positions = torch.tensor([[place for length in row for place in range(length)] for row in lengths])
    batch = {"input_ids": ids, "position_ids": positions, "sequence_ids": numbers}
    moved = {name: value.cuda() for name, value in attention.isolate(batch, varlen=True).items()}
    packed = model(**attention.attention_arguments(moved), use_cache=False).logits.float()
    packed.pow(2).sum().backward()
    grads = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = []
    for row, cut in enumerate(lengths):
        alone += [model(input_ids=part[None].cuda(), use_cache=False).logits.float()[0] for part in ids[row].split(cut)]
    together = torch.cat(alone)
    assert float((packed.flatten(0, 1) - together).norm() / together.norm()) < 2e-2
    together.pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        assert float((parameter.grad.float() - grads[name]).norm() / grads[name].norm()) < 5e-2, name
