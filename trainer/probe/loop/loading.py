"""Follows dataloaders: whether their batches are trained on, evaluated or left out."""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any

import torch

from ..guard import guarded, nothing
from ..phases.tracker import BatchesNoted, Mark, Notes, Tracker
from ..values import batch
from ..values.batch import FetchedBatches
from .state import EvalMode, Loop, OneEach

_ENOUGH = 2
"""From this number of batches without a backward on, they are no part of a step with several dataloaders."""
_PHASES = ("data", "forward", "idle")


class LoaderPass:
    """Detects batches that a plain loop fetched and did not train on; for the training thread alone.

    Where no hook sees the forward, a batch counts as training once it was fetched. If a dataloader is exhausted without
    a backward, or two of its batches are fetched and the next one is of another dataloader, they were evaluated: their
    phases become ``eval``, and their samples and tokens belong to no step.

    A loop that trains on each batch by itself leaves a batch out if it fetches another one of the same dataloader
    before any backward: its forward failed, or its loss was not finite. That batch belongs to no step either. Some
    loops fetch batches ahead, as accelerate does: they leave out none of the first batches of a dataloader.

    If the model is put into evaluation mode after a batch was fetched, and another batch of the same dataloader follows
    before any backward, both are evaluated (ignite fetches first).

    Where each backward has one batch, a single batch may be left out, too: it was only inspected, or the loop stopped
    at its limit, if another pass over the same data begins; it was evaluated if a pass over the training data continues
    or begins.
    """

    def __init__(self, tracker: Tracker, evaluated: Callable[[], None]) -> None:
        self._tracker = tracker
        self._evaluated = evaluated
        self._count = 0
        self._key = 0
        self._notes: Notes | None = None
        self._marks: Any = None
        self._first = 0
        self._before = BatchesNoted()
        self._delivered = 0
        self._ahead: int | None = None
        """Batches that the first dataloader fetched ahead: those before its first backward, less one."""
        self._one_each = OneEach()
        self._data = 0
        """The ``id`` of the latest iterator's data set."""
        self._since = 0
        """Batches fetched from any dataloader since the last backward."""
        self._sole = OneEach()
        """As ``_one_each``, with batches of all dataloaders."""

    def fetching(self, again: bool, iterator: Any, trains_on: bool = False) -> None:
        """Handle a request for a batch; ``again``: of the same iterator as the last one.

        ``trains_on``: the latest backward's batch was of the same data set.
        """
        if again:
            return
        data = id(getattr(iterator, "_dataset", None))
        if self._count == 1 and (self._sole or not self._sole.known):
            if data == self._data:
                self._relabel(("forward",), "idle")  # it was only inspected
            elif self._sole and (trains_on or getattr(iterator, "_ftmon_trained", False)):
                self._end_evaluation()
        self._left(_ENOUGH)
        self._data = data

    def evaluating(self) -> None:
        """Handle a request for another batch of the same dataloader while the model is in evaluation mode."""
        if self._count:
            self._end_evaluation()
            self._count = 0

    def fetched(self, key: int) -> None:
        """Handle the delivery of a batch that is not noted yet; ``key``: of the dataloader in ``Notes.fetches``."""
        tracker, notes = self._tracker, self._tracker.notes
        self._delivered += 1
        self._since += 1
        if self._count and notes is self._notes and tracker.marks is self._marks:
            self._count += 1
            if self._one_each and self._delivered > 1 + (self._ahead or 0):
                notes.restore_batches(self._before)
            return
        self._key, self._count, self._notes, self._marks = key, 1, notes, tracker.marks
        self._first = len(tracker.marks) - 1
        self._before = notes.batches()

    def resumed(self, key: int, first: int, before: BatchesNoted) -> None:
        """Train on the batch that was fetched last, in evaluation mode; it is in the notes.

        ``first`` is the index of the mark of its request, ``before`` the batches noted before it.
        """
        self._key, self._notes, self._marks = key, self._tracker.notes, self._tracker.marks
        self._count = self._delivered = self._since = 1
        self._first, self._before = first, before

    def trained(self) -> None:
        """Handle a backward: the fetched batches are trained on."""
        if self._ahead is None and self._count:
            self._ahead = self._count - 1
        self._one_each.trained(self._count)
        self._sole.trained(self._since)
        self._count = self._since = 0

    def exhausted(self) -> None:
        """Handle the end of the dataloader that was used last."""
        self._left(1)

    def finish(self) -> None:
        """Handle the end of the process, possibly in the middle of a step that uses several batches."""
        if self._one_each:
            self._left(_ENOUGH)

    def _left(self, least: int) -> None:
        """Leave the latest dataloader; ``least`` or more of its batches without a backward were evaluated."""
        if self._count >= least:
            self._end_evaluation()
        self._count = self._delivered = 0

    def _end_evaluation(self) -> None:
        self._relabel(_PHASES, "eval")
        self._evaluated()

    def _relabel(self, phases: tuple[str, ...], name: str) -> None:
        """Remove the batches from the step's notes, and rename ``phases`` since they were fetched to ``name``."""
        tracker, notes = self._tracker, self._tracker.notes
        if notes is not self._notes or tracker.marks is not self._marks:
            return
        for index in range(self._first, len(tracker.marks)):
            if tracker.marks[index].phase in phases:
                tracker.relabel(index, name)
        notes.restore_batches(self._before)
        notes.fetches.pop(self._key, None)


_is_grad_enabled = torch.is_grad_enabled


class Loading:
    """Follows dataloaders and the model's mode, on the training thread alone."""

    def __init__(self, loop: Loop) -> None:
        self.guard, self._device = loop.rank.guard, loop.rank.device
        self._tracker, self._phases = loop.tracker, loop.phases
        self._forwards, self._state, self._trained = loop.forwards, loop.state, loop.trained
        self._fetched = FetchedBatches()
        self._eval_mode = EvalMode(loop)
        self._pass = LoaderPass(loop.tracker, self._eval_mode.began_before_batch)
        self._fetching_ns = 0
        self._last_iterator: Callable[[], Any] = nothing
        self._data_iterator: Callable[[], Any] = nothing
        """The iterator that the latest batch outside of an evaluation was fetched from."""
        self._trained_data = 0
        self.left_out = 0
        """Batches fetched in a row, of a loader that is trained on, without a backward."""
        self._untrained = 0
        """Batches fetched for the training that had no backward yet."""
        self._scoped_iterator: Callable[[], Any] = nothing
        """The iterator that the latest batch inside an explicit phase was fetched from."""
        self._eval_end: tuple[list[Mark], int] = [], 0
        """The mark at which an evaluation's loader was exhausted."""
        self._pass_ended = False
        """Whether a dataloader of the training was exhausted, and no backward of the next pass has begun."""
        self._dropped = 0
        """Micro-batches since the latest backward whose gradients were set to zero before an update."""
        self._prefetched: deque[batch.OnHost] | None = None
        """Set while a loader prefetches: a fetched batch is not the one that the script receives next."""

    def begin(self) -> None:
        """Forget how an earlier training used its dataloaders."""
        self._pass = LoaderPass(self._tracker, self._eval_mode.began_before_batch)
        self._fetched = FetchedBatches()
        self._trained_data, self._untrained, self._pass_ended, self._dropped = 0, 0, False, 0

    def last_iterator(self) -> Any:
        """Return the dataloader iterator that was fetched from last, while it lives; any thread."""
        return self._last_iterator()

    def evaluated_batches(self) -> tuple[int, int]:
        """Return how many batches of the evaluation under way are done, and of how many; (0, 0): unknown."""
        iterator = self._scoped_iterator() if self._tracker.depth else self._last_iterator()
        try:
            return max(0, int(iterator._num_yielded) - 1), len(iterator)
        except (AttributeError, TypeError, ValueError):  # no DataLoader's, or its data set has no length
            return 0, 0

    @guarded
    def fetching(self, iterator: Any) -> None:
        """The training thread asks a dataloader for a batch; inside ``no_grad`` or an eval's loader it is ``eval``."""
        self._fetching_ns = perf_counter_ns()
        tracker, state = self._tracker, self._state
        if tracker.depth or (state.in_update and not state.closures):
            if tracker.phase == "eval" and self._scoped_iterator() is not iterator:
                self._scoped_iterator = weakref.ref(iterator)
            return
        if tracker.notes.discarded:
            self._dropped = tracker.notes.micro_steps
            tracker.notes.drop_batch()  # its backward has run; its loss is not the step's
        again = self._last_iterator() is iterator
        trains_on = id(getattr(iterator, "_dataset", None)) == self._trained_data
        self._pass.fetching(again, iterator, trains_on)
        if again and self._pass_ended:
            iterator._ftmon_trained = False  # one with persistent workers begins its next pass
        is_eval = self._forwards.fetching(again) and again
        if self._eval_mode:
            if getattr(iterator, "_ftmon_trained", False):
                self._eval_mode.end()  # training goes on, in that mode
            else:
                if again:
                    self._pass.evaluating()
                if not again or self._prefetched is None:
                    self._eval_mode.fetching(may_train=trains_on and not again)
                iterator._ftmon_eval = True
                self._last_iterator = weakref.ref(iterator)
                return
        if is_eval:
            iterator._ftmon_eval = True
        if not again:
            self._last_iterator = weakref.ref(iterator)  # a strong one would keep its workers alive
        if not _is_grad_enabled() or (tracker.phase == "eval" and getattr(iterator, "_ftmon_eval", False)):
            iterator._ftmon_eval = True
            self._phases.enter("eval")
        else:
            self._phases.enter("data")
            self._fetching_ns = perf_counter_ns()  # within the phase, which begins with the mark just made

    @guarded
    def fetched(self, found: Any) -> None:
        """Record a batch: without a forward hook, the forward begins now."""
        tracker = self._tracker
        notes = tracker.notes
        if tracker.phase == "data":
            key = id(self._last_iterator())
            notes.fetches[key] = notes.fetches.get(key, 0) + 1
            self._untrained += 1
            if self.left_out or getattr(self._last_iterator(), "_ftmon_trained", False):
                self.left_out += 1
            notes.fetch_ns += perf_counter_ns() - self._fetching_ns
            self._data_iterator = self._last_iterator
        if self._prefetched is not None and not self._state.forward_by:
            if self._device.events is not None:
                self._prefetched.append(batch.on_host(found))
        elif self._eval_mode:
            self._eval_mode.fetched(found, None, self._device.events is not None)
        elif tracker.phase != "data":
            return
        elif not self._state.forward_by or self._state.calls_module:
            self._begin_forward(found)
        elif self._device.events is not None:
            self._fetched.add(self._last_iterator(), notes, found)

    @guarded
    def prefetching(self, prefetched: deque[batch.OnHost]) -> None:
        """Handle a request to a prefetching loader: it fetches the batch after the one that it returns.

        ``prefetched`` receives the counts of fetched batches if the loader moves them to a device.
        """
        self._prefetched = prefetched

    @guarded
    def delivered(self, found: Any) -> None:
        """Handle a batch that a prefetching loader returns, fetched earlier."""
        prefetched, self._prefetched = self._prefetched, None
        fetched = prefetched.popleft() if prefetched else None
        tracker = self._tracker
        if self._eval_mode:
            self._eval_mode.fetched(found, fetched, self._device.events is not None)
        elif not self._state.forward_by and not tracker.depth and tracker.phase in ("data", "idle"):
            self._begin_forward(found, fetched)

    @guarded
    def prefetched_all(self) -> None:
        """Handle the end of a prefetching loader: it returned its last batch, or failed."""
        self._prefetched = None
        self._pass.exhausted()

    @guarded
    def exhausted(self, iterator: Any) -> None:
        """Handle the end of a dataloader: the ``data`` phase is over."""
        if self._last_iterator() is iterator and self._prefetched is None:
            self._pass.exhausted()
        self._pass_ended |= getattr(iterator, "_ftmon_trained", False)
        tracker = self._tracker
        if tracker.phase == "data":
            self._phases.enter("idle")
        elif tracker.phase == "eval" and not tracker.depth and self._last_iterator() is iterator:
            # Next is the rest of the evaluation, or a forward without a loader, which a backward will show.
            tracker.begin("eval")
            self._eval_end = tracker.marks, len(tracker.marks) - 1

    @guarded
    def evaluating(self, model: Any) -> bool:
        """Handle a module's switch to evaluation mode; return whether an evaluation begins."""
        return self._eval_mode.begin(model)

    @guarded
    def evaluated(self, trains: bool) -> bool:
        """End an evaluation by the model's mode; return whether there was one.

        ``trains``: the model was put into training mode again. If not, no forward of the training follows: the model
        generates, or another training begins.
        """
        iterator: Any = self._last_iterator() if trains else None  # freed where no loop goes on with it
        resumed = None if iterator is None else self._eval_mode.end_after_fetch()
        if resumed is None or iterator is None:
            return self._eval_mode.end(trains)
        iterator._ftmon_eval = False
        self._data_iterator = self._last_iterator
        fetches = self._tracker.notes.fetches
        fetches[id(iterator)] = fetches.get(id(iterator), 0) + 1
        if not self._state.forward_by:
            self._pass.resumed(id(iterator), *resumed)
        return True

    def going_backward(self) -> bool:
        """Handle a backward: the fetched batches are trained on. Return whether they may have been evaluated."""
        self._pass.trained()
        self.left_out = 0
        if self._untrained:
            self._untrained -= 1
        elif self._trained_data:
            self._tracker.notes.unfetched += 1
        was_eval_mode = self._eval_mode.going_backward()
        if was_eval_mode:
            self._data_iterator = self._last_iterator
        trained_on = self._data_iterator()
        if trained_on is not None:
            if self._pass_ended and not getattr(trained_on, "_ftmon_trained", False):
                self._pass_ended, notes = False, self._tracker.notes
                notes.pending, notes.dropped = notes.micro_steps - notes.applied, self._dropped
            trained_on._ftmon_trained, self._dropped = True, 0
            self._trained_data = id(getattr(trained_on, "_dataset", None))
        if self._forwards.going_backward() or was_eval_mode:
            self.note_evaluated(False)
        # The evaluation that began last may be over: its loader is exhausted.
        marks, index = self._eval_end
        is_over = marks is self._tracker.marks and not any(mark.phase for mark in marks[index + 1 :])
        return was_eval_mode or is_over

    def note_evaluated(self, is_eval: bool = True) -> None:
        """Record whether the batches of the latest dataloader are evaluated."""
        iterator = self._last_iterator()
        if iterator is not None:
            iterator._ftmon_eval = is_eval

    def take(self) -> Any:
        """Return the counts of the batch whose forward begins, if it was counted as it was fetched."""
        return self._fetched.take(self._tracker.notes)

    def repeating(self) -> AbstractContextManager[None]:
        """Return the context of a replay of the present step's fetches and forwards."""
        return self._fetched.repeating()

    def finish(self) -> None:
        """Handle the end of the process: batches fetched since the last step were evaluated."""
        if self._eval_mode:
            self._pass.evaluating()  # a single one, fetched before the model's mode changed
        self._pass.finish()

    def _begin_forward(self, found: Any, fetched: batch.OnHost | None = None) -> None:
        """Note a batch that no forward hook will report, and begin its forward."""
        self._pass.fetched(id(self._last_iterator()))
        self._note_batch(found, fetched)
        self._phases.enter("forward")

    def note_fetched(self, found: Any) -> None:
        """Note a batch of the training, whose phases are known."""
        notes = self._tracker.notes
        if not self._state.forward_by or self._state.calls_module:
            self._note_batch(found)
        elif self._device.events is not None:
            self._fetched.add(self._last_iterator(), notes, found)

    def _note_batch(self, found: Any, fetched: batch.OnHost | None = None) -> None:
        notes = self._tracker.notes
        batch.note(notes, found, False, self._device.events is not None, fetched, self._trained.shifts_labels)
        if self._state.normalised_over_ranks:
            notes.labels = []
