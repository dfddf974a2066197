"""AdamW with small states on a GPU: one kernel a tensor gives what many give, and holds nothing of the model's size."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.optim import adamw
from ftmon.trainer.recipe.optim.adamw import SmallStateAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use"),
    pytest.mark.usefixtures("compiling"),
]

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "seed": 3}
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_compiled_and_not_take_the_same_steps(states: Any) -> None:
    assert adamw.compiles(DEVICE, states)
    for count in (1 << 20, 1_000_003):
        start = torch.randn(count, device=DEVICE, dtype=torch.bfloat16)
        plain, fast = (torch.nn.Parameter(start.clone()) for _ in range(2))
        optimizers = [SmallStateAdamW([one], states=states, compiled=one is fast, **SETTINGS) for one in (plain, fast)]
        for _ in range(3):
            plain.grad = torch.randn_like(plain)
            fast.grad = plain.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        # The random bits are the same: only last bits of fp32, where a rounding is close, differ.
        assert (plain == fast).float().mean() > 0.999


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_a_step_allocates_states_and_little_else(states: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 29, device=DEVICE, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = SmallStateAdamW([weight], states=states, compiled=True, **SETTINGS)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    held = torch.cuda.memory_allocated() - before
    assert held < weight.numel() * (4 if states == "bf16" else 2.04) + (1 << 24)
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    optimizer.step()
    end.record()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - held < 1 << 30
    print(f"{states}: {begin.elapsed_time(end):.1f} ms for {weight.numel():,} parameters")
