"""Cross entropy of a linear layer's outputs in chunks of tokens, without logits at full size.

The gradients are computed in the forward pass, while a chunk's logits exist, so nothing is recomputed. PyTorch 2.13's
``torch.nn.functional.linear_cross_entropy`` works the same way, but can neither scale nor cap logits, and older
versions lack it. On GPUs a kernel of Triton replaces a chunk's logits by their gradient in place.
"""

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_BYTES = 1 << 28
"""Size of a chunk's logits, in their own type if the kernel works in place, else in fp32, where twice as much is
allocated for a moment."""
TRAINED_CHUNK_BYTES = 1 << 30
"""The same for a trained weight: each chunk adds to the whole weight's gradient, which costs about as much as its
logits if a chunk has as many tokens as the layer has features."""
_MULTIPLE = 128
"""Tokens of a chunk are a multiple of this: matrix products are fastest at such sizes. On a GPU the last chunk gets
rows of zeros up to it: cuBLAS takes 2 to 3 ms to choose and load its kernels for a number it has not seen.
"""
_NOT_COUNTED = -1
"""Target of an added row."""


class GradientSum:
    """Sum in fp32 of a weight's gradients over a step's micro-batches, for operations that add to it themselves.

    They return no gradient of the weight: neither it nor a copy in fp32 is ever allocated. It is the attribute
    ``gradient_sum`` of weights that have one.
    """

    def __init__(self, total: torch.Tensor, written: list[bool], place: int) -> None:
        """Add to ``total``, in the weight's shape; ``written[place]``: whether it has anything of this step."""
        self._total = total
        self._written = written
        self._place = place

    def add_product(self, left: torch.Tensor, right: torch.Tensor, factor: float) -> None:
        """Add a matrix product times ``factor``."""
        _add_product(self._total, left, right, add=self._written[self._place], factor=factor)
        self._written[self._place] = True

    def add_rows(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Add ``rows`` [n, features] to those at ``places`` [n], which may repeat; on a GPU in any order."""
        if not self._written[self._place]:
            self._total.zero_()
            self._written[self._place] = True
        self._total.index_add_(0, places, rows.to(self._total.dtype))


@dataclass(frozen=True)
class LogitTransform:
    """A model's transform of its last linear layer's outputs: ``cap * tanh(scale * x / cap)``."""

    scale: float = 1.0
    cap: float = 0.0
    """0: logits are not capped."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the transformed logits."""
        scaled = logits * self.scale
        return self.cap * torch.tanh(scaled / self.cap) if self.cap else scaled


def chunk_tokens(vocabulary: int, trained: bool, logit_bytes: int = 4) -> int:
    """Return the number of tokens per chunk, for a weight that is ``trained`` or not."""
    size = TRAINED_CHUNK_BYTES if trained else CHUNK_BYTES
    return max(_MULTIPLE, size // (logit_bytes * vocabulary) // _MULTIPLE * _MULTIPLE)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform | None = None,
    chunk: int = 0,
    factor: float | None = None,
) -> torch.Tensor:
    """Return the sum of the cross entropies of ``targets`` [tokens], each of which is counted, in fp32, a scalar.

    ``hidden`` are the inputs of the linear layer, of shape [tokens, features]; ``weight`` is [vocabulary, features],
    ``bias`` [vocabulary] or None. ``chunk``: tokens at a time; 0: ``chunk_tokens``.

    The gradients can be computed once: they are scaled in place. Under ``no_grad`` none are computed. ``factor``, if
    given, is what the loss is multiplied by before its backward: that of the weight is then added to the weight's
    ``GradientSum`` at once, if it has one.
    """
    # ``ctx.needs_input_grad`` does not depend on it, and within ``forward`` it is off.
    with_grad = torch.is_grad_enabled()
    in_place = hidden.is_cuda
    logit_bytes = weight.element_size() if in_place else 4
    size = chunk or chunk_tokens(weight.shape[0], weight.requires_grad and with_grad, logit_bytes)
    after_linear = _in_place if in_place else _after_linear
    total = None if factor is None else getattr(weight, "gradient_sum", None)
    arguments = (targets, transform or LogitTransform(), size, after_linear, with_grad, total, factor)
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, *arguments)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        chunk: int,
        after_linear: Any,
        with_grad: bool,
        total: GradientSum | None,
        factor: float,
    ) -> torch.Tensor:
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        tokens = hidden.shape[0]
        added = -(tokens % chunk) % _MULTIPLE if hidden.is_cuda else 0
        grad_hidden = hidden.new_empty(tokens + added, hidden.shape[1]) if wanted[0] else None
        # Summed over chunks in fp32, independent of the weights' type. The first chunk's is written.
        make = torch.empty_like if tokens else torch.zeros_like
        grad_weight = make(weight, dtype=torch.float32) if wanted[1] and total is None else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, tokens, chunk):
            part, labels = hidden[start : start + chunk], targets[start : start + chunk]
            if added and start + chunk > tokens:
                part = torch.nn.functional.pad(part, (0, 0, 0, added))
                labels = torch.nn.functional.pad(labels, (0, added), value=_NOT_COUNTED)
            logits = torch.nn.functional.linear(part, weight, bias)
            losses, grad = after_linear(logits, labels, transform, any(wanted))
            del logits  # the next chunk's take its place
            loss += losses
            if grad is None:
                continue
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + part.shape[0]])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), part, add=start > 0)
            elif wanted[1] and total is not None:
                total.add_product(grad.t(), part, factor)
            del grad
        ctx.grads = (
            None if grad_hidden is None else grad_hidden[:tokens],
            None if grad_weight is None else grad_weight.to(weight.dtype),
            grad_bias,  # rounded once, in ``backward``; the weight's would take its size in fp32 until then
        )
        ctx.bias_dtype = None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError("the gradients of a fused loss can be taken once")
        grads, ctx.grads = ctx.grads, None
        hidden, weight, bias = (None if grad is None else _scaled(grad, grad_outputs[0]) for grad in grads)
        return hidden, weight, None if bias is None else bias.to(ctx.bias_dtype), *[None] * 7


# PyTorch 2.8 and newer, on CUDA alone.
_HAS_FP32_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, add: bool, factor: float = 1.0
) -> None:
    """Add a matrix product times ``factor`` to a sum in fp32, or write it there."""
    beta = int(add)  # 0: what is there is not read
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=beta, alpha=factor)
    elif left.is_cuda and _HAS_FP32_PRODUCTS:
        # The product is added before it is rounded, and in one pass over the sum.
        torch.addmm(total, left, right, beta=beta, alpha=factor, out_dtype=total.dtype, out=total)
    elif add:
        total.add_(left @ right, alpha=factor)
    else:
        total.copy_(left @ right).mul_(factor)


def _scaled(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply a gradient in place by one number."""
    if grad.is_cuda:
        _scale(grad, factor)
        return grad
    return grad.mul_(factor)


def _after_linear(
    logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform, with_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of a chunk's losses, and its gradient with respect to the linear layer's outputs, in their type.

    ``logits`` have the shape [tokens, vocabulary], ``targets`` [tokens].
    """
    dtype, wanted, scale, cap = logits.dtype, targets[:, None], transform.scale, transform.cap
    slope: torch.Tensor | None = None
    if scale != 1.0 or cap:
        logits = logits.float() * scale
    if cap:
        logits = torch.tanh(logits / cap)
        slope = 1.0 - logits * logits if with_grad else None
        logits *= cap
    highest = logits.amax(-1, keepdim=True).float()
    # In fp32, independent of the logits' type, without an fp32 copy of them.
    exponentials = torch.sub(logits, highest).exp_()
    sums = exponentials.sum(-1, keepdim=True)
    below = logits.gather(1, wanted) - highest - sums.log()
    loss = -below.sum()
    if not with_grad:
        return loss, None
    grad = exponentials if dtype == exponentials.dtype else torch.empty_like(exponentials, dtype=dtype)
    torch.mul(exponentials, scale / sums, out=grad)
    grad.scatter_(1, wanted, (below.expm1() * scale).to(dtype))
    return loss, grad if slope is None else grad.mul_(slope)


def _in_place(
    logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform, with_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do what ``_after_linear`` does by one kernel, which writes the gradient over the logits."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _softmax_gradient(logits, targets, losses, transform.scale, transform.cap, with_grad)
    return losses.sum(), logits if with_grad else None


# Operators, so that a dry run on fake tensors passes them. PyTorch for CPUs comes without Triton.
@torch.library.custom_op("ftmon::softmax_gradient", mutates_args=("logits", "losses"))
def _softmax_gradient(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, scale: float, cap: float, with_grad: bool
) -> None:
    from . import kernels

    kernels.softmax_gradient(logits, targets, losses, scale, cap, with_grad)


@torch.library.custom_op("ftmon::scale", mutates_args=("values",))
def _scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    from . import kernels

    kernels.write(values, values, factor)


@_softmax_gradient.register_fake
@_scale.register_fake
def _(*_: Any) -> None:
    return None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, unlearned: int, total: GradientSum) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.unlearned, ctx.total = unlearned, total
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        ids: torch.Tensor = ctx.saved_tensors[0].flatten()
        rows = grad_outputs[0].flatten(0, -2)
        ctx.total.add_rows(ids, rows.masked_fill((ids == ctx.unlearned)[:, None], 0.0))
        return None, None, None, None


def sum_rows(table: Any) -> None:
    """Make an embedding add the gradients of the rows that it looked up to its weight's ``GradientSum``, if any."""
    if type(table) is not torch.nn.Embedding or not hasattr(table.weight, "gradient_sum"):
        return
    if table.max_norm or table.scale_grad_by_freq:  # its gradients depend on more than the rows
        return
    weight: Any = table.weight
    unlearned = -1 if table.padding_idx is None else table.padding_idx

    def look_up(input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return _Embedding.apply(input, weight, unlearned, weight.gradient_sum)

    table.forward = look_up
