"""Computes the norm of all gradients, for which DeepSpeed goes tensor by tensor, with few kernels."""

from typing import Any

import torch

_aten: Any = torch.ops.aten


def compute_together(optimizer: Any) -> None:
    """Let ZeRO compute its gradients' norms together, in fp64 as before, and without copies in fp64.

    DeepSpeed converts each gradient and takes its norm (``get_grad_norm_direct`` of ``stage_1_and_2.py`` and
    ``stage3.py``); the converted one of the embeddings can be the largest tensor of an update. It gets one tensor
    here, which holds the norms of all, and so has the same norm.
    """
    of_each = getattr(optimizer, "get_grad_norm_direct", None)
    if of_each is None:  # no ZeRO
        return

    def norm(gradients: Any, params: Any, norm_type: float = 2) -> Any:
        held = [one for one in gradients if not getattr(one, "_zero_padding", False)]
        if norm_type != 2 or not held or any(one.device != held[0].device for one in held):
            return of_each(gradients, params, norm_type)
        return of_each([torch.stack(_aten._foreach_norm(held, 2, dtype=torch.float64))], params, norm_type)

    optimizer.get_grad_norm_direct = norm


def let_norm_decide(optimizer: Any) -> None:
    """Let only the gradients' norm decide whether one of them is inf or NaN.

    DeepSpeed's stages 1 and 2 check each gradient first, with half a dozen kernels, and then the norm, which is not
    finite if a gradient is not (``stage_1_and_2.py``, ``step``).
    """
    from deepspeed.runtime.zero import stage_1_and_2

    if not isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    # A release without this function does not check the norm: its own check stays.
    if hasattr(stage_1_and_2, "is_invalid_grad_norm") and getattr(optimizer, "compute_grad_norm", False):
        optimizer.check_overflow = lambda partition_gradients=True: None
