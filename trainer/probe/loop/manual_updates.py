"""Detects updates without an optimizer of PyTorch: the script, or a library like fastai, changes the parameters itself.

No hook sees such an update. One of the parameters that the backward reached shows it: its gradient is another tensor
afterwards, or the gradient or the parameter was written to. That is checked as the loop goes on: when a batch is
fetched, or a forward, a backward or an evaluation begins. Gradients that are set to zero have been used. Unchanged
gradients are accumulated.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn import Parameter

from ..guard import Guard, guarded
from ..phases.forwards import Forwards
from ..phases.marks import Mark, StepRaw
from ..phases.tracker import Tracker

_HELD = 2
"""Number of first updates held back: a script may check its gradients before it makes its optimizer."""
_MOST_NODES = 200_000


class ManualUpdater:
    """Stands for an optimizer: the parameters that the script updates itself."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters that are still alive, as an optimizer has them."""
        return [{"params": [found for reference in self._parameters if (found := reference()) is not None]}]


class ManualUpdates:
    """Ends steps while there is no optimizer, on the training thread alone.

    Args:
        guard: the probe's switch.
        tracker: the phase machine.
        forwards: receives the updater.
        finish: called with each finished step.
    """

    def __init__(self, guard: Guard, tracker: Tracker, forwards: Forwards, finish: Callable[[StepRaw], None]) -> None:
        self.guard = guard
        self._tracker = tracker
        self._forwards = forwards
        self._finish = finish
        self._has_optimizer = False
        self._updater: ManualUpdater | None = None
        self._watched: Any = None
        """Weak reference to the parameter that shows updates."""
        self._left: tuple[Any, ...] | None = None
        """Its state as the latest backward left it; None: no gradients are waiting for an update."""
        self._end: tuple[list[Mark], int] = [], 0
        """The mark at which that backward ended."""
        self._held: list[StepRaw] | None = []
        """The first steps; None: they were finished."""
        self._is_unseen = False
        """Whether only the zeroing of gradients showed the latest update."""

    @guarded
    def found_optimizer(self) -> None:
        """Handle the creation of an optimizer: its updates are the steps from now on."""
        if self._has_optimizer:
            return
        self._go_on()
        self._has_optimizer, self._updater, self._left = True, None, None
        held, self._held = self._held, None
        if held:
            tracker = self._tracker
            marks = [mark for raw in held for mark in raw.marks[:-1]]
            tracker.marks = [mark._replace(phase=mark.phase and "init") for mark in marks] + tracker.marks
            tracker.rename("init")

    @guarded
    def going_backward(self, losses: Sequence[Any]) -> ManualUpdater | None:
        """Handle the start of a backward; return the updater if it is found now."""
        if self._has_optimizer:
            return None
        self._go_on(late=True)
        if self._updater is not None and self._watched() is not None:
            return None
        leaves = [leaf for loss in losses for leaf in _leaves(loss)]
        watched = next((leaf for leaf in leaves if isinstance(leaf, Parameter)), leaves[0] if leaves else None)
        if watched is None:
            return None
        self._watched = weakref.ref(watched)
        self._updater = ManualUpdater(leaves)
        self._forwards.add_optimizer(self._updater)
        return self._updater

    @guarded
    def went_backward(self, taken: bool = False) -> None:
        """Handle the end of a backward.

        Args:
            taken: whether the script received the gradients, so that the parameters have none.
        """
        if self._updater is None:
            return
        marks = self._tracker.marks
        self._end = marks, len(marks) - 1
        self._left = () if taken else self._state()

    @guarded
    def go_on(self) -> None:
        """End the step if there was an update since the latest backward; called as the loop goes on."""
        if self._left is not None:
            self._go_on()

    @guarded
    def zeroing(self) -> None:
        """End the step: the gradients are about to be set to zero, so they were used."""
        if self._left is not None:
            self._is_unseen = self._left == self._state()
            self._left = ()
            self._go_on()

    @guarded
    def finish(self) -> None:
        """End the last step and send the steps held back; the process ends."""
        if self._left is not None and self._is_unseen:
            self._left = ()
        self._go_on()
        self._finish_held()

    def _go_on(self, late: bool = False) -> None:
        left, tracker = self._left, self._tracker
        if left is None or tracker.depth or (left and left == self._state()):
            return
        self._left = None
        marks, index = self._end
        # Without any hook before the backward, the forward before it began when the latest backward ended.
        at = index if late and marks is tracker.marks and marks[index].memory is not None else None
        tracker.notes.use_gradient_losses()
        self._forwards.end_step()
        raw = tracker.end_part(at=at)
        if self._held is None:
            self._number(raw)
            return
        self._held.append(raw)
        if len(self._held) > _HELD:
            self._finish_held()

    def _finish_held(self) -> None:
        held, self._held = self._held, None
        for raw in held or []:
            self._number(raw)

    def _number(self, raw: StepRaw) -> None:
        self._tracker.step += 1
        self._finish(raw._replace(number=self._tracker.step))

    def _state(self) -> tuple[Any, ...]:
        parameter = self._watched()
        if parameter is None:
            return (None,)
        gradient = parameter.grad
        return parameter._version, id(gradient), None if gradient is None else gradient._version


def _leaves(loss: Any) -> Iterator[Any]:
    """Yield the tensors whose gradients the backward of ``loss`` computes."""
    first = getattr(loss, "grad_fn", None)
    pending, seen = [first] if first is not None else [], {first}
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
