"""Gradient checkpointing and activation offload on a GPU: what the peak is, and that gradients stay the same."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.model import activations
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]
ROWS, LENGTH, HIDDEN, DEPTH = 4, 1024, 512, 8
INPUTS = DEPTH * ROWS * LENGTH * HIDDEN * 2
"""Bytes of all layers' inputs in bf16."""
MODES = {
    "none": [],
    "layers": ["model.gradient_checkpointing=layers"],
    "selective": ["model.gradient_checkpointing=selective"],
    "layers-offload": ["model.gradient_checkpointing=layers", "model.activation_offload=inputs"],
    "offload": ["model.activation_offload=all"],
}


class Measured:
    """Memory and gradients of a second step; the first one warms up kernels and pinned memory."""

    def __init__(self, mode: str, dropout: float) -> None:
        torch.manual_seed(0)
        settings = AutoConfig.for_model(
            "llama", vocab_size=512, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=DEPTH,
            num_attention_heads=8, attention_dropout=dropout,
        )  # fmt: skip
        with torch.device("cuda"):
            model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).train()
        activations.set_up(model, load(None, ["model.config={model_type: llama}", *MODES[mode]]).config)
        ids = torch.randint(0, 512, (ROWS, LENGTH), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(2)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            hidden = model.model(input_ids=ids, use_cache=False)[0]
            torch.cuda.synchronize()
            self.held = torch.cuda.memory_allocated() - before
            """Bytes between forward and backward."""
            hidden.float().square().mean().backward()
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - before
        self.grads = {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_each_mode_holds_less_and_changes_no_gradient(dropout: float) -> None:
    measured = {mode: Measured(mode, dropout) for mode in MODES}
    none = measured["none"]
    for mode, other in measured.items():
        for name, grad in none.grads.items():
            # The backward of fused attention adds in an order of its own.
            torch.testing.assert_close(other.grads[name], grad, rtol=2e-2, atol=1e-6, msg=f"{mode}: {name}")
    held = {mode: one.held for mode, one in measured.items()}
    assert held["layers"] < 2 * INPUTS < held["selective"] < held["none"]
    assert held["layers-offload"] < held["layers"] - INPUTS // 2
    assert held["offload"] < held["none"] / 4
    peaks = {mode: one.peak for mode, one in measured.items()}
    assert peaks["layers"] < peaks["selective"] < peaks["none"]
    assert peaks["offload"] < 0.7 * peaks["none"]
    assert peaks["layers-offload"] < peaks["layers"]
