# pyright: basic, reportInvalidTypeForm=false, reportMissingImports=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Kernels in Triton's language, for cross entropy and for sums of gradients: import this on a GPU alone."""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 8  # the fastest of five on an H200, for 128,256 and 151,936 columns
_ELEMENTS = 4096  # of one program that writes


def write(out: torch.Tensor, x: torch.Tensor, factor: torch.Tensor | None = None, add: bool = False) -> None:
    """Write ``x``, times ``factor`` (one number) if given, into ``out``, or ``add`` it; computed in fp32.

    ``out`` and ``x`` are contiguous and of the same size; they may be the same tensor. Where types differ or a factor
    is on the device, PyTorch's kernels take 1.5 to 3.7 times as long, and round the factor to the type of ``x``.
    """
    size = x.numel()
    if size:
        given = (out, x, x if factor is None else factor, size)
        _write_kernel[(triton.cdiv(size, _ELEMENTS),)](*given, factor is not None, add, _ELEMENTS, num_warps=8)


def softmax_gradient(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, scale: float, cap: float, with_grad: bool
) -> None:
    """Write each token's loss into ``losses`` [tokens], and ``with_grad`` its gradient over ``logits``.

    ``logits`` are contiguous, of shape [tokens, vocabulary]; ``targets`` are [tokens].
    """
    tokens, vocabulary = logits.shape
    if tokens:
        given = (logits, targets, losses, vocabulary, scale, cap)
        _softmax_kernel[(tokens,)](*given, CAPPED=cap != 0.0, WITH_GRAD=with_grad, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def _write_kernel(out, x, factor, size, SCALED: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    value = tl.load(x + places, mask=inside).to(tl.float32)
    if SCALED:
        value *= tl.load(factor).to(tl.float32)
    if ADD:
        value += tl.load(out + places, mask=inside).to(tl.float32)
    tl.store(out + places, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _transformed(x, scale, cap, CAPPED: tl.constexpr):  # noqa: N803
    """Return transformed logits in fp32, and the derivative of the transform."""
    x = x.to(tl.float32) * scale
    slope = scale
    if CAPPED:
        bent = 1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0)  # tanh
        x = cap * bent
        slope = scale * (1.0 - bent * bent)
    return x, slope


@triton.jit
def _softmax_kernel(
    logits, targets, losses, vocabulary, scale, cap,
    CAPPED: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One program per token: one pass over its logits for the largest and the sum, one for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        x = tl.load(logits + columns, mask=columns < vocabulary, other=0.0)
        z, _ = _transformed(x, scale, cap, CAPPED)
        z = tl.where(columns < vocabulary, z, -float("inf"))
        above = tl.maximum(highest, tl.max(z, 0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(z - above), 0)
        highest = above
    wanted, _ = _transformed(tl.load(logits + target), scale, cap, CAPPED)
    tl.store(losses + row, highest + tl.log(total) - wanted)
    if WITH_GRAD:
        share = 1.0 / total
        for start in range(0, vocabulary, BLOCK):
            columns = start + lanes
            x = tl.load(logits + columns, mask=columns < vocabulary, other=0.0)
            z, slope = _transformed(x, scale, cap, CAPPED)
            grad = tl.exp(z - highest) * share
            grad = tl.where(columns == target, grad - 1.0, grad) * slope
            tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < vocabulary)
