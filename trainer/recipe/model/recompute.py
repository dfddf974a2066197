"""Gradient checkpointing: the parts of a decoder layer that the backward pass recomputes, and those kept.

``layers`` keeps a layer's inputs. ``selective`` also keeps the outputs of matrix products and attention, which take
most of the time to compute, and recomputes the rest: norms, activations, rotations, residuals.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

_KEPT = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    )
)
"""Operators whose outputs the selective mode keeps."""

Recompute = Callable[..., Any]
"""Calls a function with arguments, and recomputes it in the backward pass."""


_Outputs = dict[Any, deque[Any]]


class _Keep(TorchDispatchMode):
    """Keeps the outputs of chosen operators in ``outputs``, in the order of their calls."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            self._outputs[func].append(tree_map(_with_version, out))
        return out


class _Reuse(TorchDispatchMode):
    """Returns the kept outputs in place of calling the operators.

    PyTorch's own pair of modes (``create_selective_checkpoint_contexts``) refuses a recomputation in which any other
    operator runs more or less often than in the forward; ZeRO-3 gathers differently in the two.
    """

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if not self._outputs[func]:
            raise RuntimeError(f"{func} runs more often in the backward pass than in the forward pass")
        return tree_map(_checked, self._outputs[func].popleft(), is_leaf=lambda one: isinstance(one, _Versioned))


class _Versioned(NamedTuple):
    tensor: torch.Tensor
    version: int


def _with_version(value: Any) -> Any:
    return _Versioned(value.detach(), value._version) if isinstance(value, torch.Tensor) else value


def _checked(value: Any) -> Any:
    if not isinstance(value, _Versioned):
        return value
    if value.tensor._version != value.version:
        raise RuntimeError(
            "an output kept for the backward pass was changed in place; use gradient_checkpointing=layers"
        )
    return value.tensor


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    outputs: _Outputs = defaultdict(deque)
    return _Keep(outputs), _Reuse(outputs)


def _is_kept(operator: Any, arguments: Any, named: Any) -> bool:
    dropout_at = _dropout_argument(operator)
    if dropout_at is None:
        return False
    # An operator that is not run again draws no random numbers: every later dropout would differ.
    return not named.get("dropout_p", arguments[dropout_at] if 0 <= dropout_at < len(arguments) else 0.0)


@cache
def _dropout_argument(operator: Any) -> int | None:
    """Return the index of a kept operator's dropout probability, -1 if it has none; None for other operators."""
    schema: Any = getattr(operator, "_schema", None)
    if schema is None or schema.name not in _KEPT:
        return None
    names: list[str] = [argument.name for argument in schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else -1


MODES: dict[str, Recompute] = {
    "layers": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=_contexts),
}
"""Values of ``model.gradient_checkpointing``, besides ``none``: both keep a function's tensor inputs."""
