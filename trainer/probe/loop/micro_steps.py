"""Micro-steps: a batch is fetched, goes forward, and its loss goes backward."""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from ..device import device_values
from ..guard import guarded
from ..phases.forwards import Forwards
from ..phases.marks import BatchesNoted, Mark, Notes
from ..phases.outbox import Outbox
from ..phases.rounds import LIBRARIES, call_site, went_back
from ..phases.tracker import Tracker
from ..phases.updaters import Updaters
from ..rank.context import RankContext
from ..rank.hello import Introduction
from ..rank.model import dtype_name
from ..rank.trained import Trained
from ..values import batch
from ..values.batch_losses import BatchLosses
from ..values.fetched_batches import FetchedBatches
from ..values.losses import LossNotes
from .eval_mode import EvalMode
from .loader_pass import LoaderPass
from .one_each import OneEach
from .phases import Phases
from .state import LoopState

_is_grad_enabled = torch.is_grad_enabled


def _nothing() -> None:
    return None


class MicroSteps:
    """Follows micro-steps, on the training thread alone.

    Args:
        rank: this rank.
        introduction: receives the data type in which autocast computes the forward.
        trained: engine, model and optimizer that the rank trains.
        outbox: receives another hello once a forward was seen.
        tracker: the phase machine.
        phases: moves between its phases.
        forwards: judges whether a forward is training.
        updaters: the engines and optimizers that update.
        state: state of the training loop.
        batch_losses: compares losses of equal batches.
    """

    def __init__(
        self,
        rank: RankContext,
        introduction: Introduction,
        trained: Trained,
        outbox: Outbox,
        tracker: Tracker,
        phases: Phases,
        forwards: Forwards,
        updaters: Updaters,
        state: LoopState,
        batch_losses: BatchLosses,
    ) -> None:
        self.guard = rank.guard
        self._device = rank.device
        self._introduction = introduction
        self._trained = trained
        self._outbox = outbox
        self._tracker = tracker
        self._phases = phases
        self._forwards = forwards
        self._updaters = updaters
        self._state = state
        self._batch_losses = batch_losses
        self._loss_notes = LossNotes()
        self._divisors: set[int] = set()
        """Numbers of micro-batches that the script has divided losses by; for the publisher thread."""
        self._unscaled: tuple[int, Any] | None = None
        self._fetched = FetchedBatches()
        self._eval_mode = EvalMode(tracker, phases, forwards, trained, state)
        self._pass = LoaderPass(tracker, self._eval_mode.began_before_batch)
        self._fetching_ns = 0
        """When the latest fetch began."""
        self._last_iterator: Callable[[], Any] = _nothing
        self._data_iterator: Callable[[], Any] = _nothing
        """The iterator that the latest batch outside of an evaluation was fetched from."""
        self._trained_data = 0
        """The ``id`` of the data set that the latest backward's batch is of."""
        self._eval_fetches = 0
        """Batches fetched from the latest iterator during an evaluation."""
        self._prefetched: deque[batch.OnHost] | None = None
        """While a loader prefetches: what is fetched is not the batch that the script gets next."""
        self._seen_forward = False
        self._before: tuple[Notes, int, int, int] | None = None
        """During a backward: the step's notes, and what they had of backwards before it."""
        self._begun: tuple[Any, Notes, BatchesNoted] | None = None
        """From a forward to its backward: the id of its model, the step's notes, and what they had of batches."""
        self._forwards_begun = 0
        """Forwards of that model in this step that had no backward: with a pipeline, several are under way."""
        self._counted_in: Notes | None = None
        """The notes of that step."""
        self._is_reported = False
        """A forward was reported since the last backward."""
        self._calls_module = False
        """The script calls the module inside its engine, so that no hook reports the forward."""
        self._one_each = OneEach()
        self._trained_on = Notes(), BatchesNoted()
        """Notes of the latest backward's step, and how much of batches they had at its end."""
        self._eval_end: tuple[list[Mark], int] = [], 0
        """The mark at which an evaluation's loader was exhausted."""

    def last_iterator(self) -> Any:
        """Return the dataloader iterator that was fetched from last, while it lives; any thread."""
        return self._last_iterator()

    @guarded
    def fetching(self, iterator: Any) -> None:
        """The training thread asks a dataloader for a batch; inside ``no_grad`` or an eval's loader it is ``eval``."""
        tracker, state = self._tracker, self._state
        if tracker.depth or (state.in_update and not state.closures):
            return
        if tracker.notes.discarded is not None:
            self._drop_batch()
        again = self._last_iterator() is iterator
        trains_on = id(getattr(iterator, "_dataset", None)) == self._trained_data
        self._pass.fetching(again, iterator, trains_on)
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
            self._eval_fetches = 0
        if not _is_grad_enabled() or (tracker.phase == "eval" and getattr(iterator, "_ftmon_eval", False)):
            iterator._ftmon_eval = True
            self._phases.enter("eval")
        else:
            self._phases.enter("data")
            self._fetching_ns = perf_counter_ns()

    @guarded
    def fetched(self, found: Any) -> None:
        """Record a batch: without a forward hook, the forward begins now."""
        tracker = self._tracker
        notes = tracker.notes
        if tracker.phase == "data":
            key = id(self._last_iterator())
            notes.fetches[key] = notes.fetches.get(key, 0) + 1
            notes.fetch_ns += perf_counter_ns() - self._fetching_ns
            if self._batch_losses.current is not None:
                self._batch_losses.add(found, False)
            self._data_iterator = self._last_iterator
        elif tracker.phase == "eval":
            self._eval_fetches += 1
        if self._prefetched is not None and not self._state.forward_by:
            if self._device.events is not None:
                self._prefetched.append(batch.on_host(found))
        elif self._eval_mode:
            self._eval_mode.fetched()
            self._eval_mode.note(found, None, self._device.events is not None)
        elif tracker.phase != "data":
            return
        elif not self._state.forward_by or self._calls_module:
            self._begin_forward(found)
        elif self._device.events is not None:
            self._fetched.add(self._last_iterator(), notes, found)

    @guarded
    def prefetching(self, prefetched: deque[batch.OnHost]) -> None:
        """A prefetching loader is asked for a batch: what it fetches meanwhile is the batch after that.

        Args:
            prefetched: receives what is counted of fetched batches, where the loader moves them to a device.
        """
        self._prefetched = prefetched

    @guarded
    def delivered(self, found: Any) -> None:
        """A prefetching loader returns a batch that it has fetched before."""
        prefetched, self._prefetched = self._prefetched, None
        fetched = prefetched.popleft() if prefetched else None
        tracker = self._tracker
        if self._eval_mode:
            self._eval_mode.fetched()
            self._eval_mode.note(found, fetched, self._device.events is not None)
        elif not self._state.forward_by and not tracker.depth and tracker.phase in ("data", "idle"):
            self._begin_forward(found, fetched)

    @guarded
    def prefetched_all(self) -> None:
        """A prefetching loader has returned its last batch, or has failed."""
        self._prefetched = None
        self._pass.exhausted()

    @guarded
    def exhausted(self, iterator: Any) -> None:
        """A dataloader is exhausted: what follows is no loading of data."""
        if self._last_iterator() is iterator and self._prefetched is None:
            self._pass.exhausted()
        tracker = self._tracker
        self._forwards.exhausted()
        if tracker.phase == "data":
            self._phases.enter("idle")
        elif tracker.phase == "eval" and not tracker.depth and self._last_iterator() is iterator:
            # What follows may be the rest of the evaluation, or a forward without a loader: the backward will tell.
            tracker.begin("eval")
            self._eval_end = tracker.marks, len(tracker.marks) - 1

    @guarded
    def evaluating(self, model: Any) -> bool:
        """A module was put into evaluation mode; return whether an evaluation begins."""
        return self._eval_mode.begin(model)

    @guarded
    def leave_eval_mode(self, generates: bool = False) -> bool:
        """End an evaluation by the model's mode; return whether there was one.

        Args:
            generates: no forward of the training step follows: the model generates, or another training begins. Else
                it was put into training mode again.
        """
        iterator: Any = None if generates else self._last_iterator()  # freed where no loop goes on with it
        resumed = None if iterator is None else self._eval_mode.end_after_fetch()
        if resumed is None or iterator is None:
            return self._eval_mode.end(generates)
        iterator._ftmon_eval = False
        self._data_iterator = self._last_iterator
        fetches = self._tracker.notes.fetches
        fetches[id(iterator)] = fetches.get(id(iterator), 0) + 1
        if not self._state.forward_by:
            self._pass.resumed(id(iterator), *resumed)
        return True

    @guarded
    def forwarding(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the begin of a model's forward.

        Args:
            module: the model, in its wrappers; None: a framework has reported that a micro-step begins.
            args: positional arguments of the forward.
            kwargs: its keyword arguments.
        """
        tracker, state = self._tracker, self._state
        self._is_reported = True
        if self._calls_module:
            self._calls_module = False
            self._forget_untrained()
        if self._batch_losses.current is not None:
            self._batch_losses.add((args, kwargs), True)
        if module is None:
            self._forwards.settle(training=True)
        else:
            if not self._device.settled:
                self._phases.settle()
            if not self._seen_forward:
                self._see_forward()
            before = tracker.phase
            knew = self._forwards.recomputes
            kind = self._forwards.judge(module)
            if self._forwards.recomputes and not knew:
                self._train_on_evaluated()
            if kind == "eval" and before in ("data", "forward"):
                iterator = self._last_iterator()
                if iterator is not None:
                    iterator._ftmon_eval = True
            if kind != "train":
                return
        self._phases.enter("forward")
        notes = tracker.notes
        if state.evaluations > 1 or self._is_same_batch():
            return
        start = perf_counter_ns()
        fetched = self._fetched.take(notes)
        self._leave_out(id(module))
        batch.note(notes, (args, kwargs), True, self._device.events is not None, fetched, self._trained.shifts_labels)
        if state.normalised_over_ranks:
            notes.labels = []
        tracker.cost_ns += perf_counter_ns() - start

    @guarded
    def failed_forward(self) -> None:
        """An exception left the forward: its batch is no step's, also where the script goes on with the next one."""
        begun, self._begun = self._begun, None
        self._forwards_begun = max(0, self._forwards_begun - 1)
        if begun is not None and begun[1] is self._tracker.notes:
            begun[1].restore_batches(begun[2])

    @guarded
    def expect_forward(self, by: str) -> None:
        """From now on ``by`` reports where a forward begins; a batch noted as it was fetched will be noted there."""
        self._state.forward_by = by
        notes = self._tracker.notes
        notes.shape, notes.tokens, notes.samples, notes.padded_tokens = [], [], 0, 0
        notes.labels = []

    @guarded
    def going_backward(self, losses: Sequence[Any], scaled: bool = False, owner: Any = None) -> bool:
        """Record the begin of a backward; return whether it is an outermost one.

        Args:
            losses: tensors that it starts from, all of one micro-batch.
            scaled: the losses are known to add up to the step's; otherwise their graphs are asked.
            owner: the engine whose backward it is.
        """
        tracker, state = self._tracker, self._state
        if state.in_backward:
            return False
        self._begin_backward()
        notes = tracker.notes
        if self._is_same_batch():
            notes.repeats += 1
            return True
        if state.evaluations > 1:
            return True
        start = perf_counter_ns()
        notes.micro_steps += 1
        unscaled, self._unscaled = self._unscaled, None
        loss = losses[0] if losses else None
        original = unscaled[1] if unscaled is not None and unscaled[0] == id(loss) else None
        notes.sum_losses, notes.divisors = state.sum_losses or scaled, self._divisors
        notes.added_ranks = state.added_ranks
        if self._batch_losses.current is not None:
            self._batch_losses.end(loss if original is None else original)
        if loss is not None:
            is_divided = notes.sum_losses or owner is not None or (state.engine_steps and self._updaters.is_sole)
            self._loss_notes.note(notes, loss, owner, original, is_divided)
            for place, other in enumerate(losses[1:], 1):
                self._loss_notes.note(notes, other, owner, None, is_divided, place)
        tracker.cost_ns += perf_counter_ns() - start
        return True

    @guarded
    def taking_gradients(self, loss: Any) -> bool:
        """The script takes the gradients of a loss by parameters; return whether that is no part of a backward."""
        state = self._state
        if state.in_backward:
            return False
        self._begin_backward()
        if state.evaluations <= 1 and not self._is_same_batch():
            self._loss_notes.note_gradients(self._tracker.notes, loss)
        return True

    @guarded
    def went_backward(self) -> None:
        """An outermost backward is over."""
        state, notes = self._state, self._tracker.notes
        state.in_backward, self._before = False, None
        self._trained_on = notes, notes.batches()
        if self._tracker.phase == "backward":
            self._phases.enter("optimizer" if state.in_update and not state.closures else "idle")

    @guarded
    def failed_backward(self) -> None:
        """An exception left the backward; where it came from stays the phase, for the report of the failure.

        Its loss is no step's, also where the script goes on with the next batch.
        """
        self._state.in_backward = False
        notes, before = self._tracker.notes, self._before
        if before is not None and before[0] is notes:
            notes.micro_steps, losses, gradients = before[1:]
            del notes.losses[losses:], notes.gradient_losses[gradients:]
            self._forget_untrained()
        self._before = None

    @guarded
    def note_scaling(self, scaled: Any, original: Any) -> None:
        """A loss was multiplied by a loss scale: the backward of ``scaled`` is that of ``original``."""
        self._unscaled = (id(scaled), original)

    @guarded
    def trained_micro_step(self, loss: Any) -> None:
        """A Trainer's ``training_step`` returned the loss of a micro-step, as it normalised it."""
        self._tracker.notes.trainer_losses.append(device_values.fetch(loss))

    def finish(self) -> None:
        """The process ends: batches fetched since the last step were evaluated."""
        self._pass.finish()

    def _begin_backward(self) -> None:
        tracker, state, notes = self._tracker, self._state, self._tracker.notes
        state.in_backward = True
        is_unreported = not self._is_reported and not self._forwards_begun and state.forward_by != "parallel"
        self._one_each.trained(self._forwards_begun)
        self._begun, self._forwards_begun = None, max(0, self._forwards_begun - 1)
        self._before = notes, notes.micro_steps, len(notes.losses), len(notes.gradient_losses)
        self._pass.trained()
        trained_on = self._data_iterator()
        if trained_on is not None:
            trained_on._ftmon_trained = True
            self._trained_data = id(getattr(trained_on, "_dataset", None))
        was_eval_mode = self._eval_mode.going_backward()
        if self._forwards.going_backward() or was_eval_mode:
            iterator = self._last_iterator()
            if iterator is not None:
                iterator._ftmon_eval = False
        is_forward = tracker.phase == "idle" or was_eval_mode or self._is_after_eval()
        if (is_unreported or not state.forward_by) and not tracker.depth and is_forward:
            tracker.rename("forward")
        self._is_reported = False
        # Where that forward began is not known; of the next ones it will be.
        self._calls_module |= is_unreported and bool(state.forward_by) and tracker.phase == "data"
        self._phases.enter("backward")

    def _begin_forward(self, found: Any, fetched: batch.OnHost | None = None) -> None:
        """Note a batch that no forward hook will report; its forward begins."""
        tracker = self._tracker
        start = perf_counter_ns()
        self._pass.fetched(id(self._last_iterator()))
        batch.note(tracker.notes, found, False, self._device.events is not None, fetched)
        if self._state.normalised_over_ranks:
            tracker.notes.labels = []
        tracker.cost_ns += perf_counter_ns() - start
        self._phases.enter("forward")

    def _leave_out(self, model: int) -> None:
        """Begin a forward of ``model``; discard the batch of its previous one if that batch should have had a backward.

        That is known of loops in which most batches have a backward of their own.
        """
        notes = self._tracker.notes
        if self._counted_in is not notes:
            self._counted_in, self._forwards_begun = notes, 0
        again = self._begun is not None and self._begun[0] == model and self._begun[1] is notes
        if self._begun is not None and again and self._one_each:
            notes.restore_batches(self._begun[2])
        elif again or self._begun is None or self._begun[1] is not notes:
            self._forwards_begun += 1
        self._begun = model, notes, notes.batches()

    def _train_on_evaluated(self) -> None:
        """The batches that were evaluated, by all appearance, are trained on."""
        iterator, fetches = self._last_iterator(), self._tracker.notes.fetches
        if iterator is not None:
            iterator._ftmon_eval = False
            fetches[id(iterator)] = fetches.get(id(iterator), 0) + self._eval_fetches

    def _forget_untrained(self) -> None:
        """Forget the batches that were noted since the latest backward."""
        trained, batches = self._trained_on
        notes = self._tracker.notes
        notes.restore_batches(batches if trained is notes else BatchesNoted())

    def _is_after_eval(self) -> bool:
        """Return whether the evaluation that began last may be over: its loader is exhausted."""
        marks, index = self._eval_end
        return marks is self._tracker.marks and not any(mark.phase for mark in marks[index + 1 :])

    def _is_same_batch(self) -> bool:
        """Return whether the batch whose gradients were set to zero is used again: no loop has gone on since."""
        discarded = self._tracker.notes.discarded
        if discarded is None:
            return False
        if not went_back(discarded, call_site(sys._getframe(2), LIBRARIES)):
            return True
        self._drop_batch()
        return False

    def _drop_batch(self) -> None:
        """The script left out a batch whose backward has run; its loss is not the step's."""
        notes = self._tracker.notes
        notes.discarded, notes.micro_steps, notes.losses = None, 0, []
        notes.restore_batches(BatchesNoted())
        if self._before is not None:
            self._before = notes, 0, 0, len(notes.gradient_losses)

    def _see_forward(self) -> None:
        """Record once whether autocast computes the forward, and its data type."""
        self._seen_forward = True
        kind = self._device.info.kind
        enabled = torch.is_autocast_enabled(kind)
        self._introduction.forward_dtype = dtype_name(torch.get_autocast_dtype(kind)) if enabled else ""
        self._outbox.send_hello()
