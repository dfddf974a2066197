# pyright: basic, reportInvalidTypeForm=false, reportMissingImports=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Triton's kernels for cross entropy and sums of gradients, and cuDNN's attention: import this on a GPU alone."""

import weakref
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 8192, 8  # among the fastest of ten on an H200, for 32,000, 128,256 and 151,936 columns
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

    ``logits`` are contiguous, of shape [tokens, vocabulary]; ``targets`` are [tokens]; those below zero are
    not counted.
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
    """One program per token: one pass over its logits for the largest and the sum, one for the gradient.

    The second pass begins at the end, whose logits are still cached.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        x = tl.load(logits + columns, mask=columns < vocabulary, other=0.0, eviction_policy="evict_last")
        z, _ = _transformed(x, scale, cap, CAPPED)
        z = tl.where(columns < vocabulary, z, -float("inf"))
        above = tl.maximum(highest, tl.max(z, 0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(z - above), 0)
        highest = above
    counts = target >= 0
    wanted, _ = _transformed(tl.load(logits + target, mask=counts, other=0.0), scale, cap, CAPPED)
    tl.store(losses + row, tl.where(counts, highest + tl.log(total) - wanted, 0.0))
    if WITH_GRAD:
        share = tl.where(counts, 1.0 / total, 0.0)
        last = (vocabulary - 1) // BLOCK * BLOCK
        for start in range(0, vocabulary, BLOCK):
            columns = last - start + lanes
            x = tl.load(logits + columns, mask=columns < vocabulary, other=0.0, eviction_policy="evict_first")
            z, slope = _transformed(x, scale, cap, CAPPED)
            grad = tl.exp(z - highest) * share
            grad = tl.where(columns == target, grad - 1.0, grad) * slope
            tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < vocabulary)


# Attention within documents by NVIDIA's cuDNN, through its Python library (the package ``nvidia-cudnn-frontend``): on
# Hopper it takes 0.47 to 0.75 of the time of the FlashAttention 2 in PyTorch.


class _Plan(NamedTuple):
    graph: Any
    tensors: list[Any]
    """Its inputs and outputs, in the order in which they are given."""
    workspace: int
    """In bytes."""


class _Kind(NamedTuple):
    """What a plan depends on."""

    documents: int
    longest: int
    tokens: int
    heads: int
    key_heads: int
    width: int
    dtype: torch.dtype
    scale: float
    window: int
    device: int


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention within documents, and the logarithm of each softmax's sum in fp32, [tokens, heads].

    ``query`` is [tokens, heads, width]; ``key`` and ``value`` have as many heads or a divisor of them. ``borders`` are
    the documents' in int32, ``longest`` bounds their tokens; ``window`` are the tokens that a token sees (0: all).
    """
    kind = _kind(query, key, borders, longest, scale, window)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    _execute(_plan(kind, False), kind, borders, [query, key, value, out, sums])
    return out, sums


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``attend``'s query, key and value, from that of its output; sums in fp32 are atomic."""
    kind = _kind(query, key, borders, longest, scale, window)
    made = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (query, key, value)]
    _execute(_plan(kind, True), kind, borders, [query, key, value, out, grad, sums, *made])
    return made[0], made[1], made[2]


def _kind(
    query: torch.Tensor, key: torch.Tensor, borders: torch.Tensor, longest: int, scale: float, window: int
) -> _Kind:
    # Few plans for many numbers of documents: further documents are empty.
    count = borders.shape[0] - 1
    step = max(16, (1 << count.bit_length()) // 8)
    tokens, heads, width = query.shape
    return _Kind(
        -(-count // step) * step,
        longest,
        tokens,
        heads,
        key.shape[1],
        width,
        query.dtype,
        scale,
        window,
        query.device.index,
    )


def _execute(plan: _Plan, kind: _Kind, borders: torch.Tensor, given: list[torch.Tensor]) -> None:
    import cudnn

    handle = _handle(kind.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(kind.device).cuda_stream)
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=borders.device)
    tensors = [*_places(borders, kind), *(one.contiguous() for one in given)]
    plan.graph.execute(dict(zip(plan.tensors, tensors, strict=True)), workspace, handle=handle)


@cache
def _handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


_latest: tuple[Any, int, dict[Any, list[torch.Tensor]]] = (lambda: None, 0, {})
"""Borders and their version, and what was computed of them: all layers of a micro-batch have the same."""


def _places(borders: torch.Tensor, kind: _Kind) -> list[torch.Tensor]:
    """Return where documents begin among the elements of queries, keys and sums, and their lengths, twice."""
    global _latest
    if _latest[0]() is not borders or _latest[1] != borders._version:
        _latest = (weakref.ref(borders), borders._version, {})
    shape = (kind.documents, kind.heads, kind.key_heads, kind.width)
    if shape not in _latest[2]:
        # The longest first: the device ends with short work. Beyond the last, all begin and end at the last border.
        ends = borders[torch.arange(kind.documents + 1, device=borders.device).clamp_(max=borders.shape[0] - 1)]
        lengths, order = ends.diff().sort(descending=True, stable=True)
        begins = torch.cat([ends[order], ends[-1:]])
        sizes = (kind.heads * kind.width, kind.key_heads * kind.width, kind.heads)
        _latest[2][shape] = [*(begins * size for size in sizes), lengths, lengths]
    return _latest[2][shape]


@lru_cache(maxsize=256)
def _plan(kind: _Kind, backward: bool) -> _Plan:
    """Return cuDNN's plan of attention or its gradients, which takes some 60 ms to make; the first, a second.

    Layout of packed ("ragged") sequences: https://docs.nvidia.com/deeplearning/cudnn/frontend, operations/Attention.
    """
    import cudnn

    types = cudnn.data_type
    own = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[kind.dtype]
    graph = cudnn.pygraph(
        io_data_type=own,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=_handle(kind.device),
    )

    def numbers(name: str, size: int) -> Any:
        return graph.tensor(name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=types.INT32)

    def laid_out(heads: int, width: int) -> tuple[list[int], list[int]]:
        dim, stride = (
            [kind.documents, heads, kind.longest, width],
            [kind.longest * heads * width, width, heads * width, 1],
        )
        return dim, stride

    def read(name: str, heads: int, width: int, begins: Any, dtype: Any = own) -> Any:
        dim, stride = laid_out(heads, width)
        tensor = graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)
        tensor.set_ragged_offset(begins)
        return tensor

    def written(tensor: Any, heads: int, width: int, begins: Any, dtype: Any = own) -> None:
        dim, stride = laid_out(heads, width)
        tensor.set_output(True).set_data_type(dtype).set_dim(dim).set_stride(stride).set_ragged_offset(begins)

    of_queries, of_keys, of_sums = (numbers(name, kind.documents + 1) for name in ("queries", "keys", "sums"))
    lengths = [numbers(name, kind.documents) for name in ("query_lengths", "key_lengths")]
    query = read("query", kind.heads, kind.width, of_queries)
    key, value = (read(name, kind.key_heads, kind.width, of_keys) for name in ("key", "value"))
    named = {
        "attn_scale": kind.scale,
        "use_padding_mask": True,
        "seq_len_q": lengths[0],
        "seq_len_kv": lengths[1],
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_right_bound": 0,
        "diagonal_band_left_bound": kind.window or None,
    }
    if backward:
        out, grad = (read(name, kind.heads, kind.width, of_queries) for name in ("out", "grad"))
        sums = read("sums", kind.heads, 1, of_sums, types.FLOAT)
        most = {"max_total_seq_len_q": kind.tokens, "max_total_seq_len_kv": kind.tokens}
        grads = graph.sdpa_backward(q=query, k=key, v=value, o=out, dO=grad, stats=sums, **named, **most)
        written(grads[0], kind.heads, kind.width, of_queries)
        for one in grads[1:]:
            written(one, kind.key_heads, kind.width, of_keys)
        tensors = [query, key, value, out, grad, sums, *grads]
    else:
        out, sums = graph.sdpa(q=query, k=key, v=value, generate_stats=True, **named)
        written(out, kind.heads, kind.width, of_queries)
        written(sums, kind.heads, 1, of_sums, types.FLOAT)
        tensors = [query, key, value, out, sums]
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return _Plan(graph, [of_queries, of_keys, of_sums, *lengths, *tensors], max(1, graph.get_workspace_size()))
