"""Models with values of their configuration replaced, and with new special tokens, as transformers makes them."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load as load_config
from ftmon.trainer.recipe.config.schema import Config, Lora, Zero
from ftmon.trainer.recipe.model import load, shape, tokenizer
from ftmon.trainer.recipe.preflight.resolve import resolve
from ftmon.trainer.recipe.start import DATA
from peft import PeftModel
from small_shape import SMALL_SHAPE, OneRank
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

IDS = torch.arange(4, 84).reshape(2, 40)
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 5000.0}


def saved(folder: Path, kind: str = "mixtral", **values: Any) -> Path:
    torch.manual_seed(0)
    made = AutoConfig.for_model(kind, **{**SMALL_SHAPE, **MIXTURE, "max_position_embeddings": 32, **values})
    AutoModelForCausalLM.from_config(made).save_pretrained(folder / "base")
    tokenizer.train(lambda: ["a text to learn from"] * 4, 300).save_pretrained(folder / "base")
    return folder / "base"


def config(*words: str) -> Config:
    return load_config(None, ["training.precision=fp32", *words]).config


def test_overrides_give_the_loss_of_the_configuration_that_transformers_makes_of_them(tmp_path):
    name = saved(tmp_path)
    yarn = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32}"
    words = f"model.overrides={{rope_scaling: {yarn}, output_router_logits: true, router_aux_loss_coef: 0.5}}"
    length = "training.sequence_length=64"
    given = config(f"model.name={name}", words, "model.overrides.max_position_embeddings=128", length)
    assert shape.check(given)[1] == ""
    model = load.make(given, {}, AutoTokenizer.from_pretrained(name), OneRank())  # type: ignore[arg-type]
    torch.manual_seed(0)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5000.0}
    written = {"rope_parameters": rope, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    other = AutoConfig.for_model("mixtral", **{**SMALL_SHAPE, **MIXTURE, "max_position_embeddings": 128, **written})
    reference: Any = AutoModelForCausalLM.from_config(other)
    plain: Any = AutoModelForCausalLM.from_pretrained(name)
    reference.load_state_dict(plain.state_dict())
    with torch.no_grad():
        found, wanted, before = (one.eval()(input_ids=IDS) for one in (model, reference, plain))
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.aux_loss, wanted.aux_loss)
    assert not torch.allclose(found.logits, before.logits, atol=1e-4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
THETAS = {kind: {"rope_type": "default", "rope_theta": 7.0} for kind in ("full_attention", "sliding_attention")}


@pytest.mark.parametrize(
    ("kind", "words", "rope"),
    [
        ("llama", f"{{rope_theta: 9.0, rope_scaling: {YARN}}}", {**YARN, "rope_theta": 9.0}),
        ("gemma3_text", "{rope_theta: 9.0}", {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}),
        ("gemma3_text", f"{{rope_scaling: {YARN}}}", {"full_attention": {**YARN, "rope_theta": 7.0}}),
        (
            "gemma3_text",
            "{rope_parameters: {sliding_attention: {rope_theta: 9.0}}}",
            {"sliding_attention": {"rope_type": "default", "rope_theta": 9.0}},
        ),
        ("gemma4_text", "{sliding_window: 16}", {}),
    ],
)
def test_overrides_of_rotary_settings_keep_the_others(kind, words, rope, tmp_path):
    own = {"rope_theta": 7.0} if kind == "llama" else {"rope_parameters": THETAS}
    AutoConfig.for_model(kind, **own).save_pretrained(tmp_path)
    made = shape.named_config(config(f"model.name={tmp_path}", f"model.overrides={words}").model)
    assert made.rope_parameters == (rope if kind == "llama" else {**THETAS, **rope})


def test_rotary_settings_of_a_layer_the_model_lacks_are_refused_and_a_tied_output_has_adapters_apart(tmp_path):
    AutoConfig.for_model("gemma3_text").save_pretrained(tmp_path)
    words = "model.overrides={rope_parameters: {full: {rope_theta: 9.0}}}"
    with pytest.raises(
        ConfigError, match=r"^model\.overrides\.rope_parameters: full is no kind of layer; use .*full_att"
    ):
        shape.named_config(config(f"model.name={tmp_path}", words).model)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TIED))
    load.add_lora(model, Config(lora=Lora(rank=4, targets=["lm_head"], merge=False)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("{attention_droput: 0.1}", "model.overrides.attention_droput: mixtral has no such setting"),
        ("{rope_scaling: {rope_type: none}}", "model.overrides: "),
        ("{num_hidden_layers: 1}", "model.overrides: model.layers.1.self_attn.q_proj.weight is [32, 32] in"),
        ("{tie_word_embeddings: true}", "model.overrides: lm_head.weight is [320, 32] in"),
    ],
)
def test_overrides_that_the_model_or_its_weights_do_not_have_are_refused(words, text, tmp_path):
    with pytest.raises(ConfigError) as refused:
        shape.check(config(f"model.name={saved(tmp_path)}", f"model.overrides={words}"))
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize("count", [2, 60])
def test_new_special_tokens_have_the_rows_that_transformers_resizes_to(count, tmp_path):
    name = saved(tmp_path, tie_word_embeddings=True)
    tokens = [f"<|new {number}|>" for number in range(count)]
    given = config(f"model.name={name}", f"tokenizer.special_tokens={tokens}")
    made: Any = tokenizer.load(given, None)
    assert made("a<|new 1|>")["input_ids"][-1] == made.convert_tokens_to_ids("<|new 1|>")
    assert "<|new 1|>" in tokenizer.special_tokens(made)
    model = load.make(given, {}, made, OneRank())  # type: ignore[arg-type]
    torch.manual_seed(given.training.seed)
    reference: Any = AutoModelForCausalLM.from_pretrained(name)
    if len(made) > 320:
        reference.resize_token_embeddings(len(made), pad_to_multiple_of=64)
    assert model.config.vocab_size == reference.config.vocab_size == (384 if count > 2 else 320)
    for key, weight in reference.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight), key
    adapters = load_config(
        None, [f"model.name={name}", f"data.path={DATA}", "tokenizer.special_tokens=[<|new|>]", "lora.rank=2"]
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.special_tokens cannot be used with lora\.rank"):
        resolve(adapters)


GLM = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("targets", [[], FEED_FORWARD])
def test_dense_layers_and_shared_experts_that_have_the_names_of_experts_get_adapters(targets, tmp_path):
    torch.manual_seed(0)
    sizes = {**SMALL_SHAPE, "head_dim": 8, "n_shared_experts": 1, **GLM}
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes))
    plain = copy.deepcopy(base)
    head = plain.get_output_embeddings()
    linear = {name for name, one in plain.named_modules() if isinstance(one, torch.nn.Linear) and one is not head}
    expected = {name for name in linear if not targets or name.rpartition(".")[2] in targets}
    model = load.add_lora(base, Config(lora=Lora(rank=4, alpha=8.0, targets=targets)))
    with torch.no_grad():
        for name, module in model.base_model.model.named_modules():
            if name in expected:
                down, up = (part["default"].weight for part in (module.lora_A, module.lora_B))
                up.normal_(std=0.2)
                plain.get_submodule(name).weight += 8.0 / 4 * up @ down
                expected.remove(name)
        assert not expected
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(plain.config), str(tmp_path))
        own = {name: weight for name, weight in model.state_dict().items() if "lora_" not in name}
        again.load_state_dict(own, strict=False)
        wanted = plain.eval()(IDS).logits
        for made in (model, again):
            assert torch.allclose(made.eval()(IDS).logits, wanted, atol=1e-5)


TIED = {**SMALL_SHAPE, "tie_word_embeddings": True}


@pytest.mark.parametrize(("target", "merge"), [("embed_tokens", True), ("embed_tokens", False), ("lm_head", True)])
def test_embeddings_and_an_output_layer_that_merging_would_untie_are_refused_as_targets(target, merge):
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TIED))
    with pytest.raises(ConfigError, match=rf"lora\.targets: \S*{target} cannot be adapted: it"):
        load.add_lora(model, Config(lora=Lora(rank=4, targets=["q_proj", target], merge=merge)))


def test_layers_that_share_a_weight_are_not_adapted_if_each_adapter_is_to_be_merged_into_it():
    blocks = {"layer_types": ["hybrid", "mamba", "hybrid"], "num_hidden_layers": 3, "num_mem_blocks": 1}
    mamba = {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "adapter_rank": 4}
    sizes = {name: size for name, size in SMALL_SHAPE.items() if name != "head_dim"}
    for merge in (True, False):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("zamba2", **{**sizes, **blocks, **mamba}))
        given = Config(lora=Lora(rank=4, targets=["q_proj"], merge=merge))
        first, second = (model.model.layers[number].shared_transformer.self_attn.q_proj for number in (0, 2))
        assert first.weight is second.weight
        refused = pytest.raises(ConfigError, match=r"lora\.merge: .*layers\.0\..* and .*layers\.2\..* share a weight")
        with refused if merge else contextlib.nullcontext():
            load.add_lora(model, given)


BY_TURN = {"num_local_experts": 4, "n_routed_experts": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "num_layers": 1}


def on_meta(kind: str, **values: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL_SHAPE, **BY_TURN, **values}))


@pytest.mark.parametrize(
    ("kind", "words", "ranks", "refused"),
    [
        ("longcat_flash", ["zero.stage=1"], 2, "zero.stage: 1 needs a gradient of every weight .* use 0 or 3"),
        ("longcat_flash", ["zero.stage=2", "training.precision=bf16"], 2, "zero.stage: 2 needs .* use 0 or 3"),
        ("longcat_flash", ["zero.stage=0", "training.precision=fp16"], 2, "zero.stage: 0 needs .* use 3"),
        ("longcat_flash", ["zero.stage=2", "lora.rank=4"], 2, "zero.stage: 2 needs .* longcat_flash; use 0 or 3"),
        ("longcat_flash", ["zero.stage=2", "lora={rank: 4, targets: [o_proj]}"], 2, ""),
        ("longcat_flash", ["zero.stage=2"], 1, ""),
        ("longcat_flash", ["zero.stage=0"], 2, ""),
        ("longcat_flash", ["zero.stage=3"], 2, ""),
        ("longcat_flash", ["zero.stage=1", "training.precision=bf16"], 2, ""),
        ("mixtral", ["zero.stage=2"], 2, ""),
        ("opt", ["zero.stage=3"], 2, "model.overrides.layerdrop: opt leaves out other layers .* zero.stage=3; use 0"),
        ("opt", ["zero.stage=1", "training.precision=bf16"], 2, ""),
    ],
)
def test_ranks_whose_gradients_would_differ_are_refused(kind, words, ranks, refused):
    dropping = {"layerdrop": 0.1, "word_embed_proj_dim": 32} if kind == "opt" else {}
    given, model = config("model.name=x", *words), on_meta(kind, **dropping)
    by_turn = any(True for _ in load.experts_by_turn(model))
    model = load.add_lora(model, msgspec.structs.replace(given, zero=Zero())) if given.lora.rank else model
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        load.refuse_left_out(model, by_turn, given, ranks)


def test_experts_that_call_their_modules_by_expert_are_gathered_whole_under_zero_3():
    pytest.importorskip("deepspeed")
    for kind, expected in (("longcat_flash", {"model.layers.0.mlp.experts"}), ("mixtral", set()), ("jetmoe", set())):
        model = on_meta(kind)
        load.gather_experts_whole(model)
        whole = {name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)}
        assert whole == expected, kind
