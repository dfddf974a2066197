"""How much of a GPU a training uses: FLOPs of a model, peaks of GPUs, and MFU (model FLOPs utilisation).

**Definition.** MFU is the rate of a model's FLOPs divided by the data-sheet peak of the device for the data type of its
matrix products. A model's FLOPs are those its training needs, whatever the program executes besides: activations that
are computed again (gradient checkpointing), padding and an optimizer's arithmetic do not count.

- Matrix products: 6 FLOPs for each parameter and token, 2 in the forward and 4 in the backward pass (2 for the gradient
  of the input, 2 for the gradient of the weight). A frozen parameter has no gradient of its own: 4, or 2 where nothing
  below it is trained. Adapters count as the parameters they are. Input embeddings are looked up, not multiplied: they
  do not count unless they are the output layer's weights too. Of a mixture of experts, the experts a token uses count.
- Attention: 12 FLOPs for each layer, pair of query and key, head and element of a head (4 in the forward, 8 in the
  backward pass). A causal mask admits n(n+1)/2 pairs in a document of n tokens; pairs across packed documents do not
  count.

Source of both terms: Chowdhery et al., PaLM (2022), appendix B, there without the halving by the causal mask that
FlashAttention-2 (Dao, 2023) counts by, as is done here.
"""

import math
from typing import Literal

import msgspec

from ..host.gpus import find_gpu

Precision = Literal["bf16", "fp16", "tf32", "fp32"]


class ModelFlops(msgspec.Struct, frozen=True, omit_defaults=True):
    """FLOPs of one training step of a model, forward and backward, by what they grow with."""

    token: float
    """FLOPs a token: matrix products with parameters."""
    pair: float = 0.0
    """FLOPs a pair of query and key, summed over the layers that attend to everything before."""
    windowed_pair: float = 0.0
    """The same of the layers that attend to a sliding window."""
    window: int = 0
    """Tokens of that window; 0: there is none."""

    def of(self, tokens: int, pairs: int, longest: int = 0) -> float:
        """Return the FLOPs of a step.

        Args:
            tokens: tokens, without padding.
            pairs: pairs of query and key that the causal mask admits (``causal_pairs``).
            longest: tokens of the longest document; beyond the window, its layers count fewer pairs in proportion.
        """
        shrink = min(1.0, self.window / longest * (2 - self.window / longest)) if 0 < self.window < longest else 1.0
        return self.token * tokens + (self.pair + self.windowed_pair * shrink) * pairs


def causal_pairs(lengths: "list[int] | tuple[int, ...]") -> int:
    """Count the pairs of query and key in documents of these many tokens."""
    return sum(length * (length + 1) // 2 for length in lengths)


def causal_pairs_of_rows(tokens: int, rows: int) -> int:
    """Estimate the pairs of ``tokens`` tokens in ``rows`` rows of equal length: what is known of a foreign script."""
    if rows <= 0:
        return 0
    length = tokens / rows
    return round(rows * length * (length + 1) / 2)


def peak_flops(device: str, precision: str) -> float | None:
    """Return a device's data-sheet peak in FLOP/s.

    Args:
        device: its name, as PyTorch or NVML gives it.
        precision: data type of the matrix products: ``bf16``, ``fp16``, ``tf32`` or ``fp32``.

    Returns:
        None for a CPU, a GPU that is not in the table (a MIG slice is none), or a type that it does not compute in.
    """
    gpu = find_gpu(device)
    return None if gpu is None else gpu.peak_flops(precision)


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return the share of ``peak`` FLOP/s that ``flops`` in ``seconds`` are; None where one of them is not known."""
    if not peak or flops <= 0 or seconds <= 0:
        return None
    share = flops / seconds / peak
    return share if math.isfinite(share) else None


def perplexity(loss: float) -> float | None:
    """Return e to the loss; None where that is no number to show."""
    return math.exp(loss) if loss < 700 else None
