"""Configuration of DeepSpeed ZeRO."""

from typing import Annotated, Literal

import msgspec

from ..config.fields import MOST_WHOLE, Section


class Zero(Section, frozen=True):
    """DeepSpeed ZeRO."""

    stage: Literal[0, 1, 2, 3] = 2
    """What is partitioned over ranks: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer's states in host memory and step there (stages 1 to 3)."""
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=MOST_WHOLE)] = 200_000_000
    """Size of the buckets that gradients are reduced and parameters gathered in."""
    offload_parameters: bool = False
    """Keep the parameters in host memory between their uses (stage 3)."""
    overlap: bool = True
    """Overlap gradient reduction with the backward pass (GPUs)."""
    grad_accum_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Data type that gradients are accumulated in over micro-steps. auto: fp32, and at stage 0, where DeepSpeed has no
    other, the training precision."""
    communication_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Data type that gradients are reduced in over ranks; auto: fp32. The training precision halves the traffic and
    rounds each sum."""
