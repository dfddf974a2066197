#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0, torch 2.13.0: with target_modules="all-linear" (or a list with gate_proj, up_proj and
# down_proj) the linear layers of a mixture that are called as its experts were in transformers 4 get no adapters: dense
# layers and shared experts of DeepSeek, GLM-4.5, Qwen3-Next and others. The names are replaced by the parameters that hold
# all experts (utils/transformers_weight_conversion.py), and no longer select layers. There is no warning.
#
# Seen, for a GLM-4.5 of two layers, of which the first is dense: adapters on attention, experts and router; none on
# layers.0.mlp.{gate,up,down}_proj and layers.1.mlp.shared_experts.{gate,up,down}_proj. As target_parameters
# ("...gate_proj.weight") they get them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, first_k_dense_replace=1)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1)
config = AutoConfig.for_model("glm4_moe", **sizes, **heads, **experts)


def without_adapters(**settings):
    model = AutoModelForCausalLM.from_config(config)
    linear = {n for n, one in model.named_modules() if type(one) is torch.nn.Linear and n != "lm_head"}
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **settings)).base_model.model
    return sorted(name for name in linear if not hasattr(adapted.get_submodule(name), "lora_A"))


names = ("gate_proj", "up_proj", "down_proj")
wanted = sorted(f"model.layers.{part}.{name}" for part in ("0.mlp", "1.mlp.shared_experts") for name in names)
left_out = without_adapters(target_modules="all-linear")
print("all-linear leaves out", *left_out, sep="\n  ")
assert left_out == wanted, "all-linear adapts them now"
listed = without_adapters(target_modules=list(names))
assert set(wanted) <= set(listed), "a list adapts them now"
as_parameters = without_adapters(target_modules="all-linear", target_parameters=[f"{name}.weight" for name in wanted])
assert not as_parameters, as_parameters
PY
