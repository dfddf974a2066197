#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): in a mixture of experts the logits of one document of a packed row depend on
# the other documents' tokens, by a few bits, although attention separates them exactly. An expert multiplies all its
# tokens at once, and their number decides how the product is summed; a token that is close to two experts may even take
# the other one. So a test for equal bits, which shows whether a dense model separates packed documents, calls every
# mixture of a usual width leaky, and at a width of 32 none: there all row counts are summed alike.
#
# Seen: when document A changes, the logits of document B change by exactly 0 in Llama and Qwen3-MoE of width 32, by
# exactly 0 in Llama of width 256, and by about 1e-7 in Qwen3-MoE of width 256; there by exactly 0 once its experts
# return zeros, which leaves attention as it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

LENGTHS = (11, 13)
positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
row = torch.randint(0, 320, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
other = row.clone()
other[:, : LENGTHS[0]] = (other[:, : LENGTHS[0]] + 1) % 320


def change(kind, width, experts=True):
    """Return how much document B's logits change with document A."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(
        kind,
        vocab_size=320,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {}),
    )
    model = AutoModelForCausalLM.from_config(settings).eval()
    for name, module in model.named_modules():
        if name.endswith(".experts") and not experts:
            module.forward = lambda hidden, *_: torch.zeros_like(hidden)
    with torch.no_grad():
        first, second = (
            model(ids, position_ids=positions, use_cache=False).logits[0, LENGTHS[0] :] for ids in (row, other)
        )
    return (first - second).abs().max().item()


seen = {(kind, width): change(kind, width) for kind in ("llama", "qwen3_moe") for width in (32, 256)}
zeros = change("qwen3_moe", 256, experts=False)
for (kind, width), by in seen.items():
    print(f"{kind} of width {width}: {by:.1e}")
print(f"qwen3_moe of width 256 whose experts return zeros: {zeros:.1e}")
assert seen.pop(("qwen3_moe", 256)) > 0, "the experts round alike whatever the number of their tokens now"
assert not any(seen.values()), "other models' documents depend on each other, too"
assert zeros == 0.0, "documents see each other by more than the experts"
PY
