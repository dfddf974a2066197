"""Computes the norm of all gradients with few kernels; DeepSpeed does it tensor by tensor."""

from typing import Any

import torch

_aten: Any = torch.ops.aten


def compute_together(optimizer: Any) -> None:
    """Make ZeRO compute its gradients' norms together, in fp64 as before but without copies in fp64.

    DeepSpeed converts each gradient and computes its norm (``get_grad_norm_direct`` of ``stage_1_and_2.py`` and
    ``stage3.py``); the converted gradient of the embeddings can be the largest tensor of an update. Here it receives
    one tensor with the norms of all gradients, which has the same norm.
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
    """Make ZeRO detect inf and NaN in gradients by their norm alone.

    DeepSpeed's stages 1 and 2 check each gradient first, with half a dozen kernels, and then the norm, which is not
    finite if a gradient is not (``stage_1_and_2.py``, ``step``).
    """
    from deepspeed.runtime.zero import stage_1_and_2

    if not isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    # A release without this function does not check the norm: its own check is kept.
    if hasattr(stage_1_and_2, "is_invalid_grad_norm") and getattr(optimizer, "compute_grad_norm", False):
        optimizer.check_overflow = lambda partition_gradients=True: None
