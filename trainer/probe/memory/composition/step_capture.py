"""Captures one step on the training thread: the storages, their parts, and when they were seen.

At the step's phase boundaries the engine, the model and the optimizer are walked. Storages that exist only between
boundaries are gradients that are reduced and freed at once, buckets, parameters that ZeRO-3 gathers and releases, and
gradients of the master copies. They are recorded in DeepSpeed's own calls, by wrappers on the instances for the length
of this one step. An ordinary step has no wrappers.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, NamedTuple

from .....protocol.messages.memory import Reason
from ... import guard
from ...phases.marks import Mark, wall_offset_ns
from ...phases.tracker import Tracker
from .residency import resident_bytes
from .storages import Held, Storages
from .walk import Roots, walk, walk_buckets, walk_gradients

MOST_GRADIENT_WALKS = 4
"""Backwards of one step to walk in; later ones reuse the addresses, or DeepSpeed's calls recorded their storages."""


MOST_SIGHTINGS = 100_000
"""Beyond these the capture fails: with an evaluation in the step, ZeRO-3 gathers parameters for each of its batches."""


class Sighting(NamedTuple):
    """A storage was seen at an address."""

    ns: int
    """``time.perf_counter_ns``."""
    address: int
    part: str


class Walked(NamedTuple):
    """Result of one walk."""

    ns: int
    """``time.perf_counter_ns``."""
    mark: int
    """Index of the step's mark at which the walk was."""
    held: dict[int, Held]
    resident: dict[str, int]
    """Bytes in physical memory by part; for host memory only."""


class StepCapture:
    """Watches the tracker from the next step's beginning to its end; then ``done``, and read by the publisher.

    A capture of the process's first step begins with the first phase after start-up.

    Args:
        tracker: the tracker; put the capture into its ``watchers``.
        roots: returns the objects to walk; called for each walk, on the training thread, as an optimizer may be made or
            freed in the step.
        cuda_index: the device; None: the host's memory.
        reason: reason of the capture (``protocol.messages.memory.Reason``).
    """

    def __init__(self, tracker: Tracker, roots: Callable[[], Roots], cuda_index: int | None, reason: Reason) -> None:
        self.reason: Reason = reason
        self.on_cuda = cuda_index is not None
        self.done = False
        self.failed = ""
        self.step = 0
        self.marks: list[Mark] = []
        """The step's marks, its beginning and its end included."""
        self.sightings: list[Sighting] = []
        self.recomputed: list[tuple[int, int]] = []
        """Begin and end of each forward inside a backward (``perf_counter_ns``): recomputed, checkpointed layers."""
        self.walks: list[Walked] = []
        self.hooked = True
        """Whether module hooks were installed; not with compiled code, which hooks would recompile."""
        self.offset_ns = 0
        """Offset from a mark's time to nanoseconds since the epoch."""
        self.walk_ns = 0
        self._tracker = tracker
        self._roots = roots
        self._cuda_index = cuda_index
        self._begun = False
        self._withdrawn = False
        self._backwards = 0
        self._undo: list[Callable[[], object]] = []
        self._undo_backward: list[Callable[[], object]] = []
        self._recompute_depth = 0
        self._recompute_ns = 0
        self._seen_buckets = False

    def __call__(self, ending: str, beginning: str) -> None:
        """Handle a phase boundary; the tracker calls this."""
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
        return beginning == "end" or (beginning in ("data", "forward") and tracker.marks[0].phase == "init")

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
        sums: dict[str, int] = {}
        for size, part in self.walks[-1].held.values() if self.walks else ():
            sums[part] = sums.get(part, 0) + size
        return sums

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

    # Walking -----------------------------------------------------------------------------------------------------

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

    # Storages between boundaries ----------------------------------------------------------------------------------

    def _tap(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def updating(*_: Any) -> None:
            self._safely(lambda: self._record_sightings(_walk_updated))

        self._undo.append(register_optimizer_step_pre_hook(updating).remove)
        wrapper = self._roots().wrapper
        self._wrap(wrapper, "reduce_ready_partitions_and_remove_grads", before=self._reducing)
        self._wrap(wrapper, "update_hp_grads", before=lambda *_: self._record_sightings(walk_gradients))
        offload = getattr(wrapper, "parameter_offload", None)
        self._wrap(getattr(offload, "param_coordinator", None), "fetch_sub_module", after=self._fetched)

    def _reducing(self, parameter: Any = None, *_: Any) -> None:
        """Record a gradient that has just been computed; runs before ZeRO's hook for it."""
        self._record_sighting("gradients", getattr(parameter, "grad", None))
        if hasattr(parameter, "ds_tensor"):
            self._record_sighting("parameters", parameter.data)
        if not self._seen_buckets:
            self._seen_buckets = True
            self._record_sightings(walk_buckets)

    def _fetched(self, module: Any = None, *_: Any) -> None:
        """Record the parameters of a module that ZeRO-3 has gathered."""
        for parameter in module.parameters(recurse=False):
            self._record_sighting("parameters", parameter.data)

    def _wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Replace a method on one instance until the step is over."""
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
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

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
    """Find the gradients that the innermost optimizer is about to use."""
    for group in getattr(roots.optimizer, "param_groups", None) or []:
        for parameter in group["params"]:
            storages.add("gradients", parameter.grad)


def compiles() -> bool:
    """Return whether this process uses torch.compile, which would recompile for new hooks."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return bool(counters and counters["frames"].get("total", 0))
