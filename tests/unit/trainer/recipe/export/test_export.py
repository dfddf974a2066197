"""Adapters of every kind of layer, exported and loaded by transformers and peft; and the model card."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Data, File, Lora, Model
from ftmon.trainer.recipe.export import export
from ftmon.trainer.recipe.model.load import add_lora, without_adapters
from ftmon.trainer.recipe.state import TrainState
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from small_tokenizer import family_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

WIDTHS = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4}
SIZES = {**WIDTHS, "num_key_value_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "max_position_embeddings": 128}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
SHORTCUT = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "deepseek_v3": {**EXPERTS, **LATENT, **GROUPS},
    "glm4_moe": {**EXPERTS, **GROUPS},
    "gpt_oss": EXPERTS,
    "granitemoe": EXPERTS,
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 48, "moe_layers": [1]},
    "gpt2": {},
    "mamba": {"state_size": 8},
    "falcon_h1": MAMBA,
    "longcat_flash": {**LATENT, "q_lora_rank": 16, "num_layers": 1, "n_routed_experts": 4, "moe_topk": 2, **SHORTCUT},
}
FROZEN = {"qwen2_moe", "gpt_oss", "granitemoe", "llama4_text"}
"""Families whose experts peft 0.21 gives no adapters."""
IDS = torch.arange(3, 51).reshape(2, 24)
WORLD: Any = SimpleNamespace(is_first=True, on_gpu=False, share_text=lambda text: text, barrier=lambda: None)


def adapted(family: str, folder: Path, **lora: Any) -> tuple[Any, Config]:
    """Write a model with random weights; return it with random adapters, and the configuration."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder / "base")
    config = Config(model=Model(name=str(folder / "base")), lora=Lora(rank=2, **lora))
    model = add_lora(AutoModelForCausalLM.from_pretrained(folder / "base"), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model, config


def save(model: Any, config: Config, folder: Path) -> Path:
    results = export.Results(TrainState(), "", 10, 10)
    export.save_model(None, model, family_tokenizer(None), config, folder / "model", WORLD, results)
    return folder / "model"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_model_has_the_logits_of_the_trained_one_and_names_frozen_experts(family, merge, tmp_path):
    model, config = adapted(family, tmp_path, merge=merge)
    note = without_adapters(model)
    assert ("experts.gate_up_proj" in note and "experts.down_proj" in note) == (family in FROZEN), note
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained, before = logits(model), logits(base)
    export.rehearse_export(model, config, WORLD)
    folder = save(model, config, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder) if merge else PeftModel.from_pretrained(base, str(folder))
    assert (logits(model) - trained).abs().max() == 0, "the export does not change the training's weights"
    assert (trained - before).abs().max() > 0.05, "the adapters matter"
    assert (logits(loaded) - trained).abs().max() < 1e-4


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_weights_that_transformers_reads_as_fp32_are_exported_as_they_were_trained_in_bf16(family, adapts, tmp_path):
    model, config = adapted(family, tmp_path)
    if not adapts:
        config = Config(model=config.model)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    for parameter in model.parameters():  # as DeepSpeed does
        parameter.data = parameter.data.bfloat16()
    folder = save(model, config, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    fp32 = [name for name, weight in loaded.named_parameters() if weight.dtype == torch.float32]
    assert fp32, "the family has such weights"
    wanted: Any = model
    wanted = wanted.merge_and_unload() if adapts else wanted
    for name, weight in wanted.named_parameters():
        assert torch.equal(loaded.get_parameter(name).bfloat16(), weight), name
    if not adapts:
        tensors = load_file(folder / "model.safetensors")
        tensors[fp32[0]] = tensors[fp32[0]].float() * (1 + 2**-12)  # less than bf16 holds
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(export.ExportError, match=f"differs from the trained one: {fp32[0]} is"):
            export.compare(model, folder, config, WORLD)


def test_each_experts_weights_are_the_base_plus_its_own_adapter_and_a_changed_one_is_found(tmp_path):
    model, config = adapted("mixtral", tmp_path)
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(save(model, config, tmp_path) / "model.safetensors")
    experts: Any = model.get_base_model().model.layers[0].mlp.experts
    a, b = experts.lora_A["default"].weight, experts.lora_B["default"].weight  # down_proj: rank 2, scale 16 / 2
    for expert in range(4):
        delta = 8 * (b[:, [expert, expert + 4]] @ a[[2 * expert, 2 * expert + 1]])
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"
        assert (after[name] - before[name] - delta).abs().max() < 1e-5
        assert delta.abs().max() > 0.1
    model, config = adapted("mixtral", tmp_path)
    folder = save(model, config, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"][5, 7] += 0.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(export.ExportError, match=r"layers\.1\.mlp\.experts\.gate_up_proj is not its base plus"):
        export.compare(model, folder, config, WORLD)


def test_the_rehearsal_finds_adapters_that_are_merged_in_another_way(tmp_path, monkeypatch):
    model, config = adapted("qwen3_moe", tmp_path)
    right = ParamWrapper.get_delta_weight
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", lambda self, name: right(self, name).flip(0))
    with pytest.raises(export.ExportError, match=r"^rehearsal: the final model could not be written .* in another way"):
        export.rehearse_export(model, config, WORLD)


def test_the_rehearsal_finds_adapters_that_peft_would_not_load(tmp_path, monkeypatch):
    import peft

    def without_a_layer(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
        return right(model, {name: one for name, one in tensors.items() if "layers.1.mlp.up_proj" not in name})

    model, config = adapted("llama", tmp_path, merge=False)
    right = peft.set_peft_model_state_dict
    export.rehearse_export(model, config, WORLD)
    monkeypatch.setattr(peft, "set_peft_model_state_dict", without_a_layer)
    with pytest.raises(
        export.ExportError, match=r"would not load .*layers\.1\.mlp\.up_proj\.lora_A.*; set lora\.merge=true,"
    ):
        export.rehearse_export(model, config, WORLD)


def test_a_tokenizer_that_cannot_be_written_is_told_like_weights_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    model, config = adapted("llama", tmp_path, merge=False)
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(export.ExportError, match=r"cannot be written to \S+/model: No space left on device"):
        save(model, config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_the_rehearsal_finds_weights_that_are_not_written(tmp_path):
    model, config = adapted("llama4_text", tmp_path)
    model.get_base_model().extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(export.ExportError, match="written after the training: extra is missing"):
        export.rehearse_export(model, config, WORLD)


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("mixtral", {"dropout": 0.1}, "lora.dropout: peft cannot use it with the experts of mixtral; use"),
        ("mixtral", {"kind": "dora"}, "lora.kind: peft cannot use it with the experts of mixtral; use lora.kind=lora"),
        ("llama4_text", {"targets": ["router"]}, "router cannot be adapted: Llama4Router is no plain linear layer"),
        ("mamba", {"targets": ["x_proj"]}, "x_proj cannot be adapted: MambaMixer reads its weight without the adapter"),
        ("falcon_h1", {"targets": ["out_proj"]}, "out_proj cannot be adapted: Mamba's kernels read its weight without"),
    ],
)
def test_adapters_that_cannot_work_are_one_clear_line(family, lora, words, tmp_path):
    with pytest.raises(ConfigError) as raised:
        adapted(family, tmp_path, **lora)
    assert words in str(raised.value)


def text(data: Data) -> str:
    return export.text(Config(data=data), export.Results(TrainState(), "llama", 10, 10))


def test_files_are_named_with_their_weight_and_data_sets_of_the_hub_for_the_hub(tmp_path):
    files = [File("a.jsonl", 2.0), File("b.jsonl", 0.5)]
    assert "| data | a.jsonl (weight 2), b.jsonl (weight 0.5): 0 examples" in text(Data(files=files))
    assert "datasets:\n- me/poems\n" in text(Data(name="me/poems"))
    assert "datasets:" not in text(Data(name=str(tmp_path)))
