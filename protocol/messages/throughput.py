"""Utilisation of GPUs by a training: FLOPs of a model, peaks of GPUs, and MFU (model FLOPs utilisation).

**Definition.** MFU is the rate of a model's FLOPs divided by the data-sheet peak of the device for the data type of its
matrix products. A model's FLOPs are those that its training needs, not all that the program executes: recomputed
activations (gradient checkpointing), padding and an optimizer's arithmetic do not count.

- Matrix products: 6 FLOPs for each parameter and token, 2 in the forward and 4 in the backward pass (2 for the gradient
  of the input, 2 for the gradient of the weight). A frozen parameter has no gradient of its own: 4, or 2 if nothing
  below it is trained. Adapters count as parameters. Input embeddings are looked up, not multiplied: they do not count
  unless they are also the output layer's weights. In a mixture of experts, only the experts that a token uses count.
- Attention: 12 FLOPs for each layer, pair of query and key, head and element of a head (4 in the forward, 8 in the
  backward pass). A causal mask admits n(n+1)/2 pairs in a document of n tokens; pairs across packed documents do not
  count.

Source of both terms: Chowdhery et al., PaLM (2022), appendix B, which does not halve attention for the causal mask; the
halving is that of FlashAttention-2 (Dao, 2023).
"""

import math
from typing import Literal

import msgspec

from ..host.machine import find_gpu

Precision = Literal["bf16", "fp16", "tf32", "fp32"]


class ModelFlops(msgspec.Struct, frozen=True, omit_defaults=True):
    """Coefficients of the FLOPs of one training step of a model, forward and backward."""

    token: float
    """FLOPs per token: matrix products with parameters."""
    pair: float = 0.0
    """FLOPs per pair of query and key, summed over the layers with full causal attention."""
    windowed_pair: float = 0.0
    """The same for the layers that attend to a sliding window."""
    window: int = 0
    """Tokens of that window; 0: none."""

    def of(self, tokens: int, pairs: int, longest: int = 0) -> float:
        """Return the FLOPs of a step of ``tokens``, without padding, and ``pairs`` (``causal_pairs``).

        If ``longest``, the tokens of the longest document, exceeds the window, windowed layers count fewer pairs.
        """
        shrink = min(1.0, self.window / longest * (2 - self.window / longest)) if 0 < self.window < longest else 1.0
        return self.token * tokens + (self.pair + self.windowed_pair * shrink) * pairs


def causal_pairs(lengths: "list[int] | tuple[int, ...]") -> int:
    """Return the number of causal pairs of query and key in documents of these lengths in tokens."""
    return sum(length * (length + 1) // 2 for length in lengths)


def causal_pairs_of_rows(tokens: int, rows: int) -> int:
    """Estimate the causal pairs of ``tokens`` tokens in ``rows`` equal rows, if document lengths are unknown."""
    if rows <= 0:
        return 0
    length = tokens / rows
    return round(rows * length * (length + 1) / 2)


def peak_flops(device: str, precision: str) -> float | None:
    """Return a device's data-sheet peak in FLOP/s for matrix products in ``precision``; named as by PyTorch or NVML.

    None for a CPU, a GPU that is not in the table (such as a MIG slice), or an unsupported data type.
    """
    gpu = find_gpu(device)
    return None if gpu is None else gpu.peak_flops(precision)


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return ``flops / seconds`` as a share of ``peak`` FLOP/s; None if one of them is unknown."""
    if not peak or flops <= 0 or seconds <= 0:
        return None
    share = flops / seconds / peak
    return share if math.isfinite(share) else None


def perplexity(loss: float) -> float | None:
    """Return e to the power of ``loss``; None if that overflows."""
    return math.exp(loss) if loss < 700 else None
