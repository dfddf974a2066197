"""Records a dry run's operations: allocations and frees of every storage in order, and the work of a step."""

import contextlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import torch
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from ...protocol.analysis.allocator.model import UNLIMITED, CachingAllocator, DeviceOutOfMemory, Driver, Peaks
from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates.time import Collective, Communication, Operation, Work, combined
from ...protocol.host.machine import Precision

ALLOCATE, FREE, USE, EMPTY, MARK, END = range(6)
_MOST_RANGES = 8
Event = tuple[int, int, int, int, str]  # Kind, handle, bytes, stream, name of a phase that begins or ends
Taped = tuple[int, int, str, int] | int  # Handle, bytes, device, stream of an allocation; or the handle of a freed one


class AllocatorReplay(CachingAllocator):
    """The caching allocator's model, to which the events of a trace are applied."""

    def __init__(self, settings: Settings, driver: Driver | None = None) -> None:
        super().__init__(settings, driver=driver)
        self._handles: dict[int, int] = {}

    def apply(self, event: Event) -> None:
        """Apply one event. Raises ``DeviceOutOfMemory`` if an allocation does not fit the capacity."""
        kind, handle, size, stream, _ = event
        if kind == ALLOCATE:
            self.complete_events()
            self._handles[handle] = self.allocate(size, stream)
        elif kind == FREE:
            self.free(self._handles.pop(handle))
        elif kind == USE:
            self.record_stream(self._handles[handle], stream)
        elif kind == EMPTY:
            self.complete_events()
            self.empty_cache()
        elif kind == MARK:
            self.reset_peaks()


class Trace:
    """Allocations and frees on the GPU as events, and allocated bytes by kind of memory."""

    def __init__(self, settings: Settings) -> None:
        self.events: list[Event] = []
        self.current: dict[str, int] = {}  # Bytes by kind of memory: ``cuda``, ``cpu``, ``pinned``
        self.host_peak = 0
        self._replay = AllocatorReplay(settings)
        self._sizes: dict[int, tuple[int, str, int]] = {}
        self._next = 0
        self._names: dict[int, int] = {}
        """Handle of an allocation in the events and the allocator, if a repeated step replaced it."""
        self.block_bytes: dict[int, int] = {}  # Bytes of each allocation's block, by its handle in the events
        self.parts: dict[int, str] = {}
        """Part of an allocation (``protocol.messages.memory.PARTS``), by its handle in the events."""
        self.logits: set[int] = set()  # Allocations of tensors over the vocabulary, by their handle in the events
        self.recomputed: list[tuple[int, int]] = []  # First and last events of recomputed layers in a backward pass
        self.tape: list[Taped] | None = None  # Receives allocations and frees of all devices (``taped``)

    def allocate(self, size: int, device: str, stream: int = 0) -> int:
        """Record an allocation of ``size`` bytes; return its handle."""
        handle = self._next
        self._next += 1
        self._sizes[handle] = (size, device, stream)
        self._add(device, size)
        if self.tape is not None:
            self.tape.append((handle, size, device, stream))
        if device == "cuda" and size:
            self._record((ALLOCATE, handle, size, stream, ""))
        return handle

    def free(self, handle: int) -> None:
        """Record a free."""
        size, device, stream = self._sizes.pop(handle)
        self.current[device] -= size
        if self.tape is not None:
            self.tape.append(handle)
        if device == "cuda" and size:
            self._record((FREE, self._names.pop(handle, handle), size, stream, ""))

    def use(self, handle: int, stream: int) -> None:
        """Record the use of a storage on a stream other than its own (``record_stream``)."""
        size, device, own = self._sizes[handle]
        if device == "cuda" and size and own != stream:
            self._record((USE, self._names.get(handle, handle), size, stream, ""))

    def empty_cache(self) -> None:
        """Record that cached segments are freed to the driver."""
        self._record((EMPTY, 0, 0, 0, ""))

    def move(self, handle: int, device: str) -> None:
        """Count a host allocation as another kind of host memory."""
        size, before, stream = self._sizes[handle]
        self.current[before] -= size
        self._sizes[handle] = (size, device, stream)
        self._add(device, size)

    def see(self, handle: int, part: str) -> None:
        """Record the part of an allocation: the first one counts, except that a gradient may be in a bucket."""
        name = self._names.get(handle, handle)
        if part == "buckets" or name not in self.parts:
            self.parts[name] = part

    @contextlib.contextmanager
    def taped(self) -> Generator[list[Any]]:
        """Also record allocations and frees of all devices in the body (``Taped``) into the list that it receives."""
        self.tape = tape = []
        try:
            yield tape
        finally:
            self.tape = None

    def moment(self, *sizes: int, stream: int = 0) -> None:
        """Record memory on the GPU that an operation allocates and frees before it returns."""
        handles = [self.allocate(size, "cuda", stream) for size in sizes]
        for handle in handles:
            self.free(handle)

    def begin(self, phase: str) -> None:
        """Begin a phase, whose peaks start at the present allocation."""
        self._record((MARK, 0, 0, 0, phase))

    def end(self, phase: str) -> Peaks:
        """End a phase; return its highest allocated and reserved bytes."""
        self._record((END, 0, 0, 0, phase))
        return self.peaks()

    def repeat(self, start: int) -> list[tuple[str, Peaks]] | None:
        """Repeat everything since an event, as a next and equal step.

        Returns:
            Each phase that ended, with its peaks; None, without a repetition, if the step left allocations that it has
            not replaced, so that the next one may differ. What it only frees was garbage, which the next one has not.
        """
        step = self.events[start:]
        born: dict[int, tuple[int, int]] = {}
        lost: list[tuple[int, tuple[int, int]]] = []
        for kind, handle, size, stream, _ in step:
            if kind == ALLOCATE:
                born[handle] = (size, stream)
            elif kind == FREE and born.pop(handle, None) is None:
                lost.append((handle, (size, stream)))
        kept: dict[tuple[int, int], deque[int]] = {}
        for handle, what in born.items():
            kept.setdefault(what, deque()).append(handle)
        # What is lost and has no such replacement was garbage of earlier steps, in circles.
        renamed = {handle: kept[what].popleft() for handle, what in lost if kept.get(what)}
        if any(kept.values()):
            return None
        found = self._copy(range(start, start + len(step)), renamed)
        owners = {name: handle for handle, name in self._names.items()}
        for handle in born:
            self._names[owners.get(handle, handle)] = renamed[handle]
        return found

    def repeat_around(self, start: int, own: range, run: Callable[[], None], stored: set[int]) -> bool:
        """Repeat everything since an event as a next step, but for its ``own`` events: ``run`` makes other ones.

        ``stored`` are the allocations of tensors that exist. An allocation without one, as a workspace, is not repeated
        if it was not freed.

        Returns:
            Whether it was repeated: not if the step left an allocation of a tensor, or its own events freed one of the
            others, so that the next one may differ.
        """
        whole = range(start, len(self.events))
        others = {self.events[index][1] for index in whole if index not in own and self.events[index][0] == ALLOCATE}
        freed = {self.events[index][1]: index for index in whole if self.events[index][0] == FREE}
        left = others - freed.keys()
        if left & stored or any(freed.get(handle) in own for handle in others):
            return False
        renamed: dict[int, int] = {}
        self._copy(range(start, own.start), renamed, left)
        run()
        self._copy(range(own.stop, whole.stop), renamed, left)
        return True

    def _copy(self, places: range, renamed: dict[int, int], left_out: Collection[int] = ()) -> list[tuple[str, Peaks]]:
        """Record events again, without allocations that are ``left_out``.

        Handles are ``renamed``, which receives those of new allocations. Frees of others are left out, too. Return each
        phase that ended, with its peaks.
        """
        found: list[tuple[str, Peaks]] = []
        new: list[int] = []
        for kind, handle, size, stream, name in self.events[places.start : places.stop]:
            new.append(len(self.events))
            if (kind == ALLOCATE and handle in left_out) or (kind == FREE and handle not in renamed):
                continue
            if kind == ALLOCATE:
                renamed[handle] = self._next
                self._next += 1
            self._record((kind, renamed.get(handle, handle), size, stream, name))
            if kind == END:
                found.append((name, self.peaks()))
        for old, of in renamed.items():
            if old in self.parts:
                self.parts[of] = self.parts[old]
        self.logits.update(of for old, of in renamed.items() if old in self.logits)
        new.append(len(self.events))
        again = [(begin - places.start, end - places.start) for begin, end in self.recomputed if begin in places]
        self.recomputed += [(new[begin], new[end]) for begin, end in again]
        return found

    def peaks(self) -> Peaks:
        """Return the highest allocated and reserved bytes since the phase began."""
        return self._replay.peaks()

    def _record(self, event: Event) -> None:
        self.events.append(event)
        before = self._replay.allocated
        self._replay.apply(event)
        if event[0] == ALLOCATE:
            self.block_bytes[event[1]] = self._replay.allocated - before

    def _add(self, device: str, size: int) -> None:
        self.current[device] = self.current.get(device, 0) + size
        if device in ("cpu", "pinned"):
            self.host_peak = max(self.host_peak, self.current.get("cpu", 0) + self.current.get("pinned", 0))


class _Driver(Driver):
    """Physical memory, and how much of it was in use at most: with as much, all requests have the same outcomes."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.most_bytes = 0

    def take(self, size: int) -> bool:
        granted = super().take(size)
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        return granted


def _attempt(events: Iterable[Event], settings: Settings, capacity_bytes: int) -> tuple[str, int]:
    """Replay a trace with limited memory.

    Return the phase whose allocation fails, or nothing; and the smallest limit with which the replay is the same.
    """
    driver = _Driver(capacity_bytes)
    replay = AllocatorReplay(settings, driver)
    phase = "init"
    try:
        for event in events:
            if event[0] == MARK:
                phase = event[4]
            replay.apply(event)
    except DeviceOutOfMemory:
        return phase, driver.most_bytes
    return "", driver.most_bytes


def peaks(events: Sequence[Event], start: int, settings: Settings) -> dict[str, tuple[int, int]]:
    """Return the highest allocated and reserved bytes of ``init`` and of the phases ending after ``start`` events."""
    replay = AllocatorReplay(settings)
    found: dict[str, tuple[int, int]] = {}
    for index, event in enumerate(events):
        replay.apply(event)
        if event[0] == END and (index >= start or event[4] == "init"):
            highest, before = replay.peaks(), found.get(event[4], (0, 0))
            found[event[4]] = max(highest.allocated_bytes, before[0]), max(highest.reserved_bytes, before[1])
    return found


class Limits(NamedTuple):
    """Where a trace begins to fit."""

    needed_bytes: int  # The least reservable memory with which, as with any more, every allocation succeeds
    phase: str  # The phase that fails with less


def limits(events: Sequence[Event], settings: Settings, ranges: int = _MOST_RANGES) -> Limits:
    """Return from which size of reservable memory on every allocation succeeds.

    A larger size can fail where a smaller one does not, as segments are freed and split differently. But a replay is
    the same for a whole range of sizes, and most steps have a few: they are tried from above, each once. After
    ``ranges`` of them (layers that are recomputed make many) sizes are tried in steps of 0.5 to 2 %: failing ones
    between two that succeed are then missed.
    """
    tried, least, step = 0, 1, 1
    _, needed = _attempt(events, settings, UNLIMITED)
    while needed:
        phase, same = _attempt(events, settings, needed - step)
        if not phase:
            needed, tried = same, tried + 1
            if tried >= ranges:
                least = max(1, needed // 200)
                step = max(least, min(2 * step, needed // 50))
        elif step <= least:
            return Limits(needed, phase)
        else:
            step = least
    return Limits(0, "")


def failing_phase(events: Iterable[Event], settings: Settings, found: Limits, capacity_bytes: int) -> str:
    """Return the phase whose allocation fails with ``capacity_bytes`` of reservable memory; empty: all succeed.

    A size below one that fails is taken as failing, even if every allocation happens to succeed with it.
    """
    if capacity_bytes >= found.needed_bytes:
        return ""
    return _attempt(events, settings, capacity_bytes)[0] or found.phase


def least_that_fits(
    events: Sequence[Event], settings: Settings, found: Limits, low: int, ranges: int = 2 * _MOST_RANGES
) -> int:
    """Return the smallest size with which every allocation happens to succeed, though some larger one fails.

    ``low`` bytes are allocated at once, so no smaller size suffices; ``ranges`` of sizes are tried.
    """
    least = lowest = found.needed_bytes
    for _ in range(ranges):
        if lowest <= low:
            break
        phase, lowest = _attempt(events, settings, lowest - 1)
        least = least if phase else lowest
    return least


_aten: Any = torch.ops.aten
_fake: Any = FakeTensor
MISSING: Any = object()  # Returned by ``kept`` for a result that is not cached
_NEVER: Any = object()
_NUMBERS = (int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SLICE: Any = _aten.slice.Tensor
_ABSOLUTE_OFFSETS = frozenset((_aten.as_strided.default, _aten.as_strided_.default))
_VIEWS = frozenset((_aten._unsafe_view.default,))  # Operations that return their argument's storage undeclared
_OF_SHAPES = ("bitsandbytes", "ftmon", "torch_attn")
"""Namespaces of operations besides PyTorch's own whose results follow from what the cache's keys have."""
_VARYING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class Made(NamedTuple):
    """A tensor that an operation returns."""

    shape: Any
    stride: Any
    dtype: Any
    device: Any
    requires_grad: bool
    argument: int = -1  # Position of the argument whose storage it shares; -1: it has its own
    offset: int = 0  # Bytes by which it begins behind that argument


class Same(NamedTuple):
    """An operation returns an argument itself."""

    argument: int


class ResultCache:
    """Returns an operation's earlier result for tensors of the same shapes, strides and types; for one fake mode.

    PyTorch's own cache (``FakeTensorMode.cache``) also has storage offsets in its keys. ZeRO's parameters are views
    into one flat buffer, so each layer's operations would miss it.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kept: dict[Any, Any] = {}
        self._cacheable: dict[Any, bool] = {}
        self._attributes: dict[Any, dict[str, Any]] = {}
        """Those of every fake tensor without constants, by device: the constructor takes three times as long."""

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the cache key of a call; None if its result cannot be cached."""
        cacheable = self._cacheable.get(func)
        if cacheable is None:
            varies = any(tag in func.tags for tag in _VARYING)
            known = is_builtin(func) or func.namespace in _OF_SHAPES
            cacheable = self._cacheable[func] = known and not varies
        if not cacheable:
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not self._add(parts, _slice_of(args)[0] if func is _SLICE else args):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._add(parts, (value,)):
                return None
        return tuple(parts)

    def kept(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a new result of a call with this key; ``MISSING`` if none is cached."""
        found = self._kept.get(key, MISSING)
        if found is MISSING or found is _NEVER:
            return MISSING
        if kwargs:
            args = (*args, *kwargs.values())
        if type(found) in (list, tuple):
            return type(found)([self.make(one, args) for one in found])
        if key[0] is _SLICE and type(found) is Made:
            found = found._replace(offset=found.offset + _slice_of(args)[1])
        return self.make(found, args)

    def keep(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Cache a call's result, if one of the same kind can be made without the call."""
        if key in self._kept:
            return
        if key != self.key(func, args, kwargs):  # it has changed an argument's shape
            self._kept[key] = _NEVER
            return
        given = (*args, *kwargs.values())
        storages = {one.untyped_storage()._cdata for one in _tensors(given)}
        if type(result) in (list, tuple):
            parts = [self._part(func, given, one, storages) for one in result]
            self._kept[key] = _NEVER if _NEVER in parts else type(result)(parts)
        else:
            self._kept[key] = self._part(func, given, result, storages)

    def _add(self, parts: list[Any], values: Any) -> bool:
        for value in values:
            kind = type(value)
            if isinstance(value, FakeTensor):
                tensor: Any = value
                if (
                    tensor.fake_mode is not self._mode
                    or tensor.constant is not None
                    or tensor.layout is not torch.strided
                    or tensor.dtype.is_complex
                ):
                    return False
                parts += (tensor.dtype, tensor.shape, tensor.stride(), tensor.fake_device, tensor.requires_grad)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._add(parts, value):
                    return False
            elif isinstance(value, _NUMBERS):
                parts += (kind, value)
            else:
                return False
        return True

    def _part(self, func: Any, args: tuple[Any, ...], tensor: Any, storages: set[int]) -> Any:
        """Return the recipe of a result; None: the value itself, ``_NEVER``: it cannot be made again."""
        if tensor is None:
            return None
        for position, one in enumerate(args):
            if one is tensor:
                return Same(position)
        kind: Any = type(tensor)
        if kind is not FakeTensor:
            return _NEVER
        if tensor.constant is not None or tensor.layout is not torch.strided or tensor.dtype.is_complex:
            return _NEVER
        made = _described(tensor)
        if tensor.untyped_storage()._cdata in storages:
            return self._view(func, args, tensor, made)
        if func.is_view or tensor.storage_offset():
            return _NEVER
        return self.recipe(tensor) or _NEVER

    def recipe(self, tensor: Any, argument: int = -1, offset: int = 0) -> Made | None:
        """Return how to make a tensor as this one; None if ``make`` cannot.

        It has the storage of an argument, ``offset`` bytes behind it, or its own, at whose start it is.
        """
        made = _described(tensor)._replace(argument=argument, offset=offset)
        if argument >= 0:
            return made
        again = self.make(made, ())
        same = again.untyped_storage().nbytes() == tensor.untyped_storage().nbytes() and not offset
        return made if same and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(tensor) else None

    def _view(self, func: Any, args: tuple[Any, ...], tensor: Any, made: Made) -> Any:
        positions = [number for number, one in enumerate(args) if isinstance(one, FakeTensor)]
        if not (func.is_view or func in _VIEWS) or func in _ABSOLUTE_OFFSETS or len(positions) != 1:
            return _NEVER
        base: Any = args[positions[0]]
        offset = place(tensor) - place(base) - (_slice_of(args)[1] if func is _SLICE else 0)
        return made._replace(argument=positions[0], offset=offset)

    def make(self, kept: Any, args: Sequence[Any]) -> Any:
        """Return a result of its recipe and the call's arguments."""
        if kept is None:
            return None
        if type(kept) is Same:
            return args[kept.argument]
        shape, stride, dtype, device, requires_grad, argument, offset = kept
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
            if argument >= 0:
                base = args[argument]
                empty.set_(base.untyped_storage(), (place(base) + offset) // dtype.itemsize, shape, stride)
        attributes = self._attributes.get(device)
        if attributes is None:
            whole = _fake(self._mode, empty, device)
            self._attributes[device] = dict(vars(whole))
            return whole
        tensor = torch.Tensor._make_subclass(
            _fake, empty, requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        vars(tensor).update(attributes)
        return tensor


def place(tensor: Any) -> int:
    """Return the bytes of a tensor's storage before it."""
    return tensor.storage_offset() * tensor.dtype.itemsize


def _slice_of(args: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
    """Return what determines the shape of a slice, and the bytes by which it begins behind its tensor."""
    tensor: Any = args[0]
    dimension, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    first, last, step = slice(start, end, step).indices(tensor.shape[dimension])
    size = first * tensor.stride()[dimension] * tensor.dtype.itemsize
    return (tensor, dimension, max(0, last - first), step), size


def _described(tensor: Any) -> Made:
    return Made(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, tensor.requires_grad)


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
_c10d: Any = torch.ops.c10d
_REPEATED = frozenset(
    getattr(_c10d, name).default for name in ("broadcast_", "allreduce_", "_allgather_base_", "_reduce_scatter_base_")
)
"""Collectives that return their first argument, and the handle of their work."""
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
    "attend": (0, None, 0.84),
    "attend_backward": (1, None, 2.3),
}
"""Positions of query and ``is_causal`` (None: it is), and number of products relative to the forward pass (the backward
has five); of cuDNN's (``ftmon::attend``) as many as FlashAttention 2 would compute in its time on an H200."""
_IN_VAIN = {"_varlen_attn": 1100, "_varlen_attn_backward": 1100, "attend": 500, "attend_backward": 750}
_MORE_IN_VAIN = 290
"""Keys per query that a kernel computes besides those of the causal mask: parts of blocks, and waits. Measured on an
H200, with documents of 38 to 2,048 tokens, and for full rows."""
_BORDERS = {"_varlen_attn": 3, "_varlen_attn_backward": 6, "attend": 3, "attend_backward": 6}
"""Position of the borders between the documents of packed rows."""
_ADAM_MOVES = 7 / 4  # A fused Adam reads a parameter, its gradient and two states, and writes all but the gradient

Counted = Operation | tuple[Collective, int, bool] | str
"""What is counted: operations, collectives by their bytes and whether they overlap computation, and ``_TOTALS``."""
_TOTALS = ("calls", "transfer_bytes", "host_bytes", "launches", "graphs")


class Counting:
    """Counts the work of one step."""

    def __init__(self, ranks: int, sequence_parallel_size: int = 1) -> None:
        """Start with empty counts; all ranks are in DeepSpeed's collectives but an all_to_all of shared sequences."""
        self._ranks = ranks
        self._sharing = sequence_parallel_size
        self.times = 1  # Weight of what is counted: one micro-step stands for all that are like it
        self.pairs_a_token: float | None = None
        """Pairs of query and key under the causal mask per token of packed rows; None: documents are equal."""
        self.label_share = 1.0  # Mean share of tokens that carry loss; in a dry run's micro-batch all do
        self._share = 1.0
        self._alike: dict[Any, tuple[Counted, int] | None] = {}
        self.clear()

    def clear(self) -> None:
        """Reset the counts for a step."""
        self._counts: Counter[Counted] = Counter()
        self.fetches = 0.0  # Gathers of modules' parameters by ZeRO-3 (``Work.fetches``)
        self._starts: list[tuple[int, Work]] = []  # Weight of each micro-step, and the work before it

    def counted(self) -> Counter[Counted]:
        """Return a copy of the counts."""
        return Counter(self._counts)

    def return_to(self, counted: Counter[Counted]) -> None:
        """Forget what was counted since ``counted``."""
        self._counts = counted

    def begin_micro_step(self, times: int) -> None:
        """Begin a micro-step that stands for ``times`` like it."""
        self.times = times
        self._starts.append((times, self.work()))

    def micro_step(self) -> Work:
        """Return the work of one micro-step between the first and the last; empty if there is none."""
        if len(self._starts) < 3:
            return Work([], [])
        (times, before), (_, after) = self._starts[1:3]
        return combined([(after, Fraction(1, times)), (before, Fraction(-1, times))])

    def work(self) -> Work:
        """Return the counted work."""
        of_sharing = self._sharing if self._sharing > 1 else self._ranks
        operations: list[Operation] = []
        communications: list[Communication] = []
        for one, count in self._counts.items():
            if isinstance(one, Operation):
                operations.append(msgspec.structs.replace(one, count=count))
            elif isinstance(one, tuple):
                kind, size, overlapped = one
                among = of_sharing if kind == "all_to_all" else self._ranks
                communications.append(Communication(kind, size, among, overlapped, count))
        calls, transferred, on_host, launches, graphs = (self._counts[name] for name in _TOTALS)
        return Work(operations, communications, calls, transferred, on_host, self.fetches, launches, graphs)

    @contextlib.contextmanager
    def apart(self) -> Generator[Counter["Counted"]]:
        """Count the body once, whatever the micro-step stands for, and only into the counter that it receives."""
        before, times = self._counts, self.times
        self._counts, self.times = Counter(), 1
        try:
            yield self._counts
        finally:
            self._counts, self.times = before, times

    @contextlib.contextmanager
    def over_labels(self) -> Generator[None]:
        """Count the operations in the body, those of the fused loss, as on the mean number of label tokens.

        Its work is proportional to them: to its chunks, each of which reads the weight and adds to its gradient. Memory
        is of the largest micro-batch, which can consist of answers; a chunk's logits take the same from few on.
        """
        self._share = self.label_share
        try:
            yield
        finally:
            self._share = 1.0

    def add(self, counted: Counter["Counted"]) -> None:
        """Count what was counted apart."""
        for one, count in counted.items():
            self._counts[one] += count * self.times

    def count(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, stream: int, key: Any = None
    ) -> None:
        """Count an operation of the dispatcher; collectives on streams other than 0 overlap with computation.

        Those with the same ``key`` of the cache of results are counted alike.
        """
        self._counts["calls"] += self.times
        if func.namespace == "c10d":
            self._communicate(func._overloadpacket.__name__, args, stream)
            return
        key = key and (key, self._share, self.pairs_a_token)
        found = self._alike.get(key, MISSING) if key else MISSING
        if found is MISSING:
            found = self._counted(func, args, kwargs, result)
            if key:
                self._alike[key] = found
        if found is not None:
            self._counts[found[0]] += found[1] * self.times

    def _counted(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[Counted, int] | None:
        """Return what an operation counts as, and how much of it; None: it has no kernel on the device."""
        packet = func._overloadpacket
        name = packet.__name__
        if func.is_view or name in _WITHOUT_KERNEL:
            return None
        inputs, outputs = list(_tensors((args, tuple(kwargs.values())))), list(_tensors(result))
        on_device = [one for one in (*outputs, *inputs) if one.device.type == "cuda"]
        if not on_device:
            return None
        if len(on_device) < len(inputs) + len(outputs) and name in ("copy_", "_to_copy"):
            return "transfer_bytes", min(map(bytes_read, (*outputs, *inputs)))
        moved = _moved(name, args, inputs, outputs)
        # Of a product's factors: the sum that it is added to can have a wider type.
        precision = _PRECISIONS.get(
            min((one.dtype for one in inputs), key=lambda dtype: dtype.itemsize, default=None), "fp32"
        )
        attention = _ATTENTION.get(name)
        flops = 0.0
        if attention is not None:
            flops = _attention_flops(args, kwargs, *attention, self._keys_of_packed(name, args), _IN_VAIN.get(name))
        elif packet in flop_registry:
            # Products with a type of their own (``dtype_out``) have it among their arguments.
            given = [one for one in args if not isinstance(one, torch.dtype)]
            flops = float(flop_registry[packet](*given, **kwargs, out_val=result))
        width = args[attention[0]].shape[-1] if attention is not None else 0
        kind: Any = "update" if name.startswith("_fused_adam") else "eager"
        share = self._share
        return Operation(flops * share, moved * share, precision, 1, width, kind), 1

    @contextlib.contextmanager
    def in_graph(self, kernels: int) -> Generator[None]:
        """Count the operations in the body as a call of compiled code, which launches so many kernels."""
        calls = self._counts["calls"]
        try:
            yield
        finally:
            self._counts["calls"] = calls
            self._counts["graphs"] += self.times
            self._counts["launches"] += kernels * self.times

    def kernel(self, moved: float) -> None:
        """Count a fused kernel that reads and writes ``moved`` bytes."""
        self._counts[Operation(0.0, moved, "fp32", memory="fused")] += self.times

    def update(self, tensors: Any) -> None:
        """Count a compiled optimizer's update of these tensors (parameters, gradients, states) as one kernel."""
        found = list(_tensors(tensors))
        moved = int(sum(map(bytes_read, found)) * _ADAM_MOVES)
        if any(one.device.type == "cuda" for one in found):
            self._counts[Operation(0.0, float(moved), "fp32", memory="update")] += self.times
        else:
            self._counts["host_bytes"] += moved * self.times

    def _keys_of_packed(self, name: str, args: tuple[Any, ...]) -> float | None:
        """Return the mean number of keys in the document of a token of packed rows; None for other attention."""
        if name not in _BORDERS:
            return None
        if self.pairs_a_token is not None:
            return 2 * self.pairs_a_token
        return args[_ATTENTION[name][0]].shape[0] / (args[_BORDERS[name]].shape[0] - 1)

    def _communicate(self, name: str, args: tuple[Any, ...], stream: int) -> None:
        kind = _COLLECTIVES.get(name)
        if kind is not None:
            # The whole tensor: the larger one of a gather's output or a scatter's input.
            size = max((sum(map(bytes_read, _tensors(one))) for one in args[:2]), default=0)
            self._counts[kind, size, stream != 0] += self.times


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def bytes_read(tensor: Any) -> int:
    """Return the bytes of reading a tensor; an expanded tensor is read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            size *= length
    return int(size) if tensor.numel() else 0


def _moved(name: str, args: tuple[Any, ...], inputs: Iterable[Any], outputs: Iterable[Any]) -> float:
    written = sum(map(bytes_read, outputs))
    if not written:  # a foreach operation returns nothing: it writes its first list
        lists = (args[0], args[2], args[3]) if name.startswith("_fused_adam") else args[:1]
        written = sum(map(bytes_read, _tensors(lists)))
    if name in _PICKS:
        return 2.0 * written
    read = sum(map(bytes_read, inputs))
    if name == "softmax_gradient":  # reads logits twice, and writes over them (``recipe/model/cross_entropy.py``)
        return float(read + 2 * written)
    if name in _WRITES_ONLY and args:
        read -= sum(map(bytes_read, _tensors(args[0])))
    return float(read + written)


def _attention_flops(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    position: int,
    causal_at: int | None,
    products: float,
    keys: float | None,
    in_vain: int | None,
) -> float:
    """Return the FLOPs of attention: two products over pairs of query and key, half of them under a causal mask.

    A kernel computes ``in_vain`` further keys of each query (None: those of full rows).

    Packed rows are joined, and attention stays within documents: a query has ``keys`` keys in its own document.
    """
    query, key = args[position], args[position + 1]
    given = causal_at is not None and len(args) > causal_at
    causal = causal_at is None or (args[causal_at] if given else kwargs.get("is_causal", False))
    if keys is not None:
        (queries, heads, width), most = query.shape, keys
    else:
        batch, heads, length, width = query.shape
        queries, most = batch * length, float(key.shape[2])
    each = most * (0.5 if causal else 1.0) + (_MORE_IN_VAIN if in_vain is None else in_vain)
    return 4.0 * heads * width * queries * each * products


_prim: Any = torch.ops.prim

Hidden = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called after an operation with its arguments and result; records its CUDA kernels' further allocations."""


class Recorder(TorchDispatchMode):
    """Records allocations and frees of fake tensors' storages into a trace, in order, by device and stream."""

    def __init__(self, trace: Trace, hidden: dict[Any, Hidden], counting: Counting, mode: FakeTensorMode) -> None:
        super().__init__()
        self.results = ResultCache(mode)
        self.trace = trace
        self.counting = counting
        self.stream = 0
        self._hidden = hidden
        self._works: dict[Any, Any] = {}
        """Handle of a finished collective by its operation: its process group is fake, and one is like another."""
        self._known: dict[int, Any] = {}
        self._lock = threading.RLock()
        self.in_backward = False
        self.vocabulary = 0  # Tokens of the model's vocabulary; 0: not known, and logits are not told apart
        self._recomputing = -1  # Event at which the recomputation of checkpointed layers began; -1: none is under way

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: ``torch.compile`` traces under this mode, which does not see it."""
        return True

    is_infra_mode = ignore_compile_internals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its allocations."""
        if func is _prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        special = _SCALARS.get(func)
        if special is not None:
            return special(args)
        self.notice_recomputation()
        hidden = self._hidden.get(func)
        results = self.results
        key = results.key(func, args, kwargs)
        result = self._collective(func, args) if key is None else results.kept(key, args, kwargs)
        if result is MISSING:
            result = func(*args, **kwargs)
            if key is not None:
                results.keep(key, func, args, kwargs, result)
        for tensor in _tensors(result):
            if isinstance(tensor, FakeTensor):
                self.follow(tensor)
        self.counting.count(func, args, kwargs, result, self.stream, key)
        if hidden is not None:
            hidden(self, func, args, kwargs, result)
        return result

    def _collective(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a collective; ``MISSING`` if it is none, or one without a known result."""
        if func not in _REPEATED:
            return MISSING
        work = self._works.get(func)
        if work is None:  # of other tensors, which it holds
            work = self._works[func] = func(*tree_map_only(torch.Tensor, torch.empty_like, args))[1]
        return args[0], work

    def notice_recomputation(self) -> None:
        """Record the start or end of recomputation, if it is one: only then a backward pass records a graph."""
        if not self.in_backward or torch.is_grad_enabled() == (self._recomputing >= 0):
            return
        if self._recomputing < 0:
            self._recomputing = len(self.trace.events)
            return
        self.trace.recomputed.append((self._recomputing, len(self.trace.events)))
        self._recomputing = -1

    def follow(self, tensor: Any) -> None:
        """Record the allocation of a tensor's storage, unless it is known, and later its free."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        handle = self.trace.allocate(storage.nbytes(), tensor.fake_device.type, self.stream)
        if self.vocabulary and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
            self.trace.logits.add(handle)
        self.adopt(tensor, handle)

    def adopt(self, tensor: Any, handle: int) -> None:
        """Record the free of a tensor's storage as that of an allocation."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._known[address] = (weakref.ref(storage, lambda _: self._gone(address)), handle)

    def _gone(self, address: int) -> None:
        entry = self._known.pop(address, None)
        if entry is not None:
            self.trace.free(entry[1])

    def handle_of(self, tensor: Any) -> int | None:
        """Return the trace's handle of a tensor's storage; None if it is not followed."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def stored(self) -> set[int]:
        """Return the trace's handles of all storages that exist."""
        return {handle for _, handle in self._known.values()}

    def rename(self, tensor: Any, device: str) -> None:
        """Count a tensor's storage on another device (``pinned``: page-locked host memory)."""
        handle = self.handle_of(tensor)
        if handle is not None:
            self.trace.move(handle, device)

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Generator[None]:
        """Count allocations in the body to a stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


def _scalar(args: tuple[Any, ...]) -> Any:
    """Return a substitute for a fake tensor's value: 1.0 keeps gradients finite; 0 and False mean nothing found."""
    constant = getattr(args[0], "constant", None)
    if constant is not None:
        return constant.item()
    dtype = args[0].dtype
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


_SCALARS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.equal.default: lambda args: True,
}
