"""Sequences longer than a model has positions for are refused before anything starts, and answers end before."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.config.schema import Config, Model
from ftmon.trainer.recipe.evaluation import evaluate
from ftmon.trainer.recipe.model import shape
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "gpt2": "n_layer: 1, n_embd: 32, n_head: 2, n_positions: 32",
    "gptj": "n_layer: 1, n_embd: 32, n_head: 2, rotary_dim: 8, n_positions: 32",
    "opt": "num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, ffn_dim: 32, max_position_embeddings: 32",
}


@pytest.mark.parametrize("kind", SIZES)
def test_more_tokens_than_a_table_has_positions_are_refused_with_the_name_of_its_size(kind):
    words = f"model.config={{model_type: {kind}, {SIZES[kind]}}}"
    setting = "max_position_embeddings" if kind == "opt" else "n_positions"
    with pytest.raises(ConfigError) as raised:
        shape.check(load(None, [words, "training.sequence_length=128"]).config)
    assert str(raised.value) == (
        f"training.sequence_length: 128 tokens are more than the model's {setting}, 32, and it has no positions beyond "
        f"them; use training.sequence_length=32 or less, or raise model.config.{setting}"
    )
    assert shape.check(load(None, [words, "training.sequence_length=32"]).config)[1] == ""


def test_the_positions_of_a_model_s_folder_are_checked(tmp_path):
    made: Any = AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, n_positions=32)
    made.save_pretrained(tmp_path)
    words = [f"model.name={tmp_path}", "training.sequence_length=128"]
    with pytest.raises(ConfigError, match=r"use training\.sequence_length=32 or less$"):
        shape.check(load(None, words).config)
    with pytest.raises(ConfigError, match=r"^model\.name: .*nowhere cannot be loaded: "):
        shape.check(load(None, [f"model.name={tmp_path}/nowhere"]).config)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"^model\.name: .* cannot be loaded: maximum recursion depth"):
        shape.check(load(None, [f"model.name={tmp_path}"]).config)


@pytest.mark.parametrize("kind", ["llama", "xglm"])
def test_positions_that_are_computed_go_on_with_a_note(kind):
    words = f"model.config={{model_type: {kind}, max_position_embeddings: 64}}"
    _, note = shape.check(load(None, [words, "training.sequence_length=128"]).config)
    assert note == "128 tokens are more than the model's max_position_embeddings, 64"


LONGROPE = "{rope_type: longrope, rope_theta: 1e4, short_factor: [1, 1], long_factor: [2, 2]"


@pytest.mark.parametrize(
    ("rope", "most", "length", "kind"),
    [
        (f"{LONGROPE}, original_max_position_embeddings: 64}}", 512, 64, ""),
        (f"{LONGROPE}, original_max_position_embeddings: 64}}", 512, 65, "longrope"),
        ("{rope_type: dynamic, rope_theta: 1e4, factor: 2}", 512, 512, ""),
        ("{rope_type: linear, rope_theta: 1e4, factor: 2}", 512, 512, ""),
    ],
)
def test_embeddings_that_follow_the_longest_document_of_a_micro_batch_are_noted(rope, most, length, kind):
    sizes = f"hidden_size: 16, num_attention_heads: 4, max_position_embeddings: {most}"
    words = f"model.config={{model_type: llama, {sizes}, rope_parameters: {rope}}}"
    _, note = shape.check(load(None, [words, f"training.sequence_length={length}"]).config)
    assert note.startswith(f"rotary embeddings of type {kind} have one set of frequencies") if kind else note == ""


BITS_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BITS_8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NF4 = ["lora.rank=4", "model.quantization=nf4"]


@pytest.mark.parametrize(
    ("held", "words", "refused"),
    [
        (BITS_4, [], r"\(bitsandbytes\), .* made of, or train adapters .* lora.rank=16 and model.quantization=nf4"),
        (BITS_4, ["lora.rank=4"], r"\(bitsandbytes\), .*, or train adapters .*"),
        (BITS_4, NF4, ""),
        (BITS_8, NF4, r"\(bitsandbytes\), which are not trained; give the model that they were made of"),
        ({"quant_method": "gptq", "bits": 4}, NF4, r"\(gptq\), .* made of"),
        ({"quant_method": "fp8"}, [], ""),
    ],
)
def test_quantized_weights_are_refused_but_in_4_bits_under_adapters(held, words, refused, tmp_path):
    AutoConfig.for_model("llama", quantization_config=held).save_pretrained(tmp_path)
    config = load(None, [f"model.name={tmp_path}", *words]).config
    expected = pytest.raises(ConfigError, match=rf"^model\.name: \S+ has quantized weights {refused}$")
    with expected if refused else nullcontext():
        shape.check(config)
    # transformers dequantizes fp8 where a device has no kernels for it; what is left quantized is not trained.
    if not words and not refused:
        with pytest.raises(ConfigError, match=r"has quantized weights \(fp8\)"):
            shape.refuse_quantized(config, AutoConfig.from_pretrained(tmp_path))


def test_a_sample_ends_where_the_model_has_no_more_positions():
    made: Any = AutoConfig.for_model(
        "gpt2", n_layer=1, n_embd=32, n_head=2, n_positions=32, vocab_size=64, eos_token_id=None, bos_token_id=None
    )
    model: Any = AutoModelForCausalLM.from_config(made)
    engine = SimpleNamespace(module=model, eval=model.eval, train=model.train)
    world: Any = SimpleNamespace(is_first=True, device=torch.device("cpu"))
    tokens = SimpleNamespace(pad_token_id=0, eos_token_id=None, decode=lambda ids: f"{len(ids)} tokens")
    row = {"input_ids": list(range(32)), "labels": [evaluate.IGNORED] * 24 + list(range(24, 32))}
    assert evaluate.generate(engine, tokens, [row], 64, 32, world, together=False) == [("24 tokens", "8 tokens")]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_key_value_heads": 2}),
        ("mixtral", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_local_experts": 4}),
        ("gpt2", {"n_embd": 256, "n_layer": 4, "n_head": 4}),
    ],
)
def test_a_model_is_small_by_the_sizes_of_its_configuration(kind, sizes):
    fields = {"model_type": kind, "vocab_size": 1000, **sizes}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    parameters = sum(one.numel() for one in model.parameters())
    config = Config(model=Model(config=fields))
    assert shape.is_small(config, parameters + parameters // 2)
    assert not shape.is_small(config, parameters - parameters // 4)
    assert not shape.is_small(Config(model=Model(name="/nowhere/at/all")), 10**12)
