"""Captures one step: its storages, their parts, and when they were seen; and makes the message of it.

On a GPU the hub derives the compositions of peaks from the allocator's trace (``step_trace``). malloc has no trace, so
on the CPU only a phase's two ends are known (``composition_on_cpu``): the storages that walking finds, as far as they
are in physical memory, and glibc's allocated bytes. A phase's parts are those at the end with more allocated bytes.
Activations are the bytes that a forward left allocated beyond the known storages. The rest of the peak (code,
libraries, freed memory that glibc kept, memory allocated and freed in between) is ``unattributed``.
"""

import ctypes
import os
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from time import perf_counter_ns
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ....protocol.analysis.allocator.composition import UNCOMPOSED, occurrences
from ....protocol.messages.memory import PARTS, Composition, PhaseComposition, Reason, Sightings, StepMark, StepTrace
from ....protocol.snapshot.columns import Snapshot, compact
from .. import guard
from ..device.memory import Reading
from ..phases.tracker import Mark, Tracker, first_of_step, readings, wall_offset_ns
from ..rank.model import parameters_of

_DEEPEST = 5


class Held(NamedTuple):
    """A storage: bytes, and the part of ``protocol.messages.memory.PARTS`` it belongs to."""

    bytes: int
    part: str


class Storages:
    """The storages found on one device (a CUDA device's index; None: the host), each once, by address.

    The first claim of a storage decides its part.
    """

    def __init__(self, cuda_index: int | None) -> None:
        self.cuda_index = cuda_index
        self.held: dict[int, Held] = {}

    def add(self, part: str, value: Any) -> None:
        """Claim the storages of every tensor in ``value`` (a tensor, or containers of them) for ``part``."""
        for tensor in tensors(value):
            place = self.place(tensor)
            if place is not None:
                self.held.setdefault(place[0], Held(place[1], part))

    def place(self, tensor: Any) -> tuple[int, int] | None:
        """Return (address, bytes) of a tensor's storage; None when it has none on this device."""
        index = self.cuda_index
        if tensor.device.type != "cpu" if index is None else not (tensor.is_cuda and tensor.get_device() == index):
            return None
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            return None  # a tensor without a storage of its own (fake, functional, sparse)
        return (address, size) if address and size else None

    def by_part(self) -> dict[str, int]:
        """Sum up bytes by part."""
        return sum_by_part(self.held.values())


def sum_by_part(sizes: Iterable[tuple[int, str]]) -> dict[str, int]:
    """Sum up bytes by part."""
    sums: dict[str, int] = {}
    for size, part in sizes:
        sums[part] = sums.get(part, 0) + size
    return sums


def tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors in a tensor or in nested lists, tuples and dictionaries; of a subclass, its inner tensors."""
    if value is None or depth > _DEEPEST:
        return
    if hasattr(value, "untyped_storage"):
        local = getattr(value, "_local_tensor", None)  # torch.distributed's DTensor
        inner = getattr(value, "__tensor_flatten__", None)
        if local is not None:
            yield from tensors(local, depth + 1)
        elif inner is not None:
            yield from (getattr(value, name) for name in inner()[0])
        else:
            yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one, depth + 1)


_PAGE = os.sysconf("SC_PAGE_SIZE")
_SMALL = 16 * _PAGE
_mincore: Any = getattr(ctypes.CDLL(None), "mincore", None)


def resident_bytes(held: dict[int, Held]) -> dict[str, int]:
    """Return by part the bytes of storages that are in physical memory, by mincore(2): not pages never written."""
    return sum_by_part(
        (size if size < _SMALL else _resident(address, size), part) for address, (size, part) in held.items()
    )


def _resident(address: int, size: int) -> int:
    first = address - address % _PAGE
    pages = -(-(address + size - first) // _PAGE)
    found = (ctypes.c_ubyte * pages)()
    if _mincore is None or _mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * _PAGE), found) != 0:
        return size
    return max(0, size - bytes(found).count(0) * _PAGE)


# Attributes of DeepSpeed's optimizers, read in the source of 0.19.8 (``runtime/zero/stage_1_and_2.py``, ``stage3.py``,
# ``partition_parameters.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py``, ``fp16/unfused_optimizer.py``).
# Storages without such an attribute are not found; a wrong name has no other effect.
_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3__"

PARAMETERS = (
    *("bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer"),
)
MASTERS = (
    *("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"),
    *("fp32_groups_flat", "fp32_groups"),
)
GRADIENTS = (
    *("averaged_gradients", "grad_partitions_flat_buffer", "grads_in_partition", "all_grad_tensors"),
    *("fp32_groups_gradients_flat", "accumulated_grads_in_cpu", "offload_gradient_dict"),
)
PARTITIONS = (
    *("param_buffer_of_bit16_for_cpu_offload_groups", "param_groups_fp16_flat_cpu_memory", "hp_params_pin_buffers"),
    *("lp_params_pin_buffers", "lp_param_contiguous_pin_buffer", "lp_grad_partitions_flat_pin_buffers"),
)
BUCKETS = (
    *("temp_grad_buffer_for_gpu_offload", "temp_grad_buffer_for_cpu_offload", "_muon_allgather_buffers"),
    f"{_STAGE3}ipg_bucket_flat_buffer",
)

_OF_PARAMETER = {
    "ds_tensor": "parameters",  # ZeRO-3's partition of it
    "_local_shard": "parameters",  # FSDP's
    "_mp_shard": "parameters",
    "_full_param_padded": "parameters",
    "grad_accum": "gradients",  # DeepSpeed's, where gradients are added up in another dtype
    "main_grad": "gradients",  # Megatron's
    "_saved_grad_shard": "gradients",
    "ds_secondary_tensor": "partitions",  # ZeRO++'s copy within a node
}


class Roots:
    """Roots of a walk, each of which may be missing; ``optimizer``: the one that updates where no engine does."""

    def __init__(self, engine: Any, model: Any, optimizer: Any) -> None:
        self.wrapper = getattr(engine, "optimizer", None)
        """The engine's optimizer: a ZeRO or mixed-precision optimizer around a bare one, or the bare one."""
        self.model = model if model is not None else getattr(engine, "module", None)
        self.optimizer = _innermost(self.wrapper) if self.wrapper is not None else optimizer

    def parameters(self) -> list[Any]:
        """List the model's parameters; where no model is known, those the optimizer updates."""
        if self.model is not None:
            return list(self.model.parameters())
        return parameters_of(self.optimizer)


def walk(roots: Roots, storages: Storages) -> None:
    """Find every storage of ``roots``."""
    add, wrapper = storages.add, roots.wrapper
    parameters = roots.parameters()
    for parameter in parameters:
        add("parameters", parameter.data)
    if roots.model is not None:
        add("parameters", list(roots.model.buffers()))
    _add(storages, "parameters", wrapper, PARAMETERS)
    # A gradient may be a view of the bucket it is reduced in.
    walk_buckets(roots, storages)
    walk_gradients(roots, storages, parameters)
    for parameter in parameters:
        for name, value in vars(parameter).items():
            part = _OF_PARAMETER.get(name)
            if part is not None:
                add(part, value)
    state = getattr(roots.optimizer, "state", None)
    if isinstance(state, dict):
        add("optimizer_states", list(state.values()))
    _add(storages, "master_copies", wrapper, MASTERS)
    _add(storages, "partitions", wrapper, PARTITIONS)


def walk_gradients(roots: Roots, storages: Storages, parameters: Iterable[Any] | None = None) -> None:
    """Find the gradients alone: of the model, of the master copies, and DeepSpeed's partitions and accumulators."""
    for parameter in roots.parameters() if parameters is None else parameters:
        storages.add("gradients", parameter.grad)
    if roots.wrapper is not None:
        _walk_updated(roots, storages)
        _add(storages, "gradients", roots.wrapper, GRADIENTS)


def walk_buckets(roots: Roots, storages: Storages) -> None:
    """Find the reduction buckets alone."""
    _add(storages, "buckets", roots.wrapper, BUCKETS)
    buckets = getattr(roots.wrapper, "ipg_buckets", None)
    if isinstance(buckets, dict):
        for bucket in buckets.values():
            storages.add("buckets", getattr(bucket, "buffer", None))


def _add(storages: Storages, part: str, owner: Any, names: Iterable[str]) -> None:
    if owner is not None:
        for name in names:
            storages.add(part, getattr(owner, name, None))


def _innermost(optimizer: Any) -> Any:
    for _ in range(4):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    return optimizer


MOST_GRADIENT_WALKS = 4
"""Backwards of one step to walk in; later ones reuse the addresses, or DeepSpeed's calls recorded their storages."""

MOST_SIGHTINGS = 100_000
"""Beyond these the capture fails: with an evaluation in the step, ZeRO-3 gathers parameters for each of its batches."""


class Sighting(NamedTuple):
    """A storage was seen at an address, at a time of ``time.perf_counter_ns``."""

    ns: int
    address: int
    part: str


class Walked(NamedTuple):
    """Result of one walk, at a time of ``time.perf_counter_ns``."""

    ns: int
    mark: int
    held: dict[int, Held]
    resident: dict[str, int]  # Bytes in physical memory by part; for host memory only


class StepCapture:
    """Watches the tracker from the next step's beginning to its end; then ``done``, and read by the publisher.

    At the step's phase boundaries the engine, the model and the optimizer are walked. Storages that exist only between
    boundaries are gradients that are reduced and freed at once, buckets, parameters that ZeRO-3 gathers and releases,
    and gradients of the master copies. They are recorded in DeepSpeed's own calls, by wrappers on the instances for the
    length of this one step. An ordinary step has no wrappers. A capture of the process's first step begins with the
    first phase after start-up.

    ``roots`` is called for each walk, on the training thread: an optimizer may be made or freed in the step. Without
    ``cuda_index`` the host's memory is walked.
    """

    def __init__(self, tracker: Tracker, roots: Callable[[], Roots], cuda_index: int | None, reason: Reason) -> None:
        self.reason: Reason = reason
        self.on_cuda = cuda_index is not None
        self.done = False
        self.failed = ""
        self.unfinished = False  # Whether the step had no update when the capture ended
        self.step = 0
        self.marks: list[Mark] = []
        self.sightings: list[Sighting] = []
        self.recomputed: list[tuple[int, int]] = []
        """Begin and end of each forward inside a backward (``perf_counter_ns``): recomputed, checkpointed layers."""
        self.walks: list[Walked] = []
        self.hooked = True  # Whether module hooks were installed; not with compiled code, which hooks would recompile
        self.offset_ns = 0
        self.walk_ns = 0
        self._tracker, self._roots, self._cuda_index = tracker, roots, cuda_index
        self._begun = self._withdrawn = self._seen_buckets = False
        self._backwards = self._recompute_depth = self._recompute_ns = 0
        self._undo: list[Callable[[], object]] = []
        self._undo_backward: list[Callable[[], object]] = []

    def __call__(self, ending: str, beginning: str) -> None:
        """Handle a phase boundary."""
        start = perf_counter_ns()
        try:
            if self.done:
                self._leave()
            elif self._withdrawn:
                self._finish()
            elif self._begun:
                self._boundary(ending, beginning)
            elif self._begins_with(beginning):
                self._begin()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            guard.log_error("a step capture", error)
            self._finish()
        self.walk_ns += perf_counter_ns() - start

    def _begins_with(self, beginning: str) -> bool:
        tracker = self._tracker
        if (tracker.memory.measure == "cuda") != self.on_cuda:
            return False
        if beginning == "backward":  # the forward was not seen to begin
            roots = self._roots()
            return roots.optimizer is None and roots.wrapper is None and tracker.marks[0].phase == "init"
        return beginning == "end" or (beginning in ("data", "forward", "idle") and tracker.marks[0].phase == "init")

    def _begin(self) -> None:
        self._begun = True
        self.marks = self._tracker.marks
        self._walk()
        if self.on_cuda:
            self.hooked = not compiles()
            if self.hooked:
                self._tap()

    def _boundary(self, ending: str, beginning: str) -> None:
        if not self.on_cuda:
            self._walk()
        elif ending == "backward":
            self._off(self._undo_backward)
            self._backwards += 1
            if self._backwards == 1:
                self._walk()
            elif self._backwards <= MOST_GRADIENT_WALKS or beginning == "optimizer":
                self._record_sightings(walk_gradients)
        elif beginning == "optimizer":
            self._record_sightings(walk_gradients)
        if beginning == "backward" and self.hooked and self.on_cuda:
            self._seen_buckets = False  # ZeRO allocates new ones for every backward
            self._watch_modules()
        if beginning == "pause":
            if self.on_cuda:
                self._walk()
            self.unfinished = True
            self._finish()
            first = self.walks[0].mark
            self.marks, self.step = self.marks[first:], self.step + 1
            self.walks = [walk._replace(mark=walk.mark - first) for walk in self.walks]
        if beginning == "end":
            if self.on_cuda:
                self._walk()
            if self.marks and self._tracker.marks and self.marks[-1] is not self._tracker.marks[0]:
                self.failed = "the step began on another device"
            self._finish()

    def _finish(self) -> None:
        self.step = self._tracker.step
        self.offset_ns = wall_offset_ns()
        self._off(self._undo_backward)
        self._off(self._undo)
        self._leave()
        self.done = True

    def known(self) -> dict[str, int]:
        """Sum up the bytes of the storages that the last walk found, by part."""
        return sum_by_part(self.walks[-1].held.values()) if self.walks else {}

    def withdraw(self) -> None:
        """Stop capturing; wrappers on the training thread are removed at the next boundary. Any thread."""
        self.failed = self.failed or "given up"
        self._withdrawn = True

    def _leave(self) -> None:
        tracker = self._tracker
        tracker.watchers = tuple(watcher for watcher in tracker.watchers if watcher is not self)

    @staticmethod
    def _off(undo: list[Callable[[], object]]) -> None:
        while undo:
            with suppress(Exception):
                undo.pop()()

    def _walk(self) -> None:
        found, now = Storages(self._cuda_index), perf_counter_ns()
        walk(self._roots(), found)
        resident = {} if self.on_cuda else resident_bytes(found.held)
        self.walks.append(Walked(now, len(self.marks) - 1, found.held, resident))

    def _record_sightings(self, walk_part: Callable[[Roots, Storages], None]) -> None:
        found, now = Storages(self._cuda_index), perf_counter_ns()
        walk_part(self._roots(), found)
        self._add_sightings(Sighting(now, address, held.part) for address, held in found.held.items())

    def _record_sighting(self, part: str, tensor: Any) -> None:
        if tensor is not None:
            place = Storages(self._cuda_index).place(tensor)
            if place is not None:
                self._add_sightings((Sighting(perf_counter_ns(), place[0], part),))

    def _add_sightings(self, sightings: Iterable[Sighting]) -> None:
        if len(self.sightings) < MOST_SIGHTINGS:
            self.sightings += sightings
        elif not self._withdrawn:
            self.failed = f"more than {MOST_SIGHTINGS:,} storages came and went in the step"
            self.withdraw()

    def _tap(self) -> None:
        def updating(*_: Any) -> None:
            self._safely(lambda: self._record_sightings(_walk_updated))

        self._undo.append(register_optimizer_step_pre_hook(updating).remove)
        wrapper = self._roots().wrapper
        self._wrap(wrapper, "reduce_ready_partitions_and_remove_grads", before=self._reducing)
        self._wrap(wrapper, "update_hp_grads", before=lambda *_: self._record_sightings(walk_gradients))
        offload = getattr(wrapper, "parameter_offload", None)
        self._wrap(getattr(offload, "param_coordinator", None), "fetch_sub_module", after=self._fetched)

    def _reducing(self, parameter: Any = None, *_: Any) -> None:
        self._record_sighting("gradients", getattr(parameter, "grad", None))
        if hasattr(parameter, "ds_tensor"):
            self._record_sighting("parameters", parameter.data)
        if not self._seen_buckets:
            self._seen_buckets = True
            self._record_sightings(walk_buckets)

    def _fetched(self, module: Any = None, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._record_sighting("parameters", parameter.data)

    def _wrap(
        self, owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
    ) -> None:
        real = getattr(owner, name, None)
        if real is None or name in vars(owner):
            return

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._safely(before, args)
            found = real(*args, **kwargs)
            self._safely(after, args)
            return found

        # A strong reference would keep the memory of an optimizer that the script drops in this step.
        known = weakref.ref(owner)

        def unwrap() -> None:
            found = known()
            if found is not None:
                vars(found).pop(name, None)

        setattr(owner, name, wrapped)
        self._undo.append(unwrap)

    def _watch_modules(self) -> None:
        """Record forwards of modules inside the backward: recomputation, which allocates activations."""

        def entering(*_: Any) -> None:
            if self._recompute_depth == 0:
                self._recompute_ns = perf_counter_ns()
            self._recompute_depth += 1

        def leaving(*_: Any) -> None:
            self._recompute_depth -= 1
            if self._recompute_depth == 0:
                self.recomputed.append((self._recompute_ns, perf_counter_ns()))

        self._recompute_depth = 0
        # Recomputation ends early, with an exception that no module sees, once no more of a layer is needed.
        self._undo_backward.append(register_module_forward_pre_hook(entering).remove)
        self._undo_backward.append(register_module_forward_hook(leaving, always_call=True).remove)

    def _safely(self, call: Callable[..., None] | None, args: tuple[Any, ...] = ()) -> None:
        if call is None:
            return
        start = perf_counter_ns()
        try:
            call(*args)
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
        self.walk_ns += perf_counter_ns() - start


def _walk_updated(roots: Roots, storages: Storages) -> None:
    for parameter in parameters_of(roots.optimizer):
        storages.add("gradients", parameter.grad)


def compiles() -> bool:
    """Return whether this process uses torch.compile, which would recompile for new hooks."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return bool(counters and counters["frames"].get("total", 0))


_PART = {name: number for number, name in enumerate(PARTS)}


def step_trace(
    capture: StepCapture,
    take: Callable[[], dict[str, Any]],
    device: int,
    rank: int,
    read: Callable[[Any], Reading],
    room: int,
    reserved_before: int,
) -> StepTrace:
    """Return the message of a step on a GPU."""
    start = time.perf_counter_ns()
    snapshot = _columns(take(), device)
    return StepTrace(
        rank=rank,
        step=capture.step,
        time=time.time(),
        device=device,
        marks=step_marks(capture, readings(capture.marks, read)),
        first=first_of_step(capture.marks),
        snapshot=snapshot,
        room=room,
        sightings=_sightings(capture),
        recomputed=[(_us(capture, begin), _us(capture, end)) for begin, end in capture.recomputed],
        reason=capture.reason,
        hooked=capture.hooked,
        known=capture.known(),
        reserved_before=reserved_before,
        walk_us=capture.walk_ns // 1000,
        read_us=(time.perf_counter_ns() - start) // 1000,
    )


def step_marks(capture: StepCapture, figures: list[Reading]) -> list[StepMark]:
    """Return a capture's marks with their figures."""
    return [
        StepMark(
            mark.phase,
            _us(capture, mark.ns),
            figure.allocated,
            figure.allocated_peak,
            figure.retries,
            mark.memory is not None,
        )
        for mark, figure in zip(capture.marks, figures, strict=True)
    ]


def _us(capture: StepCapture, ns: int) -> int:
    return (ns + capture.offset_ns) // 1000


def _columns(raw: dict[str, Any], device: int) -> Snapshot:
    """Return one device's part of PyTorch's snapshot as columns, without fields that are not used."""
    raw["segments"] = [segment for segment in raw["segments"] if segment["device"] == device]
    raw["device_traces"] = [
        entries if index == device else [] for index, entries in enumerate(raw.pop("device_traces"))
    ]
    raw.pop("external_annotations", None)
    found = compact(raw, "", with_stacks=False)
    own = found.trace(device)
    return replace(found, traces=[] if own is None else [replace(own, streams=b"", notes=b"")], notes=[])


def _sightings(capture: StepCapture) -> list[Sightings]:
    found = [
        _at(_us(capture, capture.marks[walk.mark].ns), walk.mark, [(at, held.part) for at, held in walk.held.items()])
        for walk in capture.walks
    ]
    for ns, seen in groupby(capture.sightings, attrgetter("ns")):
        found.append(_at(_us(capture, ns), -1, [(one.address, one.part) for one in seen]))
    return found


def _at(us: int, mark: int, seen: list[tuple[int, str]]) -> Sightings:
    addresses = array("Q", [address for address, _ in seen])
    return Sightings(us, mark, addresses.tobytes(), bytes([_PART[part] for _, part in seen]))


NOTE = (
    "the CPU has no trace of allocations: the parts are those at whichever end of the phase had more allocated. "
    "Activations are what the forward left allocated, and temporaries cannot be distinguished"
)


class _Edge:
    def __init__(self, figure: Reading, walked: Walked) -> None:
        self.in_use, self.reserved, self.resident = figure.allocated, figure.reserved, walked.resident
        self.unknown = max(0, figure.allocated - sum(held.bytes for held in walked.held.values()))
        """Bytes allocated from glibc that belong to no known storage."""


def composition_on_cpu(capture: StepCapture, rank: int, read: Callable[[Any], Reading]) -> Composition:
    """Return the composition of a step on the CPU."""
    start, figures = time.perf_counter_ns(), readings(capture.marks, read)
    marks = step_marks(capture, figures)
    phases = _compose(marks, figures, capture.walks, marks[first_of_step(capture.marks)].us)
    return Composition(
        rank=rank,
        step=capture.step,
        time=time.time(),
        measure="glibc",
        phases=phases,
        reason=capture.reason,
        known=capture.known(),
        allocated_bytes=figures[-1].allocated,
        reserved_bytes=figures[-1].reserved,
        walk_us=capture.walk_ns // 1000,
        read_us=(time.perf_counter_ns() - start) // 1000,
        note=NOTE,
    )


def _compose(
    marks: list[StepMark], figures: list[Reading], walks: list[Walked], origin_us: int
) -> list[PhaseComposition]:
    """Compose each phase's highest peak from the memory at its ends."""
    walked = {walk.mark: walk for walk in walks}
    found: dict[str, PhaseComposition] = {}
    saved = 0
    for name, first, last, _, _ in occurrences(marks):
        if first not in walked or last not in walked:
            continue
        start, end = _Edge(figures[first], walked[first]), _Edge(figures[last], walked[last])
        if name == "forward":
            saved = max(0, end.unknown - start.unknown)
        peak = max(figure.resident_peak for figure in (*figures[first + 1 : last + 1], figures[last]))
        peak = max(peak, figures[first].resident, figures[last].resident)
        at_end = end.in_use >= start.in_use
        live = saved if (name == "forward" and at_end) or (name == "backward" and not at_end) else 0
        if name not in UNCOMPOSED and (name not in found or peak > found[name].peak_bytes):
            edge = end if at_end else start
            at_us = max(0, marks[last if at_end else first].us - origin_us)
            found[name] = PhaseComposition(name, peak, _parts(edge, live, peak), at_us, edge.reserved)
    return list(found.values())


def _parts(edge: _Edge, saved: int, peak: int) -> dict[str, int]:
    """Divide the peak into parts, the most certain part first."""
    parts: dict[str, int] = {}
    rest = peak
    for part, size in (*edge.resident.items(), ("activations", saved), ("other", max(0, edge.unknown - saved))):
        taken = min(size, rest)
        if taken:
            parts[part] = parts.get(part, 0) + taken
            rest -= taken
    if rest:
        parts["unattributed"] = rest
    return parts
