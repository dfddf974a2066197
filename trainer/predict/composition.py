"""Composition of each peak of a dry run, by the rules of a live run's composition."""

from array import array
from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from ...protocol.analysis.allocator.allocations import BEFORE
from ...protocol.analysis.allocator.composition import Attribution, Span, Timeline
from ...protocol.messages.memory import PARTS, PhaseComposition
from ..probe.memory.composition import Roots, Storages, walk, walk_buckets, walk_gradients
from .record import ALLOCATE, END, FREE, MARK, Recorder, Trace


class Sightings:
    """Records the storages of parameters, gradients, states and buckets, while ``watching``."""

    def __init__(self, recorder: Recorder) -> None:
        self.watching = False
        self._recorder = recorder
        self._roots = Roots(None, None, None)
        self._seen_buckets = False

    def begin(self, engine: Any) -> None:
        """Begin to watch an engine for a step."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if self._roots.wrapper is None:
            self._roots = Roots(engine, getattr(engine, "module", None), None)
            self._tap()
            register_optimizer_step_pre_hook(lambda *_: self.gradients())
        self.watching = True

    def boundary(self, phase: str) -> None:
        """Walk engine, model and optimizer at a phase boundary."""
        if self.watching:
            self._note(walk)
            self._seen_buckets = self._seen_buckets and phase != "backward"

    def gradients(self) -> None:
        """Record the gradients alone."""
        if self.watching:
            self._note(walk_gradients)

    def fetched(self, module: Any) -> None:
        """Record the parameters that ZeRO-3 has gathered."""
        if self.watching:
            own = [parameter.data for parameter in module.parameters(recurse=False)]
            self._note(lambda _, storages: storages.add("parameters", own))

    def _tap(self) -> None:
        wrapper = self._roots.wrapper
        for name in ("reduce_ready_partitions_and_remove_grads", "update_hp_grads"):
            real = getattr(wrapper, name, None)
            if real is not None:
                setattr(wrapper, name, self._before(real))

    def _before(self, real: Any) -> Any:
        """Record a gradient that ZeRO is about to reduce, and the buckets once per backward pass."""

        def wrapped(*args: Any, **named: Any) -> Any:
            if self.watching:
                gradient = getattr(args[0], "grad", None) if args else None
                self._note(lambda _, storages: storages.add("gradients", gradient))
                if not self._seen_buckets:
                    self._seen_buckets = True
                    self._note(walk_buckets)
            return real(*args, **named)

        return wrapped

    def _note(self, look: Any) -> None:
        storages = _DryStorages(self._recorder)
        look(self._roots, storages)
        for handle, held in storages.held.items():
            self._recorder.trace.see(handle, held.part)


class _DryStorages(Storages):
    """Storages by their handle, as fake tensors have no addresses."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(0)
        self._recorder = recorder

    def place(self, tensor: Any) -> tuple[int, int] | None:
        handle = self._recorder.handle_of(tensor) if tensor.device.type == "cuda" else None
        return None if handle is None else (handle, tensor.untyped_storage().nbytes())


class _DryTimeline(Timeline):
    """The trace in the form of a live run's: allocations with the entries that began and freed them, and their sum."""

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        of: Any = SimpleNamespace(begins=array("q"), freed=array("q"), sizes=array("q"))
        self.parts: dict[int, str] = {}
        self.logits: set[int] = set()
        number: dict[int, int] = {}
        changes = [0] * len(events)
        for index, (kind, handle, _, _, _) in enumerate(events):
            if kind == ALLOCATE:
                size = trace.block_bytes[handle]
                number[handle] = len(of.begins)
                if handle in trace.parts:
                    self.parts[len(of.begins)] = trace.parts[handle]
                if handle in trace.logits:
                    self.logits.add(len(of.begins))
                of.begins.append(index)
                of.freed.append(len(events))
                of.sizes.append(size)
                changes[index] = size
            elif kind == FREE:
                own = number[handle]
                of.freed[own] = index
                changes[index] = -of.sizes[own]
        self.allocations = of
        self.allocated = array("q", accumulate(changes, initial=0))
        self.reserved = self.times = array("q", bytes(8 * (len(events) + 1)))


def compose(trace: Trace, start: int) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Return the composition of each phase's highest peak since an event: bytes by part, and of these the logits'.

    The parts (``protocol.messages.memory.PARTS``) of a phase add up to its highest allocated bytes.
    """
    timeline = _DryTimeline(trace)
    spans = list(_spans(trace, timeline, start))

    def phases(parts: dict[int, str]) -> list[PhaseComposition]:
        return Attribution(timeline, spans, parts, sorted(trace.recomputed), BEFORE).phases()

    logits = dict.fromkeys(timeline.logits - timeline.parts.keys(), _LOGITS)
    found = phases(timeline.parts)
    without = {one.name: one.parts for one in (phases(timeline.parts | logits) if logits else found)}
    return {
        one.name: (
            {part: one.parts[part] for part in PARTS if one.parts.get(part)},
            {part: size - without[one.name].get(part, 0) for part, size in one.parts.items()},
        )
        for one in found
    }


_LOGITS = "logits"


def _spans(trace: Trace, timeline: Timeline, start: int) -> Iterable[Span]:
    begin, name = start, ""
    for index in range(start, len(trace.events)):
        kind, _, _, _, phase = trace.events[index]
        if kind == MARK:
            begin, name = index, phase
        elif kind == END and phase == name:
            yield Span(name, begin, index, max(timeline.allocated[begin : index + 1]), True, 0)
