"""Kinds of models on two ranks that share sequences: the gradients of whole rows, or a refusal."""

import json
import os
import re
from typing import Any

import pytest
import rank_jobs

pytest.importorskip("deepspeed")

MLA: dict[str, Any] = {
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "num_key_value_heads": 4, "first_k_dense_replace": 2,
}  # fmt: skip
EQUAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 320},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "deepseek_v3": MLA,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    # Experts inside attention.
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"query_pre_attn_scalar": 8}, "softcap"),
    "mamba": ({"state_size": 4, "num_hidden_layers": 1}, "slices of a row give other logits than the whole row"),
    "bloom": ({"n_head": 4, "n_layer": 2}, ""),
    "phi3": (
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 32,
            },
        },
        "rotary embeddings of type longrope",
    ),
}


@pytest.fixture(scope="module")
def text() -> dict[str, str]:
    kinds = EQUAL | {kind: values for kind, (values, _) in REFUSED.items()}
    jobs = [f"{kind} {kind} {json.dumps(values)}" for kind, values in kinds.items()]
    plan = [{"ranks": 2, "module": "sequence_ranks", "jobs": jobs}]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    environment.pop("FTMON_RUN", None)
    return rank_jobs.sections(rank_jobs.forked(plan, environment, 550))


@pytest.mark.parametrize("kind", EQUAL)
def test_slices_give_the_gradients_of_whole_rows_packed_and_not(text: dict[str, str], kind: str) -> None:
    found = [float(number) for number in re.findall(r"^difference (\S+)$", text[kind], re.MULTILINE)]
    assert len(found) == 2, text[kind]
    assert max(found) < 1e-5


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_need_whole_rows_are_refused_in_one_line(text: dict[str, str], kind: str) -> None:
    (line,) = re.findall(r"^refused: (.*)$", text[kind], re.MULTILINE)
    assert line.startswith("training.sequence_parallel_size cannot be used with ")
    assert REFUSED[kind][1] in line
    assert line.endswith("; use 1")
    assert not re.search(r"^difference", text[kind], re.MULTILINE)
