"""Whether AdamW learns with small states: a small language model on the CPU, several seeds, fp32 against the rest.

    python bench/small_states.py --out bench/small_states.json [--steps 400] [--seeds 3]

Every variant starts from the same weights and sees the same batches of a seed. ``plain`` is PyTorch's AdamW in fp32,
the others are the trainer's optimizer: ``states-*`` with fp32 parameters, ``pure-*`` with bf16 parameters and no copy
of them. ``*-nearest`` rounds to nearest instead of stochastically. A low learning rate makes updates small against the
weights, as in fine-tuning. Reported: the mean loss of the last tenth of the steps.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from ftmon.trainer.recipe.optim import adamw
from ftmon.trainer.recipe.optim.adamw import SmallStateAdamW, to_bfloat16
from torch.nn import functional

BYTES = 256
LENGTH = 32
ROWS = 8
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states-bf16": {"states": "bf16"},
    "states-bf16-nearest": {"states": "bf16", "nearest": True},
    "states-8bit": {"states": "8bit"},
    "pure-bf16": {"states": "bf16", "pure": True},
    "pure-bf16-nearest": {"states": "bf16", "pure": True, "nearest": True},
    "pure-8bit": {"states": "8bit", "pure": True},
}


class Model(torch.nn.Module):
    """Predicts a byte from the eight before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(BYTES, 16)
        self.first = torch.nn.Linear(8 * 16, 96)
        self.second = torch.nn.Linear(96, 96)
        self.norm = torch.nn.LayerNorm(96)
        self.last = torch.nn.Linear(96, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        windows = self.embed(text).unfold(1, 8, 1).flatten(2)
        hidden = functional.gelu(self.first(windows))
        return self.last(self.norm(hidden + functional.gelu(self.second(hidden))))


def to_nearest(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    del bits
    return value.to(torch.bfloat16)


def train(text: torch.Tensor, seed: int, steps: int, lr: float, variant: dict[str, Any]) -> float:
    torch.manual_seed(seed)
    model = Model()
    chance = torch.Generator().manual_seed(seed)
    adamw.to_bfloat16 = to_nearest if variant.get("nearest") else to_bfloat16
    if variant.get("pure"):
        model = model.bfloat16()
    betas = (0.9, 0.999)
    parameters = [{"params": list(model.parameters()), "weight_decay": 0.01}]
    if variant:
        optimizer: torch.optim.Optimizer = SmallStateAdamW(
            parameters,
            states=variant["states"],
            lr=lr,
            betas=betas,
            eps=1e-8,
            seed=seed,
        )
    else:
        optimizer = torch.optim.AdamW(parameters, lr=lr, betas=betas)
    losses: list[float] = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH, (ROWS, 1), generator=chance)
        rows = text[starts + torch.arange(LENGTH)]
        # Forward and backward in fp32 for all, so that nothing but the optimizer differs.
        weights = {name: one.float() for name, one in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (rows[:, :-1],))
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return statistics.fmean(losses[-max(1, steps // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    torch.set_num_threads(1)
    text = torch.tensor(list("".join(path.read_text() for path in sorted(root.glob("docs/*.md"))).encode()))
    found: dict[str, list[float]] = {}
    for name in given.variants.split(","):
        found[name] = [train(text, seed, given.steps, given.lr, VARIANTS[name]) for seed in range(given.seeds)]
        print(json.dumps(summary(name, found)), flush=True)
    if given.out:
        results = [summary(name, found) for name in found]
        settings = {"steps": given.steps, "lr": given.lr, "seeds": given.seeds}
        given.out.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")


def summary(name: str, found: dict[str, list[float]]) -> dict[str, Any]:
    losses = found[name]
    result: dict[str, Any] = {"variant": name, "losses": [round(loss, 4) for loss in losses]}
    result["mean"] = round(statistics.fmean(losses), 4)
    result["spread_over_seeds"] = round(statistics.stdev(losses), 4) if len(losses) > 1 else None
    if "plain" in found:
        behind = [loss - plain for loss, plain in zip(losses, found["plain"], strict=True)]
        result["behind_plain"] = round(statistics.fmean(behind), 4)
    return result


if __name__ == "__main__":
    main()
