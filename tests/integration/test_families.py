"""Trainings of other families on two ranks end where plain PyTorch with fp32 weights ends, in bf16 too."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_runs

pytest.importorskip("deepspeed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
SHORTCUT = {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 4}
ONE = {"num_hidden_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {**ONE, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0, "sliding_window": 64},
    "qwen3_moe": {**ONE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "longcat_flash": {**LATENT, **SHORTCUT, "num_key_value_heads": 4, "num_layers": 2, "moe_topk": 2, "head_dim": 8},
}
STEPS, BATCH, LR, DECAY, CLIP, BETAS = 5, 4, 1e-3, 0.1, 0.3, (0.9, 0.95)
PARTITIONED = ["zero.stage=3", "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"]
PACKED = ["data.packing=true", "training.sequence_length=128"]
PADDED = ["data.packing=false"]
VARIANTS: dict[str, list[str]] = {
    "fp32-partitioned": [*PARTITIONED, *PADDED, "model.gradient_checkpointing=selective"],
    "fp32-packed": ["zero.stage=2", *PACKED],
    "bf16-unpartitioned": ["zero.stage=0", *PADDED],
    "bf16-padded": ["zero.stage=2", *PADDED],
    "bf16-packed": ["zero.stage=1", *PACKED],
    "bf16-packed-partitioned": [*PARTITIONED, *PACKED, "training={micro_batch: 2, grad_accumulation: 1}"],
}
CASES = [
    *(("qwen2", name) for name in ("fp32-partitioned", "bf16-unpartitioned", "bf16-packed")),
    *(("gemma2", name) for name in ("fp32-packed", "bf16-padded", "bf16-packed-partitioned")),
    ("longcat_flash", "fp32-partitioned"),
    *(("qwen3_moe", name) for name in ("fp32-partitioned", "fp32-packed", "bf16-padded", "bf16-packed-partitioned")),
]
"""Each family padded, packed and partitioned, in fp32 and bf16."""
RECORDS = 18  # neither they nor their packed rows are a multiple of the batch: the last of an epoch is left out


def write_records(path: Path) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=3)) for _ in range(200)]
    records = [
        {"prompt": " ".join(draw.choices(words, k=4)), "response": " ".join(draw.choices(words, k=draw.randint(1, 25)))}
        for _ in range(RECORDS)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("families")
    small_runs.write_model(folder)  # for the tokenizer
    write_records(folder / "data.jsonl")
    jobs: dict[str, tuple[int, list[str]]] = {}
    for kind, settings in KINDS.items():
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **HEADS, **settings}))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn_like(weight))  # biases and norms are not all equal
        model.save_pretrained(folder / kind)
        for name in (name for of, name in CASES if of == kind):
            common = [
                f"model.name={folder / kind}",
                f"training={{max_steps: {STEPS}, micro_batch: 1, grad_accumulation: 2, sequence_length: 256}}",
                "schedule={kind: constant, warmup_steps: 0}",
                f"optimizer={{lr: {LR}, weight_decay: {DECAY}, beta2: {BETAS[1]}, max_grad_norm: {CLIP}}}",
                "data.shuffle=false",
                f"training.precision={name[:4]}",
            ]
            jobs[f"{kind}-{name}"] = (2, [*common, *VARIANTS[name]])
    return folder, small_runs.launch(folder, "optimizer_ranks", jobs)


def documents(row: dict[str, list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    start = 0
    for length in row.get("lengths", [len(row["input_ids"])]):
        yield row["input_ids"][start : start + length], row["labels"][start : start + length]
        start += length


@small_runs.once
def reference(path: Path, rows: list[dict[str, list[int]]], dtype: torch.dtype, each: int) -> dict[str, torch.Tensor]:
    """Return weights that PyTorch's AdamW trained in fp32, each document alone, ``each`` rows of an epoch."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    weights = dict(model.named_parameters())
    held = {name: torch.nn.Parameter(weight.detach().clone().float()) for name, weight in weights.items()}
    matrices, rest = ([one for one in held.values() if (one.dim() < 2) is flat] for flat in (False, True))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8, foreach=False)
    for step in range(STEPS):
        sums = {name: torch.zeros_like(one) for name, one in held.items()}
        labels = 0
        for place in range(step * BATCH, (step + 1) * BATCH):
            for ids, wanted in documents(rows[place % each]):
                model.zero_grad()
                targets = torch.tensor([*wanted[1:], -100])
                logits = model(input_ids=torch.tensor([ids])).logits[0].float()
                torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").backward()
                labels += int((targets != -100).sum())
                for name, weight in weights.items():
                    sums[name] += weight.grad if weight.grad is not None else 0.0
        for name, one in held.items():
            one.grad = sums[name] / labels
        assert torch.nn.utils.clip_grad_norm_(held.values(), CLIP) > CLIP
        optimizer.step()
        for name, weight in weights.items():
            weight.data.copy_(held[name].data)
    return {name: one.detach() for name, one in held.items()}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_weights_are_those_of_plain_pytorch(launched: tuple[Path, dict[str, str]], kind: str, name: str) -> None:
    folder, texts = launched
    saved = torch.load(folder / f"{kind}-{name}.pt", weights_only=False)
    found, rows, half = saved["masters"], saved["rows"], name.startswith("bf16")
    dtype = torch.bfloat16 if half else torch.float32
    start = {
        key: one.detach().float()
        for key, one in AutoModelForCausalLM.from_pretrained(folder / kind, dtype=dtype).named_parameters()
    }

    def apart(wanted: dict[str, torch.Tensor]) -> float:
        """Return the difference of two movements of all weights, relative to that of ``wanted``."""
        norms = [((found[key] - wanted[key]).norm(), (wanted[key] - start[key]).norm()) for key in start]
        differences, moved = (torch.stack(column).norm() for column in zip(*norms, strict=True))
        return float(differences / moved)

    used = len(rows) // BATCH * BATCH
    assert used < len(rows) < STEPS * BATCH
    assert any(len(row.get("lengths", [])) > 1 for row in rows) is ("packed" in name)
    assert apart(reference(folder / kind, rows, dtype, used)) < (0.04 if half else 1e-4)
    if not half:
        assert apart(reference(folder / kind, rows, dtype, len(rows))) > 1e-3, "other batches would be seen"
    assert "logits are computed at full size" not in texts[f"{kind}-{name}"]
