"""Counts a step's work on device and host from the operations of a dry run, to predict its time."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ...protocol.analysis.estimates.roofline import Collective, Communication, Operation, Work
from ...protocol.messages.throughput import Precision

_aten: Any = torch.ops.aten
_PRECISIONS: dict[Any, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_COLLECTIVES: dict[str, Collective] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
}
"""NCCL's collective of each operation of ``c10d``."""
_WITHOUT_KERNEL = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "detach"),
        *("_unsafe_view", "_reshape_alias", "lift_fresh", "is_pinned", "record_stream", "alias"),
    )
)  # fmt: skip
_WRITES_ONLY = frozenset(("fill_", "zero_", "fill", "zeros_like", "ones_like", "full_like", "copy_"))
_PICKS = frozenset(("embedding", "gather", "index_select", "index", "nll_loss_forward", "nll_loss_backward"))
"""Operations that read as much of their inputs as they write."""
_ATTENTION = {
    "_scaled_dot_product_flash_attention": (0, 4, 1.0),
    "_scaled_dot_product_efficient_attention": (0, 6, 1.0),
    "_varlen_attn": (0, 7, 1.0),
    "_scaled_dot_product_flash_attention_backward": (1, 11, 2.5),
    "_scaled_dot_product_efficient_attention_backward": (1, 11, 2.5),
    "_varlen_attn_backward": (1, 10, 2.5),
}
"""Positions of query and ``is_causal``, and number of products relative to the forward pass (the backward has five)."""
_BORDERS = {"_varlen_attn": 3, "_varlen_attn_backward": 6}
"""Position of the borders between the documents of packed rows."""
_ADAM_MOVES = 7 / 4
"""A fused Adam reads a parameter, its gradient and two states, and writes all but the gradient."""


class Counting:
    """Counts the work of one step."""

    def __init__(self, ranks: int, sequence_parallel_size: int = 1) -> None:
        """Start with empty counts.

        Args:
            ranks: number of ranks of the run, all in DeepSpeed's collectives.
            sequence_parallel_size: number of ranks in an all_to_all; 1: all.
        """
        self._ranks = ranks
        self._sharing = sequence_parallel_size
        self.pairs_a_token: float | None = None
        """Pairs of query and key under the causal mask per token of packed rows; None: documents are equal."""
        self.clear()

    def clear(self) -> None:
        """Reset the counts for a step."""
        self._operations: Counter[tuple[float, float, Precision, bool]] = Counter()
        self._communications: Counter[tuple[Collective, int, bool]] = Counter()
        self._calls = 0
        self.fetches = 0
        """Number of times that ZeRO-3 gathers or releases a module's parameters."""
        self._transfer_bytes = 0
        self._host_bytes = 0

    def work(self) -> Work:
        """Return the counted work."""
        return Work(
            [
                Operation(flops, moved, precision, count, attention)
                for (flops, moved, precision, attention), count in self._operations.items()
            ],
            [
                Communication(kind, size, self._ranks_of(kind), overlapped, count)
                for (kind, size, overlapped), count in self._communications.items()
            ],
            self._calls,
            self._transfer_bytes,
            self._host_bytes,
            self.fetches,
        )

    def _ranks_of(self, kind: Collective) -> int:
        return self._sharing if kind == "all_to_all" and self._sharing > 1 else self._ranks

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, stream: int) -> None:
        """Count one operation.

        Args:
            func: the dispatcher's operator.
            args: its arguments.
            kwargs: its keyword arguments.
            result: its result.
            stream: number of its CUDA stream; collectives on streams other than 0 overlap with computation.
        """
        self._calls += 1
        packet = func._overloadpacket
        name = packet.__name__
        if func.namespace == "c10d":
            self._communicate(name, args, stream)
            return
        if func.is_view or name in _WITHOUT_KERNEL:
            return
        inputs, outputs = list(_tensors((args, tuple(kwargs.values())))), list(_tensors(result))
        on_device = [one for one in (*outputs, *inputs) if one.device.type == "cuda"]
        if not on_device:
            return
        if len(on_device) < len(inputs) + len(outputs) and name in ("copy_", "_to_copy"):
            self._transfer_bytes += min(map(_bytes, (*outputs, *inputs)))
            return
        moved = _moved(name, args, inputs, outputs)
        precision = _PRECISIONS.get(inputs[0].dtype if inputs else None, "fp32")
        attention = _ATTENTION.get(name)
        flops = 0.0
        if attention is not None:
            flops = _attention_flops(args, kwargs, *attention, self._keys_of_packed(name, args))
        elif packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
        self._operations[flops, moved, precision, attention is not None] += 1

    def update(self, tensors: Any) -> None:
        """Count a compiled optimizer's update of these tensors (parameters, gradients, states) as one kernel."""
        found = list(_tensors(tensors))
        moved = int(sum(map(_bytes, found)) * _ADAM_MOVES)
        if any(one.device.type == "cuda" for one in found):
            self._operations[0.0, float(moved), "fp32", False] += 1
        else:
            self._host_bytes += moved

    def _keys_of_packed(self, name: str, args: tuple[Any, ...]) -> float | None:
        """Return the mean number of keys in the document of a token of packed rows; None for other attention."""
        if name not in _BORDERS:
            return None
        if self.pairs_a_token is not None:
            return 2 * self.pairs_a_token
        return args[_ATTENTION[name][0]].shape[0] / (args[_BORDERS[name]].shape[0] - 1)

    def _communicate(self, name: str, args: tuple[Any, ...], stream: int) -> None:
        kind = _COLLECTIVES.get(name)
        if kind is None:
            return
        # The whole tensor: the larger one of a gather's output or a scatter's input.
        size = max((sum(map(_bytes, _tensors(one))) for one in args[:2]), default=0)
        self._communications[kind, size, stream != 0] += 1


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _bytes(tensor: Any) -> int:
    """Return the bytes of reading a tensor; an expanded tensor is read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            size *= length
    return size if tensor.numel() else 0


def _moved(name: str, args: tuple[Any, ...], inputs: Iterable[Any], outputs: Iterable[Any]) -> float:
    written = sum(map(_bytes, outputs))
    if not written:  # a foreach operation returns nothing: it writes its first list
        written = sum(map(_bytes, _tensors(args[0]))) if args else 0
    if name in _PICKS:
        return 2.0 * written
    read = sum(map(_bytes, inputs))
    if name in _WRITES_ONLY and args:
        read -= sum(map(_bytes, _tensors(args[0])))
    return float(read + written)


def _attention_flops(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, causal_at: int, products: float, keys: float | None
) -> float:
    """Return the FLOPs of attention: two products over pairs of query and key, half of them under a causal mask.

    Packed rows are joined, and attention stays within documents: a query has ``keys`` keys in its own document.
    """
    query, key = args[position], args[position + 1]
    causal = args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
    if keys is not None:
        length, heads, width = query.shape
        pairs = length * keys
    else:
        batch, heads, length, width = query.shape
        pairs = batch * length * key.shape[2]
    return 4.0 * heads * width * pairs * (0.5 if causal else 1.0) * products
