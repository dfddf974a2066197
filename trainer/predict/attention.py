"""Scaled dot product attention of a GPU on fake tensors, by the kernel that PyTorch selects there."""

from typing import Any

import torch
import torch.nn.functional

_aten: Any = torch.ops.aten
_FLASH_MOST_WIDTH = 256


def install(capability: tuple[int, int]) -> None:
    """Replace ``scaled_dot_product_attention`` permanently in this process: a CPU build would use the math path.

    Args:
        capability: the GPU's compute capability; FlashAttention needs 8.0.
    """
    functional: Any = torch.nn.functional
    plain = functional.scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.device.type != "cuda" or query.dim() != 4:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        width = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        same_width = width == value.shape[-1]
        if capability >= (8, 0) and half and attn_mask is None and same_width and width <= _FLASH_MOST_WIDTH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if not enable_gqa:
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = attention
    builtins: Any = torch._C
    builtins._nn.scaled_dot_product_attention = attention


def _flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    """Run FlashAttention, with widths padded to a multiple of 8 (``sdp_utils``, ``pad_last_dim``)."""
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(part, (0, missing)) for part in (query, key, value))
    result = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return result[..., :width] if missing else result


def _efficient(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    """Run memory-efficient attention; a mask becomes a bias, expanded and aligned to 16 elements."""
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        missing = -mask.shape[-1] % 16
        if missing:
            mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needed = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, needed, dropout, causal, scale=scale)[
        0
    ]
