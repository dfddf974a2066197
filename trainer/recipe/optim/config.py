"""Configuration of the optimizer and the learning rate."""

from typing import Literal

from ..config.fields import AtLeast0, Fraction, Momentum, NotNegative, Positive, Section


class Optimizer(Section, frozen=True):
    """AdamW, or Muon."""

    lr: Positive = 2e-5
    """Peak learning rate."""
    beta1: Momentum = 0.9
    """Decay of the running mean."""
    beta2: Momentum = 0.999
    """Decay of the running square."""
    eps: Positive = 1e-8
    """Added to the root of the running square."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; biases and norms get none."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this norm; 0: not at all."""
    kind: Literal["auto", "deepspeed", "torch", "torch_foreach", "torch_fused", "adamw_bf16", "adamw_8bit", "muon"] = (
        "auto"
    )
    """auto: AdamW: DeepSpeed's CPU Adam with offload, torch_fused on GPUs, torch (one tensor after another) on the CPU.
    torch_foreach is PyTorch's default; its temporaries make a spike in the optimizer step. adamw_bf16 and adamw_8bit
    hold both running averages in 2 bytes or 1, rounded stochastically. muon: Muon for the hidden matrices, AdamW for
    embeddings, output layer, norms and biases."""
    master_weights: Literal["fp32", "none"] = "fp32"
    """What updates are added to in half precision. none: to the bf16 weights themselves, rounded stochastically; with
    adamw_bf16 or adamw_8bit, and training.precision=bf16."""
    muon_lr: Positive = 0.02
    """Peak learning rate of the matrices that Muon updates; the others have `lr`."""
    muon_momentum: Momentum = 0.95
    """Decay of Muon's running mean (Nesterov)."""


class Schedule(Section, frozen=True):
    """The learning rate over time."""

    kind: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: AtLeast0 = 0
    """Steps over which the rate rises linearly from 0 to `optimizer.lr`."""
    final_ratio: Fraction = 0.1
    """What the rate ends at, as a share of `optimizer.lr` (linear and cosine)."""
