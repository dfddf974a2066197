"""Ranks that compare DeepSpeed's fp32 sums of gradients with those of a plain loop, where passes leave weights out."""

from typing import Any

import deepspeed
import torch
from ftmon.trainer.recipe import engine as recipe_engine
from ftmon.trainer.recipe.distributed import World

USED = [(True, True), (True, False), (False, False), (False, True)]
"""For each step and micro-batch: whether the second layer is used."""


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.first(rows)
        return (self.second(hidden) if both else hidden).float().square().sum()


def work(world: World, _: list[str]) -> None:
    torch.manual_seed(0)
    model = Two()
    settings = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": True, "immediate_grad_update": True},
        "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    recipe_engine.sum_in_place(made.optimizer, on_gpu=False)
    differences: list[float] = []
    for step, used in enumerate(USED):
        expected: dict[str, Any] = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in named(made)}
        for micro, both in enumerate(used):
            for rank in range(world.size):
                seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                rows = torch.randn(4, 8, generator=seed).bfloat16()
                copies = {name: one.detach().clone().requires_grad_() for name, one in named(made)}
                loss = torch.func.functional_call(made.module, copies, (rows, both)) / len(used)
                loss.backward()
                for name, one in copies.items():
                    expected[name] += 0 if one.grad is None else one.grad.float() / world.size
                if rank == world.rank:
                    mine = rows, both
            made.backward(made(*mine))
            if micro == 0:
                made.step()
        sums = {name: one._hp_grad.clone() if hasattr(one, "_hp_grad") else None for name, one in named(made)}
        for name, total in sums.items():
            wanted = expected[name]
            found = torch.zeros_like(wanted) if total is None else total.view(wanted.shape)
            differences.append(float((found - wanted).norm() / max(1.0, float(wanted.norm()))))
        made.step()
    world.log(f"sums differ by at most {max(differences):.2e} in {len(differences)} comparisons")


def named(engine: Any) -> list[tuple[str, Any]]:
    return list(engine.module.named_parameters())
