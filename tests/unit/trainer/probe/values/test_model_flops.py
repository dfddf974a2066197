"""FLOPs of real models of transformers, against figures computed by hand from their shapes."""

from typing import Any

import pytest
import torch
from ftmon.protocol.host.machine import ModelFlops, causal_pairs
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.probe.rank.context import Introduction, RankContext
from ftmon.trainer.probe.values.model_flops import model_flops
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

SHAPE = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYER = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32 + 2 * 16
"""q and o, k and v, the three of the MLP, two norms."""
HEAD = 100 * 16


def llama(**more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more))


def token_flops(model: torch.nn.Module) -> float:
    flops = model_flops(model)
    return flops.token


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_counts_its_output_layer_once_and_not_its_input_embedding(tied: bool) -> None:
    flops = model_flops(llama(tie_word_embeddings=tied))
    assert flops == ModelFlops(token=6.0 * (2 * LAYER + 16 + HEAD), pair=12.0 * 2 * 16)


def test_looked_up_positions_and_a_frozen_lower_half_s_backward_do_not_count():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=512, n_embd=16, n_layer=1, n_head=2))
    counted = sum(p.numel() for name, p in model.named_parameters() if "wpe" not in name)
    assert model_flops(model) == ModelFlops(token=6.0 * counted, pair=12.0 * 16)
    model = llama()
    model.model.layers[0].requires_grad_(False)
    assert token_flops(model) == 2.0 * LAYER + 6.0 * (LAYER + 16 + HEAD)


def test_frozen_weights_count_what_they_cost_and_adapters_what_they_are() -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = model_flops(peft.get_peft_model(llama(), config))
    adapters = 2 * (2 * 16 + 16 * 2)
    first_q = 16 * 16
    # All else is above the first adapter and passes a gradient on: 4. The first q is not: 2.
    token = 4.0 * (2 * LAYER + 16 + HEAD) - 2.0 * first_q + 6.0 * adapters
    assert adapted == ModelFlops(token=token, pair=12.0 * 2 * 16)


def test_of_a_mixture_those_experts_count_that_a_token_uses_and_a_sliding_window_is_known():
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=1, sliding_window=None))
    experts = 4 * 3 * 16 * 32
    rest = sum(p.numel() for p in model.parameters()) - 2 * experts - HEAD
    assert token_flops(model) == pytest.approx(6.0 * (rest + 2 * experts / 4))
    flops = model_flops(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)))
    assert (flops.pair, flops.windowed_pair, flops.window) == (0.0, 12.0 * 2 * 16, 8)
    assert flops.of(0, causal_pairs([8]), 8) == flops.windowed_pair * 36


def test_layers_with_heads_of_different_sizes_are_added_and_no_causal_decoder_has_none():
    sizes: Any = {"head_dim": 8, "sliding_window": 8, "vocab_size_per_layer_input": 100}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**SHAPE, **sizes, layer_types=kinds, per_layer_config={1: {"head_dim": 16}})
    flops = model_flops(Gemma4ForCausalLM(config))
    assert (flops.pair, flops.windowed_pair, flops.window) == (12.0 * 4 * 16, 12.0 * 4 * 8, 8)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    assert model_flops(BertForMaskedLM(config)) is None
    assert model_flops(torch.nn.Linear(4, 4)) is None


def test_the_type_of_matrix_products_is_told_only_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    about = Introduction(RankContext(0, 0, 1, RunDir("run")))
    about.parameter_dtype = "fp32"
    assert about.matmul_precision() == "", "autocast may be at work unseen"
    about.forward_dtype = "bf16"
    assert about.matmul_precision() == "bf16"
    about.forward_dtype = ""
    assert about.matmul_precision() == "fp32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert about.matmul_precision() == "tf32"
    about.facts["precision"] = "fp16"
    assert about.matmul_precision() == "fp16"
