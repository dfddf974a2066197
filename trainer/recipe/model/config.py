"""Configuration of the model, its adapters and its tokenizer."""

from typing import Annotated, Any, Literal

import msgspec

from ..config.fields import MOST_WHOLE, AtLeast0, AtLeast1, Fraction, Momentum, Positive, Section


class Model(Section, frozen=True):
    """The model to train: one of `name` and `config` is needed."""

    name: str = ""
    """Name on the Hugging Face hub, or a local folder, whose weights are fine-tuned."""
    config: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """A bare configuration for random weights: `model_type` (llama, qwen2, ...) and that type's own sizes."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation; auto lets transformers choose."""
    quantization: Literal["none", "nf4"] = "none"
    """Hold the frozen base in 4 bits (QLoRA: NF4 with double quantization, bitsandbytes); needs `lora.rank` and `name`,
    and ZeRO stage 0 to 2."""
    fused_loss: Literal["auto", "on", "off"] = "auto"
    """Compute the loss in chunks of label tokens, without logits at full size: the same loss with less memory. auto:
    where a check of the model finds it to be the same; on: refuse other models."""
    gradient_checkpointing: Annotated[
        Literal["none", "layers", "selective"], msgspec.Meta(extra={"true": "layers", "false": "none"})
    ] = "none"
    """What the backward pass recomputes of decoder layers. layers: everything from their inputs (about a third more
    time); selective: all but matrix products and attention outputs, which are kept. true is layers, false is none."""
    checkpoint_every: AtLeast1 = 1
    """Recompute every n-th decoder layer, and keep the activations of the others."""
    activation_offload: Literal["none", "inputs", "all"] = "none"
    """Hold saved activations of decoder layers in host memory between forward and backward. inputs: the inputs of
    recomputed layers; all: also what layers that are not recomputed save, above `offload_bytes`."""
    offload_bytes: AtLeast0 = 1_048_576
    """Size from which `activation_offload: all` moves a tensor; smaller ones stay."""
    compile: Literal["off", "layers"] = "off"
    """layers: compile the decoder layers (torch.compile) before the first step; needs `data.packing`."""
    activation_memory_budget: Fraction = 1.0
    """Share of their activations that compiled layers keep; what is cheapest to compute again is left out first. Needs
    `compile: layers`, and no `gradient_checkpointing`."""


class Lora(Section, frozen=True):
    """Low-rank adapters (peft) instead of full fine-tuning, when `rank` is above 0."""

    rank: AtLeast0 = 0
    """Rank of the adapters; 0 trains all weights."""
    kind: Literal["lora", "dora"] = "lora"
    """lora, or dora: the weights' magnitudes are trained too (weight-decomposed; slower)."""
    alpha: Positive = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: Momentum = 0.0
    """Dropout before the adapters."""
    targets: list[str] = msgspec.field(default_factory=list[str])
    """Names of the layers that get adapters, such as [q_proj, v_proj]; empty: all linear layers."""
    merge: bool = True
    """Merge the adapters into the final model, so that it loads without peft."""


class Tokenizer(Section, frozen=True):
    """The tokenizer."""

    name: str = ""
    """Hub name or local folder; empty: the model's own, and with a bare configuration one trained on the data."""
    vocab_size: Annotated[int, msgspec.Meta(ge=300, le=MOST_WHOLE)] = 4096
    """Size of the vocabulary of a tokenizer that is trained on the data."""
