"""Cross entropy of a linear layer's outputs in chunks of tokens, without logits at full size.

The gradients are computed in the forward pass, while a chunk's logits exist, so nothing is recomputed: three matrix
products, as without chunks. PyTorch 2.13 has ``torch.nn.functional.linear_cross_entropy``, which works the same way. It
is not used because it can neither scale nor cap logits, and older versions lack it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

CHUNK_BYTES = 1 << 28
"""Size of a chunk's logits in fp32. Twice as much is allocated for a moment."""
TRAINED_CHUNK_BYTES = 1 << 30
"""The same for a trained weight: each chunk adds to the whole weight's gradient, which costs about as much as its
logits if a chunk has as many tokens as the layer has features."""
_MULTIPLE = 128
"""Tokens of a chunk are a multiple of this: matrix products are fastest at such sizes."""


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


def chunk_tokens(vocabulary: int, trained: bool) -> int:
    """Return the number of tokens per chunk, for a weight that is ``trained`` or not."""
    size = TRAINED_CHUNK_BYTES if trained else CHUNK_BYTES
    return max(_MULTIPLE, size // (4 * vocabulary) // _MULTIPLE * _MULTIPLE)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform | None = None,
    chunk: int = 0,
    compiled: bool = False,
) -> torch.Tensor:
    """Return the sum of the cross entropies of ``targets`` in fp32, a scalar.

    Args:
        hidden: inputs of the linear layer, of shape [tokens, features].
        weight: of shape [vocabulary, features].
        bias: of shape [vocabulary], or None.
        targets: of shape [tokens]; each is counted.
        transform: applied to the layer's outputs.
        chunk: tokens at a time; 0: ``chunk_tokens``.
        compiled: compile the operations after the linear layer into one kernel; the first call is slow.

    The gradients can be computed once: they are scaled in place. Under ``no_grad`` none are computed.
    """
    chosen = transform or LogitTransform()
    # ``ctx.needs_input_grad`` does not depend on it, and within ``forward`` it is off.
    with_grad = torch.is_grad_enabled()
    size = chunk or chunk_tokens(weight.shape[0], weight.requires_grad and with_grad)
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, chosen, size, compiled, with_grad)
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
        compiled: bool,
        with_grad: bool,
    ) -> torch.Tensor:
        after_linear = _compiled() if compiled else _after_linear
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Summed over chunks in fp32, independent of the weights' type.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = hidden[start : start + chunk]
            losses, grad = after_linear(
                torch.nn.functional.linear(part, weight, bias),
                targets[start : start + chunk, None],
                transform.scale,
                transform.cap,
                weight.dtype,
                any(wanted),
            )
            loss += losses
            if grad is None:
                continue
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), part)
                else:
                    grad_weight += grad.t() @ part
        ctx.grads = (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError("the gradients of a fused loss can be taken once")
        grads, ctx.grads = ctx.grads, None
        return (*(None if grad is None else grad.mul_(grad_outputs[0]) for grad in grads), None, None, None, None, None)


def _after_linear(
    logits: torch.Tensor, wanted: torch.Tensor, scale: float, cap: float, dtype: torch.dtype, with_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of a chunk's losses, and its gradient with respect to the linear layer's outputs, in ``dtype``.

    ``logits`` have the shape [tokens, vocabulary], ``wanted`` (targets) [tokens, 1].
    """
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


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    # Dynamic: the last chunk has the remaining tokens.
    return torch.compile(_after_linear, dynamic=True)
