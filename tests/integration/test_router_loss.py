"""The loss of a mixture's router enters a step as transformers defines it, however the batch is divided."""

from pathlib import Path
from typing import Any

import pytest
import small_runs

pytest.importorskip("deepspeed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "output_router_logits": True, "tie_word_embeddings": False}
COEFFICIENT = 1.0  # so large that the router's loss is seen in every gradient
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 8.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 4},
}
OFF = ["model.fused_loss=off"]
LAYERS = ["model.gradient_checkpointing=layers"]
BF16 = ["training.precision=bf16"]
# Kind, ranks, ZeRO stage, micro-batch, accumulation: a step always takes the eight rows.
CASES: dict[str, tuple[str, int, int, int, int, list[str]]] = {
    "mixtral-whole": ("mixtral", 1, 0, 8, 1, []),
    "mixtral-accumulated": ("mixtral", 1, 0, 1, 8, OFF),
    "mixtral-ranks": ("mixtral", 2, 2, 2, 2, []),
    "mixtral-partitioned": ("mixtral", 2, 3, 1, 4, OFF),
    "mixtral-bf16": ("mixtral", 2, 0, 2, 2, BF16),
    "mixtral-bf16-unfused": ("mixtral", 2, 2, 2, 2, [*BF16, *OFF]),
    "granitemoe-partitioned": ("granitemoe", 2, 3, 2, 2, []),
    "qwen3_moe-recomputed": ("qwen3_moe", 1, 2, 4, 2, LAYERS),
    "qwen3_moe-bf16": ("qwen3_moe", 1, 2, 2, 4, [*BF16, *LAYERS]),
    "jetmoe-accumulated": ("jetmoe", 1, 1, 2, 4, []),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("router")
    small_runs.write_model(folder)  # for the tokenizer
    small_runs.write_records(folder / "data.jsonl", [1, 100, 2, 3, 60, 1, 1, 20])
    for kind, settings in KINDS.items():
        torch.manual_seed(1)
        coefficients = dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef"), COEFFICIENT)
        config = AutoConfig.for_model(kind, **{**SIZES, **HEADS, **coefficients, **settings})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    jobs: dict[str, tuple[int, list[str]]] = {}
    for name, (kind, ranks, stage, micro, accumulation, words) in CASES.items():
        size = f"micro_batch: {micro}, grad_accumulation: {accumulation}, sequence_length: 256"
        jobs[name] = (
            ranks,
            [
                *(f"model.name={folder / kind}", f"zero.stage={stage}", "data.shuffle=false"),
                f"training={{max_steps: 1, {size}, rehearsal: false}}",
                *words,
            ],
        )
    return folder, small_runs.launch(folder, "gradient_ranks", jobs)


@small_runs.once
class Reference:
    """The mean over all label tokens, and the mean over micro-batches of what transformers computes for the router."""

    def __init__(self, path: Path, rows: list[dict[str, list[int]]], micro_batch: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        total, labels = torch.zeros(()), 0
        for row in rows:
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
            targets = torch.tensor([*row["labels"][1:], -100])
            total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            labels += int((targets != -100).sum())
        (total / labels).backward(retain_graph=True)
        self.without = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        router = torch.zeros(())
        starts = range(0, len(rows), micro_batch)
        for start in starts:
            batch = rows[start : start + micro_batch]
            longest = max(len(row["input_ids"]) for row in batch)
            ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
            mask = torch.tensor([[int(place < len(row["input_ids"])) for place in range(longest)] for row in batch])
            router = router + model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
        loss = total / labels + COEFFICIENT * router / len(starts)
        model.zero_grad()
        loss.backward()
        self.loss = float(loss.detach())
        self.grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference of the gradient of a router's weight, or of another one."""
    assert one.keys() == other.keys()
    largest = max(float(grad.norm()) for grad in other.values())
    return max(
        float((one[name].double() - grad).norm() / grad.norm())
        for name, grad in other.items()
        if float(grad.norm()) > 1e-6 * largest
    )


@pytest.mark.parametrize("name", CASES)
def test_the_router_s_loss_is_added_to_the_mean_over_label_tokens(launched, name):
    folder, texts = launched
    kind, _, _, micro, _, words = CASES[name]
    saved = torch.load(folder / f"{name}.pt")
    reference = Reference(folder / kind, saved["rows"], micro)
    half = "training.precision=bf16" in words
    assert distance(reference.without, reference.grads) > 0.3
    assert distance(saved["grads"], reference.grads) < (0.15 if half else 1e-4)
    loss = float(texts[name].split("step 1/1  loss ")[1].split()[0])
    assert loss == pytest.approx(reference.loss, abs=0.02 if half else 2e-4)
    assert ("logits are computed at full size" in texts[name]) is False
