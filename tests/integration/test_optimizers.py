"""Optimizers in real runs on CPU ranks: what they hold, and that an update is what a slow reference computes."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import rank_jobs
import small_runs
import torch
from transformers import AutoModelForCausalLM

STEPS = 3
SAME = [
    f"training={{max_steps: {STEPS}, sequence_length: 256, micro_batch: 2, grad_accumulation: 2}}",
    "schedule.kind=constant",
    "optimizer={lr: 1e-3, weight_decay: 0.1, beta2: 0.95, muon_lr: 0.02, max_grad_norm: 0}",
]
BF16 = "training.precision=bf16"
PURE = [BF16, "optimizer.master_weights=none"]
HELD: dict[str, tuple[list[str], Any, set[Any], float]] = {
    # What is stepped, the states' data types, and their bytes an element.
    "pure-0": (["zero.stage=0", *PURE, "optimizer.kind=adamw_bf16"], torch.bfloat16, {torch.bfloat16}, 4),
    "pure-1": (
        ["zero.stage=1", *PURE, "optimizer.kind=adamw_8bit"],
        torch.bfloat16,
        {torch.uint8, torch.float32},
        2 + 8 / 256,
    ),
    "pure-3": (["zero.stage=3", *PURE, "optimizer.kind=adamw_bf16"], torch.bfloat16, {torch.bfloat16}, 4),
    "states-0": (["zero.stage=0", BF16, "optimizer.kind=adamw_bf16"], torch.float32, {torch.bfloat16}, 4),
    "states-2": (
        ["zero.stage=2", BF16, "optimizer.kind=adamw_8bit"],
        torch.float32,
        {torch.uint8, torch.float32},
        2 + 8 / 256,
    ),
}
CLIP = 0.05
ALONE = SAME[0].replace("accumulation: 2", "accumulation: 4")
HALF = [BF16, f"optimizer.max_grad_norm={CLIP}"]
HALVES: dict[str, tuple[int, list[str]]] = {
    "half-0": (2, ["zero.stage=0", *HALF]),
    "half-0-fused": (2, ["zero.stage=0", *HALF, "optimizer.kind=torch_fused"]),
    "half-2-fused": (2, ["zero.stage=2", *HALF, "optimizer.kind=torch_fused"]),
    "half-1-summed": (2, ["zero={stage: 1, grad_accum_dtype: bf16}", *HALF, "optimizer.kind=torch_fused"]),
    "half-2-alone": (1, [ALONE, "zero.stage=2", *HALF, "optimizer.kind=torch_fused"]),
    "half-0-muon": (2, ["zero.stage=0", *HALF, "optimizer.kind=muon"]),
}
# Runs of two steps, and their third with other settings of the optimizer.
OTHERS = "optimizer={weight_decay: 20.0, beta1: 0.5, beta2: 0.8, eps: 1e-4, max_grad_norm: 0.05}"
WRITTEN = {
    **{str(stage): [f"zero.stage={stage}"] for stage in range(4)},
    "half": ["zero.stage=0", BF16, "optimizer.kind=torch_fused"],
}
RESUMED: dict[str, tuple[str, int, list[str]]] = {name: (name, 2, words) for name, words in WRITTEN.items()} | {
    "2-fewer": ("2", 1, [ALONE, *WRITTEN["2"]]),
    "3-fewer": ("3", 1, [ALONE, *WRITTEN["3"]]),
    "half-fewer": ("half", 1, [ALONE, *WRITTEN["half"]]),
    "1-as-2": ("1", 2, WRITTEN["2"]),
    "half-as-2": ("half", 2, [*WRITTEN["half"], "zero.stage=2"]),
}
MUON = {f"muon-{stage}": [f"zero.stage={stage}", "optimizer.kind=muon"] for stage in range(4)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("optimizers")
    small_runs.write_model(folder, num_hidden_layers=1)
    small_runs.write_records(folder / "data.jsonl", [1, 100, 2, 3, 60, 1, 1, 20])
    jobs = {name: (2, [*SAME, *words]) for name, (words, *_) in HELD.items()}
    jobs |= {name: (2, [*SAME, *words]) for name, words in MUON.items()}
    jobs |= {name: (ranks, [*SAME, *words]) for name, (ranks, words) in HALVES.items()}
    for name, words in WRITTEN.items():
        saving = ["training.max_steps=2", "checkpoint={every: 2, background: false}", "output.overwrite=true"]
        jobs[f"written-{name}"] = (2, [*SAME, *words, *saving])
    for name, (written, ranks, words) in RESUMED.items():
        there = folder / "out" / f"written-{written}" / "checkpoints" / "step-2"
        there.mkdir(parents=True, exist_ok=True)  # it must exist when configurations are checked
        jobs[f"resumed-{name}"] = (ranks, [*SAME, *words, OTHERS, f"checkpoint.resume={there}"])
    jobs |= {"muon-one": (1, [*SAME, ALONE, *MUON["muon-2"]])}
    return folder, small_runs.launch(folder, "optimizer_ranks", jobs)


@pytest.fixture(scope="module")
def wanted(runs: Any) -> dict[str, torch.Tensor]:
    return reference(runs[0], saved(runs[0], "muon-0")["rows"])


def saved(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize("name", list(HELD))
def test_what_is_held_has_the_data_types_and_bytes_that_were_asked_for(runs: Any, name: str) -> None:
    _, parameters, states, each = HELD[name]
    held = saved(runs[0], name)["holds"]
    assert held["parameters"] == {parameters}
    assert held["states"] == states
    # Flat partitions end in padding, and a last block may be a part of one.
    assert held["state_bytes"] == pytest.approx(each, rel=0.02)


def test_ranks_and_stages_do_not_change_where_training_goes(runs: Any) -> None:
    start = AutoModelForCausalLM.from_pretrained(runs[0] / "base").state_dict()
    pure, kept = saved(runs[0], "pure-0")["weights"], saved(runs[0], "pure-3")["weights"]
    name = "model.layers.0.mlp.up_proj.weight"
    assert pure[name].dtype == kept[name].dtype == torch.bfloat16
    for other in ("pure-3", "states-0", "states-2"):
        weights = saved(runs[0], other)["weights"]
        moved, theirs = pure[name].float() - start[name], weights[name].float() - start[name]
        assert cosine(moved, theirs) > 0.9, other


@pytest.mark.parametrize("name", [*MUON, "muon-one"])
def test_muon_moves_weights_as_a_slow_reference_does(runs: Any, wanted: Any, name: str) -> None:
    result = saved(runs[0], name)
    start = AutoModelForCausalLM.from_pretrained(runs[0] / "base").state_dict()
    for key, weight in result["weights"].items():
        moved, should = weight.float() - start[key], wanted[key] - start[key]
        assert cosine(moved, should) > 0.98, key
        assert float(moved.norm()) == pytest.approx(float(should.norm()), rel=0.02), key


@pytest.mark.parametrize("name", ["muon-1", "muon-2", "muon-3", "muon-one"])
def test_muon_does_the_same_at_every_stage(runs: Any, name: str) -> None:
    start = AutoModelForCausalLM.from_pretrained(runs[0] / "base").state_dict()
    alone, weights = saved(runs[0], "muon-0")["weights"], saved(runs[0], name)["weights"]
    for key, weight in weights.items():
        assert (weight - alone[key]).norm() < 0.02 * (alone[key] - start[key]).norm(), key


@pytest.mark.parametrize("name", [name for name in HALVES if "muon" not in name])
def test_in_bf16_every_update_from_the_first_is_that_of_fp32_masters(runs: Any, name: str) -> None:
    result = saved(runs[0], name)
    start = AutoModelForCausalLM.from_pretrained(runs[0] / "base", dtype=torch.bfloat16).state_dict()
    should = masters(runs[0], result["rows"])
    for key, weight in result["weights"].items():
        if weight.dim() < 2:  # bf16 rounds these ones more coarsely than they move
            assert (weight.float() - should[key]).abs().max() < 2**-7, key
            continue
        moved, wanted = weight.float() - start[key].float(), should[key] - start[key].float()
        assert cosine(moved, wanted) > 0.97, key
        assert float(moved.norm()) == pytest.approx(float(wanted.norm()), rel=0.03), key
    noted = f"zero.stage is {name[5]}, DeepSpeed runs its stage 1" in runs[1][name]
    assert noted is (name[5] == "0" or name.endswith("alone"))
    assert "Max_MA" not in runs[1][name]
    waits = result["waits"]
    assert len(waits) > 4
    assert waits[-1] == waits[0], "DeepSpeed waits for the device in each micro-step"


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_its_own_settings_of_the_optimizer(runs: Any, name: str) -> None:
    result, half = saved(runs[0], f"resumed-{name}"), "half" in name
    start = AutoModelForCausalLM.from_pretrained(runs[0] / "base", dtype=torch.bfloat16 if half else None).state_dict()
    wanted = resumed(runs[0], result["rows"], half)
    for key, weight in result["weights"].items():
        moved, should = weight.float() - start[key].float(), wanted[key] - start[key].float()
        # bf16 rounds norms, near 1, more coarsely than they move; with their decay they would move by 0.02.
        limit = 2**-7 * weight.numel() ** 0.5 if half and weight.dim() < 2 else (0.2 if half else 1e-4) * should.norm()
        assert float((moved - should).norm()) < limit, key


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first.flatten().double(), second.flatten().double(), dim=0))


def reference(folder: Path, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Train with all rows in each step: Muon as its author's post writes it, AdamW as its paper does."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base").double()
    momenta: dict[str, torch.Tensor] = {}
    squares: dict[str, torch.Tensor] = {}
    for step in range(1, STEPS + 1):
        model.zero_grad()
        total, labels = torch.zeros((), dtype=torch.float64), 0
        for row in rows:
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
            targets = torch.tensor([*row["labels"][1:], -100])
            total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            labels += int((targets != -100).sum())
        (total / labels).backward()
        for name, weight in model.named_parameters():
            gradient = weight.grad
            momentum = momenta.setdefault(name, torch.zeros_like(gradient))
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                momentum += 0.05 * (gradient - momentum)
                update = (
                    newton_schulz(0.05 * gradient + 0.95 * momentum) * max(1, weight.shape[0] / weight.shape[1]) ** 0.5
                )
                rate = 0.02
            else:
                square = squares.setdefault(name, torch.zeros_like(gradient))
                momentum += 0.1 * (gradient - momentum)
                square += 0.05 * (gradient**2 - square)
                update = momentum / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
                rate = 1e-3
            with torch.no_grad():
                weight *= 1 - rate * (0.1 if weight.dim() == 2 else 0.0)
                weight -= rate * update
    return {name: tensor.detach().float() for name, tensor in model.state_dict().items()}


@small_runs.once
def masters(folder: Path, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Train with all rows in each step: gradients of bf16 weights, clipped, into AdamW on fp32 copies of them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    names = dict(model.named_parameters())
    weights = {name: weight.detach().float() for name, weight in names.items()}
    means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(1, STEPS + 1):
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        labels = 0
        for row in rows:
            model.zero_grad()
            targets = torch.tensor([*row["labels"][1:], -100])
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].float()
            torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").backward()
            labels += int((targets != -100).sum())
            for name, weight in names.items():
                sums[name] += weight.grad.float()
        gradients = {name: total / labels for name, total in sums.items()}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        assert norm > CLIP
        for name, weight in weights.items():
            gradient = gradients[name] * CLIP / norm
            means[name] += 0.1 * (gradient - means[name])
            squares[name] += 0.05 * (gradient**2 - squares[name])
            weight *= 1 - 1e-3 * (0.1 if weight.dim() == 2 else 0.0)
            mean, square = means[name] / (1 - 0.9**step), squares[name] / (1 - 0.95**step)
            weight -= 1e-3 * mean / (square.sqrt() + 1e-8)
            names[name].data.copy_(weight)
    return weights


@small_runs.once
def resumed(folder: Path, rows: list[dict[str, list[int]]], half: bool) -> dict[str, torch.Tensor]:
    """Train with all rows in each step with PyTorch's AdamW, which has the other settings in its third step.

    ``half``: gradients are those of bf16 weights.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16 if half else None)
    weights = list(model.parameters())
    held = [torch.nn.Parameter(weight.detach().clone().float()) for weight in weights]
    matrices, rest = ([one for one in held if (one.dim() < 2) is flat] for flat in (False, True))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(3):
        model.zero_grad()
        for one in held:
            one.grad = torch.zeros_like(one)
        labels = 0
        for row in rows:
            model.zero_grad()
            targets = torch.tensor([*row["labels"][1:], -100])
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].float()
            torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").backward()
            labels += int((targets != -100).sum())
            for one, weight in zip(held, weights, strict=True):
                one.grad += weight.grad
        for one in held:
            one.grad = one.grad / labels  # type: ignore[operator]
        if step == 2:
            torch.nn.utils.clip_grad_norm_(held, 0.05)
            for group in optimizer.param_groups:
                decay = 20.0 if group["weight_decay"] else 0.0
                group.update(betas=(0.5, 0.8), eps=1e-4, weight_decay=decay)
        optimizer.step()
        for one, weight in zip(held, weights, strict=True):
            weight.data.copy_(one.data)
    names = [name for name, _ in model.named_parameters()]
    return {name: one.detach() for name, one in zip(names, held, strict=True)}


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with its singular values brought near 1, in the bf16 that it is used in."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    found = matrix.bfloat16()
    found = found / found.norm()
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return found.double()


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_summed_in_fp32_also_of_weights_that_some_passes_do_not_use(ranks: int) -> None:
    plan = [{"ranks": ranks, "module": "gradient_sum_ranks", "jobs": []}]
    text = rank_jobs.forked(plan, {**os.environ}, 500)
    (difference,) = re.findall(r"sums differ by at most (\S+) in 16 comparisons", text)
    assert float(difference) < 1e-6
