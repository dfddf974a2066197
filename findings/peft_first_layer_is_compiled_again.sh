#!/usr/bin/env bash
# peft 0.21.0, transformers 5.24.0, torch 2.13.0 (CPU): with LoRA, layers that are compiled one by one with the same code
# are compiled twice: embeddings are frozen, so the first layer's input requires no gradient and every other layer's does,
# which are two specialisations. With model.enable_input_require_grads() one compilation serves all layers; the price is
# the gradient of the first layer's input.
#
# Seen: four decoder layers, one compiled function: all weights trained 1 compilation, LoRA 2, LoRA with
# enable_input_require_grads 1; gradients of the adapters are equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import peft
import torch
import transformers
from torch._dynamo.testing import CompileCounter


def compiled(lora, with_gradients):
    """Return how often the layers are compiled in a forward and backward, and the gradients of what is trained."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if lora:
        adapters = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(model, adapters)
    if with_gradients:
        model.enable_input_require_grads()
    counter = CompileCounter()
    layers = (model.get_base_model() if lora else model).model.layers
    function = torch.compile(type(layers[0]).forward, backend=counter, dynamic=False)
    for layer in layers:
        layer.forward = lambda *inputs, of=layer, **named: function(of, *inputs, **named)
    ids = torch.randint(1, 64, (2, 16))
    model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.frame_count, {name: one.grad for name, one in model.named_parameters() if one.requires_grad}


whole, _ = compiled(False, False)
adapted, gradients = compiled(True, False)
helped, others = compiled(True, True)
print("compilations: all weights", whole, "LoRA", adapted, "LoRA with enable_input_require_grads", helped)
apart = max(float((gradients[name] - others[name]).abs().max()) for name in gradients)
print("largest difference of an adapter's gradient", apart)
assert (whole, adapted, helped) == (1, 2, 1), "the number of compilations has changed"
assert apart < 1e-6, apart
PY
