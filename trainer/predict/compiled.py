"""Compiled layers in a dry run: traced and partitioned as torch.compile does, then run kernel by kernel.

Dynamo traces a layer, AOTAutograd divides its graph into forward and backward, and its partitioner decides what the
forward saves, all on fake tensors and with the functions that Inductor passes. Inductor's code generation needs a GPU's
compiler, so its fusion is imitated: matrix products, attention and other kernels of libraries run one by one and have
outputs of their own; the operations between them are fused, and only what a later kernel reads is held.
"""

import heapq
import math
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from ..recipe import step
from .record import Counted, Made, Recorder, Same, Taped, Trace, bytes_read, place


@contextmanager
def compiling(recorder: Recorder, note: Callable[[str], None]) -> Generator[None]:
    """Make what is given to ``torch.compile`` in the body run as kernels that ``recorder`` counts, also after it.

    Functions that libraries have compiled before, such as DeepSpeed's, stay as they are. What cannot be traced runs
    uncompiled; ``note`` is called with the reason.
    """
    import torch._dynamo.config as settings

    backend, plain = _backend(), torch.compile
    _recording[:] = [recorder]
    before = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    settings.disable = False
    changed: Any = torch
    changed.compile = lambda function, **named: _Traced(
        function, plain(function, **{**named, "backend": backend}), note
    )
    stepping: Any = step
    stepping.mark_varying = lambda batch: None  # sizes are known, and graphs with symbols are slower to trace
    try:
        yield
    finally:
        changed.compile = plain
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


class _Traced:
    """A compiled function, or the function itself once tracing it has failed."""

    def __init__(self, function: Any, compiled: Any, note: Callable[[str], None]) -> None:
        self._function = function
        self._call = compiled
        self._note = note

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        try:
            return self._call(*inputs, **named)
        except Exception as error:  # tracing runs nothing, so the function can be run after it
            if self._call is self._function or not type(error).__module__.startswith("torch._dynamo"):
                raise
            self._call = self._function
            cause = getattr(error, "inner_exception", error)
            self._note((str(cause).strip() or repr(cause)).splitlines()[0])
            return self._function(*inputs, **named)


_recording: list[Recorder] = []
"""The recorder of this process's last dry run: layers that an earlier one has traced are not traced again."""


@cache
def _backend() -> Any:
    """Return a backend of ``torch.compile`` that divides graphs as Inductor does."""
    compile_fx: Any = import_module("torch._inductor.compile_fx")
    compile_fx.config.joint_graph_constant_folding = False  # it computes constants on the device
    compile_fx.get_cuda_device_context = lambda _: nullcontext()
    return aot_autograd(
        fw_compiler=Plan,
        bw_compiler=Plan,
        inference_compiler=Plan,
        decompositions=import_module("torch._inductor.decomposition").select_decomp_table(),
        partition_fn=partial(_partition, compile_fx.partition_fn),
        keep_inference_input_mutations=True,
    )


_SOFTMAX = ("amax", "_softmax", "_safe_softmax")  # Operations of a softmax; each pattern of attention has one


_left_out: list[bool] = []  # Not empty: the patterns of attention were left out of Inductor's


def _partition(divide: Any, module: GraphModule, *inputs: Any, **named: Any) -> Any:
    """Divide a graph as Inductor does, which searches for patterns of attention only where something is a softmax.

    Fused kernels of attention, which decoder layers call, match none of them, and the search takes a tenth of the time.
    """
    fused: Any = import_module("torch._inductor.fx_passes.fuse_attention")
    joint: Any = import_module("torch._inductor.fx_passes.joint_graph")
    make_patterns = fused._sfdp_init
    if any(_name(node) in _SOFTMAX for node in module.graph.nodes):
        if _left_out:
            import_module("torch._inductor.pattern_matcher").init_once_fakemode(make_patterns)(torch.device("cuda", 0))
            _left_out.clear()
        return divide(module, *inputs, **named)
    if not joint.lazy_init.cache_info().currsize:
        _left_out.append(True)
    fused._sfdp_init = lambda *_, **__: None
    try:
        return divide(module, *inputs, **named)
    finally:
        fused._sfdp_init = make_patterns


_MOST_READS = 4
"""Inductor repeats an operation in each kernel that uses it, unless it reads more (``realize_reads_threshold``)."""
_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "var", "var_mean", "std", "any", "prod", "argmax", "argmin"))
_CREATIONS = frozenset(("full", "full_like", "zeros", "zeros_like", "ones", "empty", "empty_like", "iota", "arange"))
_ALSO_FUSED = frozenset(("cat", "constant_pad_nd", "slice_scatter", "select_scatter", "embedding", "_log_softmax"))
_ALSO_VIEWS = frozenset(("_unsafe_view", "_reshape_alias", "reshape", "broadcast_in_dim"))
INPUT, VIEW, FUSED, LIBRARY, OUTPUT = range(5)


class Unit(NamedTuple):
    """A kernel."""

    library: Node | None  # The call of a library's kernel; None: a fused kernel
    written: list[Node]  # Tensors that it allocates and later units read
    ends: list[Node]  # Tensors that no later unit reads
    moved: float  # Bytes that a fused kernel reads and writes


class Result(NamedTuple):
    """A result of a compiled graph."""

    recipe: Any  # How to make it; numbers and None are themselves
    handle: int | None = None  # Of the allocation that it holds; None: it is in another one's
    viewed: bool = False  # Whether it is a view, which AOTAutograd detaches before it saves it


class Call(NamedTuple):
    """What a call of a compiled graph allocates and frees, and returns."""

    before: list[Taped]  # Until the results are made; a negative number, inverted, is that of an input no longer held
    after: list[Taped]
    results: list["Result"]
    counted: Counter[Counted]


class _Inputs:
    def __init__(self, recorder: Recorder, inputs: list[Any]) -> None:
        self.count = len(inputs)
        self.offsets: list[int] = []
        self.numbers: dict[int, int] = {}  # Number of each tensor by its identity
        self.first: dict[int, int] = {}  # First of the tensors in an allocation
        self.kinds: list[Any] = []
        """What decides about allocations: equal for inputs with which a call repeats another."""
        for number, one in enumerate(inputs):
            if not isinstance(one, FakeTensor):
                self.kinds.append(one if isinstance(one, int | None) else id(one))
                self.offsets.append(0)
                continue
            tensor: Any = one
            handle = recorder.handle_of(tensor)
            self.numbers[id(tensor)] = number
            shared = None if handle is None else self.first.setdefault(handle, number)
            self.kinds.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, shared))
            self.offsets.append(place(tensor))


def _call(
    recorder: Recorder, inputs: _Inputs, results: list[Any], tape: list[Any], counted: Counter[Counted]
) -> Call | None:
    """Return a call that can be repeated; None if it has allocated what it neither returned nor freed."""
    born = {entry[0] for entry in tape if isinstance(entry, tuple)}
    left = born - {entry for entry in tape if isinstance(entry, int)}
    recipes: list[Result] = []
    made: dict[int, int] = {}
    for number, one in enumerate(results):
        if not isinstance(one, torch.Tensor):
            recipes.append(Result(one))
            continue
        handle = recorder.handle_of(one)
        if handle is None:
            return None
        offset, own = place(one), None
        if id(one) in inputs.numbers and handle in inputs.first:
            recipes.append(Result(Same(inputs.numbers[id(one)])))
            continue
        if handle in inputs.first:
            source = inputs.first[handle]
            offset -= inputs.offsets[source]
        elif handle in made:
            source = inputs.count + made[handle]
            offset -= place(results[made[handle]])
        else:
            source, own, made[handle] = -1, handle, number
        recipe = recorder.results.recipe(one, source, offset)
        if recipe is None:
            return None
        recipes.append(Result(recipe, own, one._is_view()))
    if left != made.keys() or not recorder.trace.logits.isdisjoint(born):
        return None
    own_events = [entry for entry in tape if not isinstance(entry, int) or entry < 0 or entry in born]
    returned = own_events.index(None)
    return Call(own_events[:returned], own_events[returned + 1 :], recipes, counted)


def _replay(trace: Trace, events: list[Taped], held: list[Any], handles: dict[int, int]) -> None:
    """Repeat a call's allocations and frees with its inputs; ``handles`` receives those of its allocations."""
    for event in events:
        if isinstance(event, tuple):
            handles[event[0]] = trace.allocate(*event[1:])
        elif event < 0:
            held[~event] = None
        else:
            trace.free(handles.pop(event))


class Plan:
    """One compiled graph, run on fake tensors: kernels in order, with the memory that they hold."""

    def __init__(self, module: GraphModule, inputs: Any) -> None:
        self._boxed_call = True  # of the instance: AOTAutograd wraps it, with its attributes
        graph = Graph(module)
        self._inputs = graph.inputs
        self._module = module
        self._owners = graph.owners
        self._units = graph.units()
        self._results: list[Any] = list(graph.output.args[0])  # type: ignore[call-overload]
        self._numbers = {node: number for number, node in enumerate(self._inputs)}
        self._recorder = _recording[0]
        self._calls: dict[Any, Call] = {}  # By the kind of inputs, stream and thread, which have their own workspaces

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the kernels; ``inputs`` is cleared, so that what nobody else holds is freed after its last use.

        A second call with inputs of the same kind, as of the next layer, repeats what the first one allocated.
        """
        if self._recorder is not _recording[0]:  # which has no workspaces yet
            self._recorder, self._calls = _recording[0], {}
        counting, before = self._recorder.counting, _Inputs(self._recorder, inputs)
        key = (self._recorder.stream, threading.get_ident(), counting.pairs_a_token, *before.kinds)
        if key in self._calls:
            return self._repeat(self._calls[key], inputs)
        with counting.apart() as counted, self._recorder.trace.taped() as tape:
            results = self._run(inputs, tape)
        counting.add(counted)
        call = _call(self._recorder, before, results, tape, counted)
        if call is not None:
            self._calls[key] = call
        return results

    def _repeat(self, call: Call, inputs: list[Any]) -> list[Any]:
        """Repeat a call's allocations and frees; only its results are made."""
        recorder = self._recorder
        recorder.notice_recomputation()
        held: list[Any] = list(inputs)
        inputs.clear()
        last = held[-1] if held else None  # as ``_run`` holds it
        handles: dict[int, int] = {}
        _replay(recorder.trace, call.before, held, handles)
        results: list[Any] = []
        for recipe, handle, viewed in call.results:
            made = recorder.results.make(recipe, [*held, *results]) if isinstance(recipe, Made | Same) else recipe
            if handle is not None:
                recorder.adopt(made, handles[handle])
            if viewed:
                with recorder.counting.apart():
                    made = torch.ops.aten.alias.default(made)
            results.append(made)
        _replay(recorder.trace, call.after, held, handles)
        del last
        recorder.counting.add(call.counted)
        return results

    def _run(self, inputs: list[Any], tape: list[Any]) -> list[Any]:
        held: dict[Node, dict[Node, Any]] = {}
        for node, value in zip(self._inputs, inputs, strict=True):
            held[node] = {node: value}
        inputs.clear()
        counting = self._recorder.counting
        with counting.in_graph(len(self._units)):
            for unit in self._units:
                if unit.library is not None:
                    self._call(unit.library, held)
                else:
                    self._fuse(unit, held)
                    counting.kernel(unit.moved)
                for node in unit.ends:
                    if node in held and node in self._numbers:
                        tape.append(~self._numbers[node])
                    held.pop(node, None)
            results = [self._value(one, held) for one in self._results]
        tape.append(None)
        tape += [~number for node, number in self._numbers.items() if node in held]
        return results

    def _call(self, node: Node, held: dict[Node, dict[Node, Any]]) -> None:
        target: Any = node.target
        args, named = torch.fx.map_arg((node.args, node.kwargs), lambda one: self._value(one, held))
        result = target(*args, **named)
        if isinstance(result, (tuple, list)):
            for user in node.users:
                held[user] = {user: result[user.args[1]]}  # type: ignore[index]
        else:
            held[node] = {node: result}

    def _fuse(self, unit: Unit, held: dict[Node, dict[Node, Any]]) -> None:
        """Allocate a fused kernel's outputs, in the memory of inputs of the same size that end with it."""
        free = [held[node][node] for node in unit.ends if node in held and node.op != "placeholder"]
        for node in unit.written:
            like = node.meta["val"]
            place = next((one for one in free if one.dtype == like.dtype and _size(one) == _size(like)), None)
            if place is None:
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            else:
                free = [one for one in free if one is not place]
                made = place.as_strided(like.shape, like.stride())
            held[node] = {node: made}

    def _value(self, node: Any, held: dict[Node, dict[Node, Any]]) -> Any:
        """Return the value of a tensor that is held, or of a view of one; numbers as they are."""
        if not isinstance(node, Node):
            return node
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        views = held.setdefault(self._owners[node], {})
        if node not in views:
            target: Any = node.target
            args, named = torch.fx.map_arg((node.args, node.kwargs), lambda one: self._value(one, held))
            views[node] = target(*args, **named)
        return views[node]


def _size(tensor: Any) -> int:
    return int(tensor.untyped_storage().nbytes())


class Graph:
    """The kernels of one graph of AOTAutograd."""

    def __init__(self, module: GraphModule) -> None:
        partitioners: Any = import_module("torch._functorch.partitioners")
        self._fusible = partitioners.get_default_op_list().fusible_ops
        self._nodes: list[Node] = list(module.graph.nodes)
        self._place = {node: number for number, node in enumerate(self._nodes)}
        self.inputs = [node for node in self._nodes if node.op == "placeholder"]
        self.output = next(node for node in self._nodes if node.op == "output")
        self._kinds = {node: self._kind(node) for node in self._nodes}
        self.owners: dict[Node, Node] = {}
        for node in self._nodes:
            source = node.args[0] if node.args and self._kinds[node] == VIEW else None
            # Each of several results of a library's call has memory of its own.
            part = node.target is operator.getitem and isinstance(source, Node) and self._kinds[source] == LIBRARY
            self.owners[node] = self.owners[source] if isinstance(source, Node) and not part else node
        self._reads: dict[Node, dict[Node, float]] = {}  # Bytes of each tensor that a kernel reads to compute a node
        self._held: set[Node] = set()  # Fused nodes that are computed once
        for node in self._nodes:
            self._add(node)

    def _kind(self, node: Node) -> int:
        if node.op in ("placeholder", "get_attr"):
            return INPUT
        if node.op == "output":
            return OUTPUT
        target: Any = node.target
        if target is operator.getitem:
            return VIEW
        value = node.meta.get("val")
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return VIEW  # a number
        name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""
        if name in _ALSO_VIEWS or (name and target.is_view):
            return VIEW
        fused = name in _ALSO_FUSED or name in _CREATIONS or name in _REDUCTIONS
        if fused or (name and (target.overloadpacket in self._fusible or torch.Tag.pointwise in target.tags)):
            return FUSED
        return LIBRARY

    def _add(self, node: Node) -> None:
        kind = self._kinds[node]
        if kind in (INPUT, VIEW):
            return
        reads: dict[Node, float] = {}
        for source in node.all_input_nodes:
            owner, value = self.owners[source], source.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            if self._kinds[owner] == FUSED and owner not in self._held:
                parts = self._reads[owner]
            else:
                parts = {owner: float(bytes_read(value))}
            for one, size in parts.items():
                reads[one] = min(reads.get(one, 0.0) + size, _storage(one))
        self._reads[node] = reads
        if kind == FUSED and self._is_held(node):
            self._held.add(node)

    def _unit_of(self, node: Node) -> Node:
        """Return the call that computes a tensor: one of a library can return several."""
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            return node.args[0]
        return node

    def _uses(self, node: Node) -> list[Node]:
        """Return the operations that read a tensor, also through views."""
        found: list[Node] = []
        for user in node.users:
            found += self._uses(user) if self._kinds[user] == VIEW else [user]
        return found

    def _is_held(self, node: Node) -> bool:
        uses = self._uses(node)
        if any(self._kinds[user] in (LIBRARY, OUTPUT) for user in uses):
            return True
        if not self._reads[node]:
            return False
        return _name(node) in _REDUCTIONS or (len(self._reads[node]) > _MOST_READS and len(set(uses)) > 1)

    def _is_outer(self, node: Node) -> bool:
        """Return whether a node sums over other dimensions than the last, as for the gradient of a norm's weight."""
        if _name(node) not in _REDUCTIONS:
            return False
        source: Any = node.args[0]
        over = node.args[1] if len(node.args) > 1 else None
        dimensions = source.meta["val"].dim()
        chosen = over if isinstance(over, (list, tuple)) else [over] if isinstance(over, int) else range(dimensions)
        return not any(int(one) % dimensions == dimensions - 1 for one in chosen)  # type: ignore[arg-type]

    def units(self) -> list[Unit]:
        """Return the kernels in an order in which they can run."""
        kernels = [node for node in self._nodes if node in self._held or self._kinds[node] == LIBRARY]
        readers: dict[Node, list[Node]] = {}
        for node in [*kernels, self.output]:
            for one in self._reads[node]:
                readers.setdefault(self._unit_of(one), []).append(node)
        groups = self._groups(kernels, readers)
        unit_of = {node: number for number, group in enumerate(groups) for node in group}
        reads: list[dict[Node, float]] = []
        for group in groups:
            outside: dict[Node, float] = {}
            for one, size in (item for node in group for item in self._reads[node].items()):
                if one not in group:
                    outside[one] = max(outside.get(one, 0.0), size)
            reads.append(outside)
        sources = [
            {unit_of[self._unit_of(one)] for one in outside if self._unit_of(one) in unit_of} for outside in reads
        ]
        order = self._ordered(groups, sources)
        last = {one: number for number in order for one in reads[number]}
        kept = {self.owners[one] for one in self.output.all_input_nodes}
        result: list[Unit] = []
        for number in order:
            group = groups[number]
            ends = [one for one in reads[number] if last[one] == number and one not in kept]
            if self._kinds[group[0]] == LIBRARY:
                result.append(Unit(group[0], [], ends, 0.0))
                continue
            written = [node for node in group if any(user not in group for user in readers[node])]
            moved = sum(reads[number].values()) + sum(_storage(node) for node in written)
            result.append(Unit(None, written, ends, moved))
        return result

    def _groups(self, kernels: list[Node], readers: dict[Node, list[Node]]) -> list[list[Node]]:
        """Return the nodes that one kernel computes: fused with what they read, and with others that read the same."""
        group_of = {node: [node] for node in kernels}

        def reaches(first: list[Node], second: list[Node]) -> bool:
            """Return whether something between must run after ``first`` and before ``second``."""
            seen: set[int] = {id(first)}
            waiting = [user for node in first for user in readers.get(node, []) if user not in second]
            while waiting:
                group = group_of.get(waiting.pop())
                if group is second:
                    return True
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    waiting += [user for node in group for user in readers.get(node, [])]
            return False

        def join(one: Node, other: Node) -> None:
            first, second = group_of[one], group_of[other]
            if first is second or self._shape(one) != self._shape(other):
                return
            if not reaches(first, second) and not reaches(second, first):
                first += second
                for node in second:
                    group_of[node] = first

        reading: dict[Node, list[Node]] = {}
        for node in kernels:
            if self._kinds[node] == LIBRARY:
                continue
            for source in self._reads[node]:
                if source in self._held and not self._is_outer(source):
                    join(source, node)
                for other in reading.setdefault(source, []):
                    join(other, node)
                reading[source].append(node)
        return list({id(group): group for group in group_of.values()}.values())

    def _shape(self, node: Node) -> tuple[int, bool]:
        """Return what nodes of one kernel have in common: the elements that it goes over, and in which order."""
        source: Any = node.args[0] if _name(node) in _REDUCTIONS else node
        return math.prod(source.meta["val"].shape), self._is_outer(node)

    def _ordered(self, groups: list[list[Node]], sources: list[set[int]]) -> list[int]:
        """Return the numbers of the groups in the order of the graph, each after those that it needs."""
        place = [max(self._place[node] for node in group) for group in groups]
        after: list[list[int]] = [[] for _ in groups]
        waiting = [len(one) for one in sources]
        for number, needed in enumerate(sources):
            for source in needed:
                after[source].append(number)
        ready = [(place[number], number) for number, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, number = heapq.heappop(ready)
            order.append(number)
            for later in after[number]:
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready, (place[later], later))
        return order


def _name(node: Node) -> str:
    target: Any = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""


def _storage(node: Node) -> float:
    value = node.meta["val"]
    return float(bytes_read(value)) if isinstance(value, torch.Tensor) else 0.0
