#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): with rotary embeddings of type "longrope" (Phi-3's long contexts) a sequence has
# other logits beside a longer one than alone. The frequencies of a forward pass are chosen by its largest position
# (modeling_rope_utils.py, dynamic_rope_update): one sequence beyond original_max_position_embeddings gives the long set to
# all sequences of the batch, padded ones and documents of a packed row alike. So a short document is trained with
# frequencies that it will not have when the model answers it alone, and its loss depends on what else was drawn.
#
# Seen: a sequence of 12 tokens, original_max_position_embeddings 16; its logits beside one of 16 tokens are those it has
# alone, and beside one of 17 tokens they are not (relative difference 0.6). With plain rotary embeddings they are in both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
import transformers

ORIGINAL, SHORT = 16, 12
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONG = PLAIN | {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}


def difference(rope, neighbour):
    """Return how far a short sequence's logits beside a longer one are from those alone, relative."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = transformers.LlamaConfig(**sizes, initializer_range=0.2, max_position_embeddings=64, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(settings).eval()
    ids = torch.randint(1, 64, (2, neighbour))
    mask = torch.ones_like(ids)
    mask[0, SHORT:] = 0
    with torch.no_grad():
        beside = model(input_ids=ids, attention_mask=mask).logits[0, :SHORT]
        alone = model(input_ids=ids[:1, :SHORT]).logits[0]
    return float((beside - alone).norm() / alone.norm())


found = {
    (name, neighbour): difference(rope, neighbour)
    for name, rope in (("default", PLAIN), ("longrope", LONG))
    for neighbour in (ORIGINAL, ORIGINAL + 1)
}
for key, value in found.items():
    print(*key, f"{value:.1e}")
assert found["longrope", ORIGINAL + 1] > 1e-2, "a short sequence no longer depends on a longer one beside it"
assert all(value < 1e-5 for key, value in found.items() if key != ("longrope", ORIGINAL + 1)), found
PY
