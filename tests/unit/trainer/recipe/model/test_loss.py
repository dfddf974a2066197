"""The loss in chunks equals the plain one, with its gradients, for whatever a model does to its logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Model, Training
from ftmon.trainer.recipe.data.batches import with_positions
from ftmon.trainer.recipe.model import loss as fused
from ftmon.trainer.recipe.model.loss import use_summed_loss
from peft import LoraConfig, get_peft_model
from small_shape import SMALL_SHAPE, OneRank
from transformers import AutoConfig, AutoModelForCausalLM


def config(fused_loss: Any) -> Config:
    return Config(model=Model(fused_loss=fused_loss))


def model_of(kind: str, **values: Any) -> Any:
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, **{**SMALL_SHAPE, **values})
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    with torch.no_grad():
        # Trained models have logits that a cap bends.
        model.get_output_embeddings().weight.mul_(40.0)
    use_summed_loss(model)
    return model


def rows(seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SMALL_SHAPE["vocab_size"], (3, 40), generator=generator)
    labels = ids.clone()
    labels[0, :35] = -100
    labels[1, :] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), "use_cache": False}


def gradients(model: Any, chosen: bool = False) -> dict[str, Any]:
    model.zero_grad()
    batch = rows()
    if chosen:
        batch |= with_positions({"labels": batch["labels"]}, rows=True)
    loss = model(**batch).loss
    (loss * 0.25).backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"loss": loss.detach(), **grads}


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25, "layer_norm_eps": 1e-5},
    "phi": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 2},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
}


@pytest.mark.parametrize("kind", [*KINDS, "llama with adapters"])
def test_a_models_loss_and_gradients_stay_what_they_were(kind: str) -> None:
    model: Any = model_of(kind.removesuffix(" with adapters"), **KINDS.get(kind, {}))
    adapts = kind not in KINDS
    if adapts:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    plain = gradients(model)
    assert all(("lora" in name) == adapts for name in plain if name != "loss")
    ranks = OneRank()
    assert fused.set_up(model, config("on"), ranks)
    # The last layer's linear layers compute the positions with labels alone, except in a mixture.
    chosen = fused.choose_rows(model, ranks)
    assert chosen == (kind not in ("mixtral", "llama4_text"))
    for found in (gradients(model), gradients(model, chosen)):
        assert found.keys() == plain.keys()
        for name, value in plain.items():
            room = 1e-4 * float(value.norm()) if adapts else 2e-5 * float(value.norm()) + 1e-7
            assert float((found[name] - value).norm()) <= room, name
    assert model(input_ids=rows()["input_ids"]).logits.shape == (3, 40, SMALL_SHAPE["vocab_size"])


def test_a_model_that_treats_its_logits_in_its_own_way_keeps_its_own_loss() -> None:
    model = model_of("llama")
    own = type(model).forward

    def forward(self: Any, *inputs: Any, labels: Any = None, **others: Any) -> Any:
        output = own(self, *inputs, **others)
        output.logits = output.logits / (1.0 + output.logits.abs())
        output.loss = self.loss_function(logits=output.logits, labels=labels) if labels is not None else None
        return output

    model.forward = forward.__get__(model)
    plain = gradients(model)
    ranks = OneRank()
    assert not fused.set_up(model, config("auto"), ranks)
    assert ranks.said == [
        "logits are computed at full size (model.fused_loss): llama changes its logits in a way of its own "
        "before the loss"
    ]
    found = gradients(model)
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    with pytest.raises(ConfigError, match=r"model\.fused_loss is on, but llama changes its logits"):
        fused.set_up(model, config("on"), OneRank())


def small(kind: str, **values: Any) -> Any:
    """Return a model in bf16 with the losses of random weights, which hardly depend on what its last layer is given."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL_SHAPE, **values))
    use_summed_loss(model.bfloat16())
    return model


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_a_body_that_returns_fp32_in_bf16_has_the_fused_loss(kind: str) -> None:
    model = small(kind, state_size=4)
    plain = model(**rows())
    assert fused.set_up(model, config("on"), OneRank())
    assert float(model(**rows()).loss.detach()) == pytest.approx(float(plain.loss.detach()), rel=1e-5)


def test_what_a_model_adds_to_its_loss_is_weighted_apart_from_the_tokens() -> None:
    model = model_of("mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    batch = rows()
    with torch.no_grad():
        plain = model(**batch)
    added = float(plain.loss) - float(fused.summed_loss(plain.logits, batch["labels"]))
    assert added == pytest.approx(0.5 * float(plain.aux_loss), abs=1e-3)
    for words in ("on", "off"):
        assert fused.set_up(model, config(words), OneRank()) is (words == "on")
        alone, once, thrice = (float(model(**batch, addition_weight=weight).loss) for weight in (0.0, 1.0, 3.0))
        assert alone == pytest.approx(float(plain.loss) - added, rel=1e-6)
        assert once - alone == pytest.approx(added, abs=1e-3)
        assert thrice - alone == pytest.approx(3.0 * added, abs=1e-3)
        assert fused.addition_weight(model, 12, 4) == {"addition_weight": 3.0}
        model = model_of("mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)


def test_a_hook_that_returns_a_copy_of_the_loss_adds_nothing_to_it() -> None:
    model = model_of("gemma2", **KINDS["gemma2"])

    def copy(_module: Any, _inputs: Any, output: Any) -> None:
        if output.loss is not None:
            output.loss = output.loss.clone()

    model.register_forward_hook(copy)  # as ZeRO-3's do
    assert fused.set_up(model, config("on"), OneRank())
    assert fused.addition_weight(model, 12, 4) == {}


def with_logits_loss(model: Any) -> Any:
    """Return a model that adds a loss of its logits, as Bamba can."""
    own = type(model).forward

    def forward(self: Any, *inputs: Any, **others: Any) -> Any:
        output = own(self, *inputs, **others)
        if output.loss is not None:
            output.loss = output.loss + 0.1 * output.logits.logsumexp(-1).pow(2).mean()
        return output

    model.forward = forward.__get__(model)
    return model


def test_a_loss_of_the_logits_and_overflowing_sums_in_fp16_keep_full_logits() -> None:
    for change, words in ((with_logits_loss, "llama gives a loss of"), (torch.nn.Module.half, "overflow in fp16")):
        ranks: Any = OneRank()
        assert not fused.set_up(change(model_of("llama")), config("auto"), ranks)
        assert words in ranks.said[0]
        with pytest.raises(ConfigError, match=words):
            fused.set_up(change(model_of("llama")), config("on"), ranks)
    model = model_of("llama")
    assert not fused.set_up(model, config("off"), ranks)
    assert "forward" not in vars(model)
    assert fused.addition_weight(model, 12, 4) == {}


def test_a_model_whose_configuration_is_made_of_parts_is_loaded(tmp_path: Path) -> None:
    from ftmon.trainer.recipe.model import load

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    shape = AutoConfig.for_model("gemma3", text_config=SMALL_SHAPE, vision_config=vision, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    named = Config(model=Model(name=str(tmp_path)), training=Training(precision="fp32"))
    made = load.make(named, {}, range(SMALL_SHAPE["vocab_size"]), OneRank())
    assert not hasattr(made.config, "vocab_size")
    with pytest.raises(ConfigError, match="has 320 tokens, fewer than the tokenizer's 321"):
        load.make(named, {}, range(321), OneRank())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_a_model_whose_sizes_do_not_fit_each_other_is_refused_in_one_line(kind: str, attention: str) -> None:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 2, "v_head_dim": 8}
    model = model_of(kind, **latent, num_key_value_heads=2)
    model.set_attn_implementation(attention)
    expected = f"model.config: {kind} of these sizes fails in transformers' forward, before any training: .*size.*;"
    with pytest.raises(ConfigError, match=expected):
        fused.set_up(model, config("auto"), OneRank())


def test_an_error_of_memory_is_not_the_model_s_and_layers_before_the_last_keep_their_own_loss():
    model = model_of("llama")
    model.forward = lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        fused.set_up(model, config("auto"), OneRank())
    ranks = OneRank()
    assert not fused.set_up(small("modernbert-decoder", cls_token_id=1, sep_token_id=2), config("auto"), ranks)
    assert "modernbert-decoder changes its body's output in a way of its own before its last layer" in ranks.said[0]
