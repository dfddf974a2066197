"""Ranks that share sequences: what is refused before anything starts, and slices that lose nothing."""

import json

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.model.attention import refusal
from ftmon.trainer.recipe.preflight import consistency, resolve
from ftmon.trainer.recipe.preflight.consistency import optimizer_refusal
from ftmon.trainer.recipe.start import DATA
from ftmon.trainer.recipe.support import heads_refusal
from transformers import AutoConfig

BASE = ["model.config={model_type: llama}", f"data.path={DATA}", "run={device: cpu, ranks: 1}"]
BF16 = "training.precision=bf16"
NONE = "optimizer.master_weights=none"
MUON = ["optimizer.kind=muon", "optimizer.max_grad_norm=0"]


@pytest.mark.parametrize("kind", ["adamw_bf16", "adamw_8bit", "muon"])
def test_fp16_is_refused(kind):
    config = load(None, [*BASE, f"optimizer.kind={kind}"]).config
    expected = ("training.precision", f"fp16 cannot be used with optimizer.kind={kind}; use bf16")
    assert optimizer_refusal(config, "fp16") == expected


@pytest.mark.parametrize("kind", ["adamw_bf16", "adamw_8bit"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_rest_goes_together(kind, stage):
    words = [f"optimizer.kind={kind}", f"zero.stage={stage}"]
    for more in ([], [BF16], [BF16, NONE], ["lora.rank=4"]):
        resolve.resolve(load(None, [*BASE, *words, *more]))
    resolve.resolve(load(None, [*BASE, f"zero.stage={stage}", *MUON]))
    resolve.resolve(load(None, [*BASE, "zero.stage=0", "optimizer.kind=muon"]))


LLAMA = "model.config={model_type: llama, num_attention_heads: 12, num_key_value_heads: 4}"
KEY = "training.sequence_parallel_size"
FOUR = [f"data.path={DATA}", "run={device: cpu, ranks: 4}", "training.sequence_length=64"]


def refused(words: list[str]) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve.resolve(load(None, words))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_ranks_and_batches_are_of_groups_and_heads_read_before_anything_starts(tmp_path):
    text = f"command line: {KEY} is 3, but 4 ranks are not a multiple of it; use run.ranks=3"
    assert refused([*FOUR, LLAMA, f"{KEY}=3"]) == text
    text = "but 1 rank is not a multiple of it; use run.ranks=2"
    assert text in refused([*FOUR, LLAMA, f"{KEY}=2", "run.ranks=1"])
    words = [*FOUR, LLAMA, f"{KEY}=2", "training.micro_batch=3"]
    resolve.resolve(load(None, [*words, "training.total_batch=12"]))
    words += ["training.grad_accumulation=1"]
    resolve.resolve(load(None, [*words, "training.total_batch=6"]))
    assert refused([*words, "training.total_batch=12"]) == (
        "command line: training.total_batch is 12, but micro_batch 3 x grad_accumulation 1 x 4 ranks / "
        "sequence_parallel_size 2 is 6"
    )
    eight, folder = [*FOUR, f"{KEY}=8", "run.ranks=8"], f"model.name={tmp_path}"
    assert "cannot divide the model's 12 attention heads" in refused([*eight, LLAMA])
    for inner in ({"num_attention_heads": 6}, {"text_config": {"num_attention_heads": 6}}, {"n_head": 6}):
        (tmp_path / "config.json").write_text(json.dumps(inner))
        assert "cannot divide the model's 6 attention heads; use 2, 3, 6 or 1" in refused([*eight, folder])
    (tmp_path / "config.json").write_text('{"num_attention_heads": 16, "num_key_value_heads": 2}')
    assert resolve.resolve(load(None, [*eight, folder])).config.training.sequence_parallel_size == 8


@pytest.mark.parametrize(
    ("heads", "groups", "size", "text"),
    [
        (12, 4, 2, ""),
        (12, 4, 4, ""),
        (8, 1, 4, ""),
        (8, 2, 4, ""),
        (12, 4, 5, "is 5, which cannot divide the model's 12 attention heads; use 2, 4, 12 or 1"),
        (12, 4, 3, "is 3, which cannot divide the model's 4 key/value heads; use 2, 4, 12 or 1"),
        (12, 4, 8, "is 8, which cannot divide the model's 12 attention heads; use 2, 4, 12 or 1"),
        (3, 1, 2, "is 2, which cannot divide the model's 3 attention heads; use 3 or 1"),
        (1, 1, 2, "is 2, which cannot divide the model's 1 attention heads; use 1"),
    ],
)
def test_heads_are_divided_or_key_value_heads_repeated(heads, groups, size, text):
    assert heads_refusal(heads, groups, size) == text


@pytest.mark.parametrize(
    ("words", "precision", "path"),
    [
        (["model.attention=eager"], "bf16", "model.attention"),
        (["model.attention=flash_attention_2"], "bf16", "model.attention"),
        (["model.compile=layers"], "bf16", "model.compile"),
        (["model.quantization=nf4"], "bf16", "model.quantization"),
        ([], "fp16", "training.precision"),
    ],
)
def test_combinations_that_were_not_tested_are_refused_by_name(words, precision, path):
    alone = load(None, [LLAMA, *words]).config
    assert alone.training.sequence_parallel_size == 1
    assert consistency.refusal(alone, 3, precision) is None
    found = consistency.refusal(load(None, [LLAMA, f"{KEY}=2", *words]).config, 4, precision)
    assert found[0] == path
    assert f"cannot be used with {KEY}=2" in found[1]


@pytest.mark.parametrize(
    ("words", "compiler", "chosen", "reason"),
    [
        (["run.device=cuda"], True, "auto", ""),
        (["run.device=cpu"], True, "off", ""),
        (["run.device=cpu", "model.compile=layers"], True, "layers", ""),
        (["run.device=cuda"], False, "off", "no C compiler (gcc, clang or $CC) is found"),
        (["run.device=cuda", "data.packing=false"], True, "off", "it cannot be used with data.packing=false"),
        (["run.device=cuda", "model.quantization=nf4"], True, "off", "it cannot be used with model.quantization=nf4"),
        (
            ["run.device=cuda", "model.gradient_checkpointing=selective"],
            True,
            "off",
            "it cannot be used with model.gradient_checkpointing=selective",
        ),
    ],
)
def test_layers_are_compiled_on_gpus_unless_something_excludes_it(words, compiler, chosen, reason):
    said: list[str] = []
    found = consistency.settle_compile(load(None, [LLAMA, *words]).config, compiler, said.append)
    assert found.model.compile == chosen
    assert said == ([f"decoder layers are not compiled (model.compile): {reason}"] if reason else [])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, ""),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary embeddings of type"),
        ({"attention_chunk_size": 16}, "attention in chunks of 16 tokens; use 1"),
        ({"attention_chunk_size": 64}, ""),
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, "cannot divide the model's 3 key/value heads"),
    ],
)
def test_what_a_short_row_would_not_show_is_refused_by_the_models_configuration(values, text):
    problem = refusal(AutoConfig.for_model("llama", **{"hidden_size": 48, "num_attention_heads": 4, **values}), 64, 2)
    assert text in problem
    assert bool(problem) == bool(text)
