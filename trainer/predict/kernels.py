"""Memory that CUDA kernels allocate besides their outputs, by operation; fake kernels do not.

Every entry follows the named source of PyTorch 2.11 to 2.13.
"""

import importlib
import importlib.util
import math
import threading
from typing import Any

import torch

from .memory import Hidden, Recorder

_aten: Any = torch.ops.aten
MIB = 1 << 20
_FEW_ROWS = 128
_CHUNK = 1 << 16
"""Elements per block of a kernel over many tensors: ``MultiTensorApply.cuh``."""


class Workspaces:
    """cuBLAS workspaces: one per thread's handle and stream, never freed.

    ``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``getChosenWorkspaceSize``: 32 MiB on Hopper and Blackwell, 8,320 KiB
    on other GPUs. The autograd engine's device thread has a handle of its own.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.bytes = 32 * MIB if capability[0] in (9, 10) else 8320 * 1024
        self._made: set[tuple[int, int]] = set()

    def __call__(self, recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Allocate the workspace of this thread and stream at its first matrix product."""
        first = result[0] if isinstance(result, tuple) else result
        if first.device.type != "cuda":
            return
        key = (threading.get_ident(), recorder.stream)
        if key not in self._made:
            self._made.add(key)
            recorder.trace.allocate(self.bytes, "cuda", recorder.stream)


def _flash_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """FlashAttention 2's backward: fp32 sums of dQ, and dK and dV per query head if several share a key head.

    ``csrc/flash_attn/flash_api.cpp``, ``mha_bwd``.
    """
    query, key = args[1], args[2]
    if query.device.type != "cuda":
        return
    batch, heads, length, width = query.shape
    key_heads, key_length = key.shape[1], key.shape[2]
    rounded = math.ceil(length / 128) * 128
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * _rounded(width) * 4]
    if key_heads != heads:
        sizes += [batch * heads * key_length * width * key.element_size()] * 2
    recorder.trace.moment(*sizes, stream=recorder.stream)


def _varlen_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """The same for packed rows, with 128 more rows per document: ``flash_api.cpp``, ``mha_varlen_bwd``."""
    query, key, documents = args[1], args[2], args[6].shape[0] - 1
    if query.device.type != "cuda":
        return
    length, heads, width = query.shape
    rows = length + 128 * documents
    sizes = [heads * rows * 4, heads * rows * _rounded(width) * 4]
    if key.shape[1] != heads:
        sizes += [key.shape[0] * heads * width * key.element_size()] * 2
    recorder.trace.moment(*sizes, stream=recorder.stream)


def _dequantized(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A product with a weight in 4 bits: with more than a few rows, the whole weight in the inputs' type.

    bitsandbytes 0.50, ``backends/cuda/ops.py``, ``gemm_4bit``; the kernel for up to 1,536 rows depends on the GPU.
    """
    inputs, shape, blocksize = args[0], args[2], args[4]
    if inputs.device.type != "cuda" or inputs.numel() // inputs.shape[-1] <= _FEW_ROWS:
        return
    elements = math.prod(shape)
    recorder.trace.moment(elements // blocksize * 4, elements * inputs.element_size(), stream=recorder.stream)


def _norms(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Norms of many tensors: one per chunk, with as many chunks for each tensor as the largest has.

    ``ForeachReduceOp.cu``, ``foreach_tensor_norm_cuda``.
    """
    tensors = args[0]
    if tensors[0].device.type == "cuda":
        chunks = math.ceil(max(one.numel() for one in tensors) / _CHUNK)
        recorder.trace.moment(len(tensors) * chunks * result[0].element_size(), stream=recorder.stream)


def _rounded(width: int) -> int:
    """Return the padded width of a head in FlashAttention."""
    return math.ceil(width / 32) * 32 if width <= 128 else math.ceil(width / 64) * 64


def hidden(capability: tuple[int, int]) -> dict[Any, Hidden]:
    """Return the recording functions by operation, for a GPU of this compute capability."""
    workspaces = Workspaces(capability)
    products = (
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.mm.out, _aten.bmm.out, _aten.addmm.out, _aten.addmv.default, _aten.mv.default),
    )
    found: dict[Any, Hidden] = dict.fromkeys(products, workspaces)
    if importlib.util.find_spec("bitsandbytes") is not None:
        importlib.import_module("bitsandbytes")  # registers the operation
        if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
            found[torch.ops.bitsandbytes.gemm_4bit.default] = _dequantized
    found[_aten._scaled_dot_product_flash_attention_backward.default] = _flash_backward
    found[_aten._foreach_norm.Scalar] = _norms
    try:
        importlib.import_module("torch.nn.attention.varlen")  # registers the operation
    except ImportError:  # PyTorch before 2.10
        return found
    found[torch.ops.torch_attn._varlen_attn_backward.default] = _varlen_backward
    return found
