#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0: position_ids that restart inside a row separate the documents of a packed row only if
# the model makes no cache. A plain training loop passes no attention_mask and leaves use_cache at the configuration's
# default, True; the model then makes a cache in training mode, too, and every document attends to the ones before it.
# masking_utils._preprocess_mask_arguments looks for packed rows only where mask and cache are None.
#
# Seen: the logits of document B change by about 0.1 when document A changes, with the defaults and with a mask of ones;
# by exactly 0 with use_cache=False. No warning in any case.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
).train()
positions = torch.arange(8).repeat(2)[None]
row = torch.randint(4, 64, (1, 16))
other = row.clone()
other[0, :8] = torch.randint(4, 64, (8,))


def change(**arguments):
    """Return how much document B's logits change with document A."""
    first, second = (model(ids, position_ids=positions, **arguments).logits[0, 8:] for ids in (row, other))
    return (first - second).abs().max().item()


default, masked = change(), change(attention_mask=torch.ones_like(row))
right = change(use_cache=False)
print(f"defaults {default:.4f}, mask of ones {masked:.4f}, use_cache=False {right:.4f}")
assert default > 0.01, "documents are separated by default now"
assert masked > 0.01, "documents are separated with a mask of ones now"
assert right == 0.0, "documents see each other without a cache, too"
PY
