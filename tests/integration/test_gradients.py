"""A step's gradients are those of the mean over its label tokens, however the batch is divided."""

import re
from pathlib import Path
from typing import Any

import pytest
import small_runs

pytest.importorskip("deepspeed")

import torch
from transformers import AutoModelForCausalLM

# Dozens of small trainings, one after the other: a minute on two free cores.
pytestmark = pytest.mark.timeout(1800)

ROWS = 8
# For each number of ranks: (ZeRO stage, micro-batch, accumulation); a step always takes the eight rows.
DIVISIONS: dict[int, list[tuple[int, int, int]]] = {
    1: [(0, 8, 1), (0, 1, 8), (1, 4, 2), (2, 2, 4), (3, 2, 4)],
    2: [(0, 2, 2), (1, 4, 1), (2, 1, 4), (3, 2, 2), (3, 4, 1)],
}
CASES = [(ranks, *case) for ranks, cases in DIVISIONS.items() for case in cases]


def name_of(ranks: int, stage: int, micro: int, accumulation: int) -> str:
    return f"ranks-{ranks}-stage-{stage}-micro-{micro}-accumulation-{accumulation}"


# Half precision: what gradients are accumulated and reduced in. The rows are those above.
BF16: dict[str, tuple[int, int, int, int]] = {
    "bf16-stage-0": (2, 0, 2, 2), "bf16-stage-1": (2, 1, 2, 2), "bf16-stage-2": (2, 2, 2, 2),
    "bf16-stage-3": (2, 3, 2, 2), "bf16-throughout-stage-1": (2, 1, 2, 2), "bf16-throughout-stage-2": (2, 2, 2, 2),
    "bf16-throughout-stage-3": (2, 3, 2, 2),
}  # fmt: skip
EXTRA = {
    name: ["training.precision=bf16"]
    + (["zero.grad_accum_dtype=bf16", "zero.communication_dtype=bf16"] if "throughout" in name else [])
    for name in BF16
} | {name_of(1, 0, 1, 8): ["model.fused_loss=off"], name_of(2, 3, 2, 2): ["model.fused_loss=off"]}

# What is recomputed and offloaded changes no gradient: some of the divisions above do it, and pairs of LoRA runs with
# dropout that differ in nothing else.
LAYERS = "model.gradient_checkpointing=layers"
SELECTIVE = "model.gradient_checkpointing=selective"
OFFLOAD = ["model.activation_offload=all", "model.offload_bytes=0"]
ACTIVATIONS = {
    name_of(1, 3, 2, 4): [LAYERS],
    name_of(2, 0, 2, 2): [SELECTIVE, *OFFLOAD],
    name_of(2, 1, 4, 1): ["model.gradient_checkpointing=true", "model.checkpoint_every=2"],
    name_of(2, 2, 1, 4): [LAYERS, "model.activation_offload=inputs"],
    name_of(2, 3, 2, 2): OFFLOAD,
    name_of(2, 3, 4, 1): [SELECTIVE, *OFFLOAD],
}
SETTINGS = {name: EXTRA.get(name, []) + ACTIVATIONS.get(name, []) for name in (EXTRA | ACTIVATIONS)}
ADAPTERS = "lora={rank: 4, targets: [q_proj, v_proj, down_proj]}"
WITH_LORA = [ADAPTERS, "lora.dropout=0.5"]
LORA: dict[str, tuple[tuple[int, int, int, int], list[str]]] = {
    "lora-stage-2": ((2, 2, 2, 2), WITH_LORA),
    "lora-stage-2-layers": ((2, 2, 2, 2), [*WITH_LORA, LAYERS, "model.activation_offload=inputs"]),
    "lora-stage-2-selective": ((2, 2, 2, 2), [*WITH_LORA, SELECTIVE, *OFFLOAD]),
    "lora-stage-3": ((2, 3, 2, 2), WITH_LORA),
    "lora-stage-3-layers": ((2, 3, 2, 2), [*WITH_LORA, LAYERS]),
    "lora-stage-3-selective": ((2, 3, 2, 2), [*WITH_LORA, SELECTIVE]),
}

# Compiled layers whose parameters are partitioned; without a threshold of 0 those of so small a model are not.
PARTITIONED = ["data.packing=true", "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"]
COMPILED: dict[str, tuple[tuple[int, int, int, int], list[str]]] = {
    "packed-ranks": ((2, 2, 1, 1), ["data.packing=true"]),
    "packed-ranks-compiled": (
        (2, 3, 1, 1),
        [*PARTITIONED, "model.compile=layers", "model.activation_memory_budget=0.5"],
    ),
    "packed-lora": ((2, 3, 1, 1), [*PARTITIONED, ADAPTERS]),
    "packed-lora-compiled": ((2, 3, 1, 1), [*PARTITIONED, ADAPTERS, "model.compile=layers", LAYERS]),
}

# Ranks that share sequences. A name that begins with "packed" is compared with "packed-whole", one with "lora" with
# "lora-whole", and the others with plain PyTorch. The model's two key/value heads are fewer than four ranks.
WHOLE: dict[str, tuple[tuple[int, int, int, int], list[str]]] = {
    "packed-whole": ((1, 2, 1, 1), ["data.packing=true", "training.sequence_length=255"]),
    "lora-whole": ((1, 2, 8, 1), ["lora={rank: 4, kind: dora}"]),
}
SLICED: dict[str, tuple[int, tuple[int, int, int, int], list[str]]] = {
    "sliced-2-of-2-stage-0": (2, (2, 0, 8, 1), [LAYERS]),
    "sliced-2-of-2-stage-2": (2, (2, 2, 2, 4), [SELECTIVE, *OFFLOAD]),
    "sliced-2-of-2-stage-3": (2, (2, 3, 4, 2), ["model.fused_loss=off"]),
    "sliced-2-of-4-stage-0": (2, (4, 0, 2, 2), ["model.fused_loss=off"]),
    "sliced-2-of-4-stage-2": (2, (4, 2, 4, 1), [LAYERS, "model.activation_offload=inputs"]),
    "sliced-2-of-4-stage-3": (2, (4, 3, 1, 4), [LAYERS]),
    "sliced-4-of-4-stage-1": (4, (4, 1, 8, 1), []),
    "sliced-bf16": (2, (2, 2, 8, 1), ["training.precision=bf16"]),
    "packed-2-of-2-stage-0": (2, (2, 0, 1, 1), ["data.packing=true", "training.sequence_length=255"]),
    "packed-2-of-2-stage-3": (2, (2, 3, 1, 1), ["data.packing=true", "training.sequence_length=255", SELECTIVE]),
    "packed-4-of-4-stage-2": (4, (4, 2, 1, 1), ["data.packing=true", "training.sequence_length=255"]),
    "lora-2-of-2-stage-2": (2, (2, 2, 8, 1), ["lora={rank: 4, kind: dora}", LAYERS]),
}


def sharing(size: int) -> list[str]:
    return [f"training.sequence_parallel_size={size}"]


def token_losses(model: Any, row: dict[str, list[int]]) -> list[torch.Tensor]:
    """Return the cross entropy of each label of one row: no padding, no batch, one token after the other."""
    logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
    return [
        -torch.log_softmax(logits[place - 1].double(), dim=-1)[label]
        for place, label in enumerate(row["labels"])
        if place and label != -100
    ]


class Reference:
    """The gradients and the loss of plain PyTorch in one process."""

    def __init__(self, folder: Path, rows: list[dict[str, list[int]]]) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
        losses = [token_losses(model, row) for row in rows]
        self.labels = sum(map(len, losses))
        self.tokens = sum(len(row["input_ids"]) for row in rows)
        loss = torch.stack([loss for row in losses for loss in row]).sum() / self.labels
        loss.backward(retain_graph=True)
        self.loss = float(loss.detach())
        self.grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        torch.stack([torch.stack(row).mean() for row in losses]).mean().backward()
        self.mean_of_means = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class Launched:
    """What each case printed, and its gradients."""

    def __init__(self, folder: Path) -> None:
        small_runs.write_model(folder)
        small_runs.write_records(folder / "data.jsonl", [1, 100, 2, 3, 60, 1, 1, 20])
        others = LORA | COMPILED | WHOLE
        others |= {name: (case, [*words, *sharing(size)]) for name, (size, case, words) in SLICED.items()}
        cases = {
            **{name_of(*case): case for case in CASES},
            **BF16,
            **{name: case for name, (case, _) in others.items()},
        }
        settings = SETTINGS | {name: words for name, (_, words) in others.items()}
        jobs: dict[str, tuple[int, list[str]]] = {}
        for name, (ranks, stage, micro, accumulation) in cases.items():
            size = f"micro_batch: {micro}, grad_accumulation: {accumulation}, sequence_length: 256"
            words = [f"zero.stage={stage}", f"training={{max_steps: 1, {size}, rehearsal: false}}"]
            jobs[name] = ranks, [*words, *settings.get(name, [])]
        self.text = small_runs.launch(folder, "gradient_ranks", jobs)
        self.saved = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
        self.reference = Reference(folder, self.saved[name_of(*CASES[0])]["rows"])


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(tmp_path_factory.mktemp("gradients"))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(
        float((one[name].double() - other[name].double()).norm() / other[name].double().norm()) for name in other
    )


def test_the_rows_tell_means_apart_and_without_partitioning_bf16_gradients_are_reduced_in_fp32(launched):
    assert distance(launched.reference.mean_of_means, launched.reference.grads) > 0.1
    assert launched.saved["bf16-stage-0"]["reduced"] == [torch.float32]


@pytest.mark.parametrize("case", CASES, ids=[name_of(*case) for case in CASES])
def test_gradients_and_figures_equal_plain_pytorch(launched, case):
    reference = launched.reference
    assert distance(launched.saved[name_of(*case)]["grads"], reference.grads) < 1e-6
    text = launched.text[name_of(*case)]
    (loss,) = re.findall(r"^step 1/1  loss (\S+)", text, re.MULTILINE)
    assert float(loss) == pytest.approx(reference.loss, abs=6e-5)
    assert f"finished: 1 steps, {reference.tokens:,} tokens" in text


def representable_in_bf16(grads: dict[str, torch.Tensor]) -> float:
    """Return the share of the elements other than 0 that lose nothing in bf16."""
    values = torch.cat([grad.flatten() for grad in grads.values()])
    values = values[values != 0]
    return float((values == values.bfloat16().float()).float().mean())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_gradients_are_accumulated_and_reduced_in_fp32_unless_bf16_is_asked_for(launched, stage):
    fp32, bf16 = launched.saved[f"bf16-stage-{stage}"], launched.saved[f"bf16-throughout-stage-{stage}"]
    assert fp32["reduced"] == [torch.float32]
    assert bf16["reduced"] == [torch.bfloat16]
    assert representable_in_bf16(fp32["grads"]) < 0.2
    assert representable_in_bf16(bf16["grads"]) > 0.95


@pytest.mark.parametrize("name", BF16)
def test_bf16_gradients_are_near_those_of_fp32(launched, name):
    assert distance(launched.saved[name]["grads"], launched.reference.grads) < 0.1


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("mode", ["layers", "selective"])
def test_recomputing_under_adapters_with_dropout_changes_no_gradient(launched, stage, mode):
    grads, others = (launched.saved[name]["grads"] for name in (f"lora-stage-{stage}", f"lora-stage-{stage}-{mode}"))
    assert [name for name in grads if grads[name].any()]
    assert all("lora_" in name for name in grads)
    assert not [name for name in grads if not torch.equal(grads[name], others[name])]


@pytest.mark.parametrize("name", ["packed-ranks", "packed-lora"])
def test_compiled_layers_of_partitioned_parameters_give_the_same_gradients(launched, name):
    # The first gradients of an adapter's A are 0, as its B is.
    grads, compiled = (
        {key: grad for key, grad in launched.saved[one]["grads"].items() if grad.any()}
        for one in (name, f"{name}-compiled")
    )
    assert len(grads) > 4
    assert distance(compiled, grads) < 1e-6
    text, plain = launched.text[f"{name}-compiled"], launched.text[name]
    assert text.index("compiling decoder layers") < text.index("compiled decoder layers") < text.index("step 1/1")
    losses = [re.findall(r"^step 1/1  loss (\S+)", one, re.MULTILINE) for one in (plain, text)]
    assert losses[0] == losses[1] != []


@pytest.mark.parametrize("name", SLICED)
def test_ranks_that_share_sequences_give_the_gradients_and_the_loss_of_whole_ones(launched, name):
    whole = {"packed": "packed-whole", "lora": "lora-whole"}.get(name.partition("-")[0])
    expected = launched.saved[whole]["grads"] if whole else launched.reference.grads
    learned = {name: grad for name, grad in expected.items() if grad.any()}
    found = launched.saved[name]["grads"]
    assert found.keys() == expected.keys()
    assert distance({name: found[name] for name in learned}, learned) < (
        0.1 if "bf16" in name else 1e-6 if whole != "lora-whole" else 2e-6
    )
    assert not any(found[name].any() for name in expected.keys() - learned.keys())
    text, other = launched.text[name], launched.text[whole or name_of(*CASES[0])]
    figures = [
        re.findall(r"^step 1/1  loss (\S+)|^finished: 1 steps, (\S+) tokens", one, re.M) for one in (text, other)
    ]
    assert len(figures[0]) == 2
    assert "bf16" in name or figures[0] == figures[1]
    assert f"{SLICED[name][0]} share each sequence" in text
