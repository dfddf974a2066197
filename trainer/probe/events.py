"""What a framework tells the probe: the only interface of the hooks, shown in ``docs/frameworks.md``.

A hook replaces a function of a framework by one that calls these methods and the original (``replace``). Its receiver
is ``active.mine()``, None where nothing is to be reported: without a probe, or on another thread. No method here
raises or waits: an error of the probe switches it off, and the training continues.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from math import inf
from types import FrameType, TracebackType
from typing import Any, Self

from .guard import guarded
from .loop.regular import Code
from .loop.training import Training
from .phases.forwards import updates_parameters
from .phases.tracker import DRIVEN
from .rank.context import BatchShare, plain
from .rank.model import (
    describe_model,
    dtype_name,
    dtype_of,
    learning_rate,
    parameters_of,
    parameters_under,
    shifts_labels,
)
from .values.batch import OnHost, Seen
from .values.edits import Edits, are_as_before, partitions_of
from .values.model_flops import model_flops
from .values.signs import ALIGNED, ALIGNED_EVERY, FIRST, attended, ids_of, is_examined, labels_of, received, to_host

__all__ = ["Code", "Events", "OnHost", "TorchEvents", "dtype_name", "learning_rate"]

BACKWARDS = 4  # First backwards whose parameters are noted: those of a GAN have others
_UNSEEN = Seen(None, None, None)
MOST_WAITS = 32  # Waits timed on the device in one step; a step with more micro-steps is timed on the host alone


class _Scope:
    """The length of an event; ``over`` is called at its end, with the exception that ended it or None."""

    __slots__ = ("_over",)

    def __init__(self, over: Callable[[BaseException | None], None] | None = None) -> None:
        self._over = over

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._over is not None:
            self._over(error)


_NOTHING = _Scope()


class _Update(_Scope):
    """An update; it ends the step, or is a part of it, once ``done`` was called."""

    __slots__ = ("_events",)

    def __init__(self, events: "Events | None", over: Callable[[BaseException | None], None] | None = None) -> None:
        super().__init__(over)
        self._events = events

    def done(self, figures: Callable[[], dict[str, Any]] = dict) -> None:
        """Report that the parameters were updated.

        ``figures`` returns what is known of ``number`` (the step's, where the framework counts), ``grad_norm``,
        ``loss_scale``, ``overflow`` (it was skipped) and ``accumulation`` (the micro-steps it divides by). All but the
        first and the last may be tensors of one element, on the device.
        """
        if self._events is not None:
            self._events._updated(figures)


class Events:
    """The events of a training loop, for hooks into a framework with a loop of its own; on the training thread."""

    def __init__(self, training: Training) -> None:
        self.guard, self._training, self._state = training.guard, training, training.state
        self._loading, self._micro_steps, self._updates = training.loading, training.micro_steps, training.updates
        self._regular = training.regular
        self.follows = training.regular.follows
        """Handles an event of ``Code`` with its owner and argument, if the step goes like those before (any thread)."""
        self._forward_scope, self._backward_scope = _Scope(self._end_forward), _Scope(self._end_backward)
        training.regular.handlers |= {
            Code.FETCHING: self._loading.fetching,
            Code.FETCHED: self._loading.fetched,
            Code.FORWARD: self._judge_forward,
            Code.FORWARD_ENDS: lambda: self._end_forward(None),
            Code.BACKWARD: self._micro_steps.going_backward,
            Code.BACKWARD_ENDS: self._micro_steps.went_backward,
            Code.UPDATE: self._begin_update,
            Code.UPDATE_ENDS: lambda: self._end_update(None),
        }

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way."""
        return self._state.in_backward or self._regular.is_inside("backward")

    @property
    def in_update(self) -> bool:
        """Whether an update is under way."""
        return self._state.in_update or self._regular.is_inside("update")

    @property
    def is_followed(self) -> bool:
        """Whether the step goes like those before: what is sampled, is not."""
        return self._regular.place is not None

    def fetching(self, iterator: Any) -> None:
        """A dataloader's iterator is asked for a batch; then ``fetched``, or ``exhausted`` if it has no more."""
        if not self._regular.goes_on(Code.FETCHING, iterator):
            self._loading.fetching(iterator)

    def fetched(self, found: Any) -> None:
        """The iterator returns this batch."""
        if not self._regular.goes_on(Code.FETCHED, None, found):
            self._loading.fetched(found)

    def exhausted(self, iterator: Any) -> None:
        """The iterator has no more batches."""
        self._regular.leave()
        self._loading.exhausted(iterator)

    def failed(self, error: BaseException) -> None:
        """An exception came through a hook; an allocation failure is reported with all that is known about it."""
        self._regular.leave()
        self._training.saw_error(error)

    def forward(
        self, module: Any, args: Any = (), kwargs: Any = None, framework: str = "", *, always: bool = False
    ) -> _Scope:
        """A model's forward, for the length of a ``with`` block: a training, an evaluation or a part of another one's.

        ``module`` is the model in its wrappers. The ``framework`` is reported in the rank's hello, unless a more
        specific one is known; ``always``: report it even if another framework reports its own forwards.
        """
        if self._state.in_forward or self._regular.is_inside("forward") or self.in_backward:
            return _NOTHING
        given = args, kwargs or {}, framework, always
        if not self._regular.goes_on(Code.FORWARD, module, given):
            self._judge_forward(module, *given)
        return self._forward_scope

    def backward(self, losses: Sequence[Any], *, scaled: bool = False) -> _Scope:
        """A backward from ``losses``, all of one micro-batch, for the length of a ``with`` block.

        ``scaled``: they add up to the step's loss although an engine updates.
        """
        if self.in_backward:
            return _NOTHING
        if self._regular.goes_on(Code.BACKWARD, None, (losses, scaled)) or self._micro_steps.going_backward(
            losses, scaled
        ):
            return self._backward_scope
        return _NOTHING

    def update(self, by: Any, lr: Any = None) -> _Update:
        """An update ``by`` an engine or optimizer, for the length of a ``with`` block; no update without ``done``.

        ``lr`` is the learning rate, or a function that returns it.
        """
        if self.in_update:
            return _Update(None)
        if not self._regular.goes_on(Code.UPDATE, by, lr):
            self._begin_update(by, lr)
        return _Update(self, self._end_update)

    def phase(self, name: str) -> _Scope:
        """Work of a phase (``protocol.messages.telemetry.PHASES``), for the length of a ``with`` block."""
        self._regular.leave()
        training = self._training
        is_eval = name == "generate" and training.tracker.phase == "eval"
        if is_eval and not self._loading.evaluated(trains=False):
            return _NOTHING  # outside an evaluation it is the rollout of a step
        before = training.phases.open(name)
        if before is None:
            return _NOTHING
        return _Scope(lambda _: training.phases.close(before))

    def evaluating(self, model: Any) -> bool:
        """A module was put into evaluation mode; return whether an evaluation begins."""
        self._regular.leave()
        self._training.tracker.budget.suspect()  # it may stay in that mode
        return bool(self._loading.evaluating(model))

    def evaluated(self) -> None:
        """It was put into training mode again."""
        self._regular.leave()
        self._loading.evaluated(trains=True)

    @guarded
    def trains(self, framework: str, model: Any = None, *, step: int = 0, **facts: Any) -> None:
        """A framework trains a model: what the rank's hello says about it.

        An empty framework only names the model; a known, more specific one stays. ``step`` is the last finished one,
        after a resume; ``facts`` are fields of ``Hello``.
        """
        self._regular.leave()
        training = self._training
        known = training.introduction.facts
        if framework and known["framework"] in ("pytorch", framework):
            known["framework"] = framework
        elif framework and not facts:
            return
        known.update(facts)
        training.tracker.step = max(training.tracker.step, step)
        if model is not None:
            self._register(model)
        training.outbox.send_hello()

    def _judge_forward(self, module: Any, args: Any, kwargs: Any, framework: str, always: bool) -> None:
        self._begin_forward(module, args, kwargs, framework, always)
        self._state.in_forward = True

    @guarded
    def _begin_forward(self, module: Any, args: Any, kwargs: Any, framework: str, always: bool) -> None:
        state = self._state
        if not always:
            trained = self._training.forwards.is_trained(module)
            if trained and not state.forward_by:
                self._micro_steps.expect_forward("parallel")
                self.trains(framework, module)
            # A Trainer or an engine reports itself where the forward of its model begins.
            if not (state.forward_by == "parallel" or (state.forward_by and not trained)):
                return
        self._micro_steps.forwarding(module, args, kwargs)

    def _end_forward(self, error: BaseException | None) -> None:
        if error is None:
            self.forward_ends()
        else:
            self.forward_failed(error)

    def forward_ends(self) -> None:
        """The end of a forward whose beginning was followed."""
        if not self._regular.goes_on(Code.FORWARD_ENDS):
            self._state.in_forward = False

    def forward_failed(self, error: BaseException) -> None:
        """A forward raised."""
        self.failed(error)
        self._micro_steps.failed_forward()
        self._state.in_forward = False

    def _end_backward(self, error: BaseException | None) -> None:
        if error is None:
            self.backward_ends()
        else:
            self.backward_failed(error)

    def backward_ends(self) -> None:
        """The end of a backward whose beginning was followed."""
        if not self._regular.goes_on(Code.BACKWARD_ENDS):
            self._micro_steps.went_backward()

    def backward_failed(self, error: BaseException) -> None:
        """A backward raised."""
        self.failed(error)
        self._micro_steps.failed_backward()

    @guarded
    def _begin_update(self, by: Any, lr: Any) -> None:
        self._updates.updating(lr() if callable(lr) else lr, by)

    def _updated(self, figures: Callable[[], dict[str, Any]]) -> None:
        if not self._regular.goes_on(Code.UPDATED, None, figures):
            self._judge_updated(figures)

    @guarded
    def _judge_updated(self, figures: Callable[[], dict[str, Any]]) -> None:
        found = figures()
        self._training.tracker.notes.accumulation = found.pop("accumulation", 0)
        self._updates.updated(**found)

    def _end_update(self, error: BaseException | None) -> None:
        if error is not None:
            self.failed(error)
            self._updates.abandon_update()
        elif not self._regular.goes_on(Code.UPDATE_ENDS) and self._state.in_update:
            self._updates.not_updated()

    def _register(self, model: Any) -> None:
        introduction, trained = self._training.introduction, self._training.trained
        introduction.facts.update(describe_model(model, trained.tensor_parallel.ranks))
        introduction.facts["flops"] = model_flops(model, trained.tensor_parallel.ranks)
        introduction.parameter_dtype = dtype_of(model)
        trained.model = weakref.ref(getattr(model, "module", model))
        trained.shifts_labels = shifts_labels(model)


class TorchEvents(Events):
    """Further events, of PyTorch itself and of the frameworks whose loops need more than the ten above."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        updates = training.updates
        training.regular.handlers |= {
            Code.STEPPING: updates.begin_update,
            Code.ZEROING: updates.zeroing,
            Code.CLIPPED: updates.note_grad_norm,
        }
        self.scaled = training.micro_steps.note_scaling
        """A loss was multiplied by a loss scale: the backward of the first argument is that of the second."""
        self.leaving_group = training.introduction.note_backend
        """The process groups are about to be destroyed; the hello, which names their backend, may be sent later."""
        self._edits = Edits()
        self._sought = 0  # Backwards whose parameters were noted
        self._limits = True  # Whether the last clipping had a limit, rather than only to read the norm
        self._attended = self._labelled = self._aligned = 0
        self._received_in: tuple[Any, int] = None, 0  # Notes and micro-batch whose labels a forward showed last
        self._without_labels: Any = None  # The last of the notes' received batches, if its loss will have the labels

    def zeroing(self, owner: Any) -> None:
        """An optimizer or a module sets its gradients to zero."""
        if not self._regular.goes_on(Code.ZEROING, owner):
            self._updates.zeroing(owner)

    def prefetching(self, prefetched: Any) -> None:
        """A loader that fetches ahead is asked for a batch; ``prefetched`` receives counts."""
        self._regular.leave()
        self._loading.prefetching(prefetched)

    def delivered(self, found: Any) -> None:
        """It returns a batch."""
        self._loading.delivered(found)

    def prefetched_all(self) -> None:
        """It has no more batches, or failed."""
        self._regular.leave()
        self._loading.prefetched_all()

    @guarded
    def made_optimizer(self, optimizer: Any, frame: FrameType | None = None) -> None:
        """An optimizer was made, in this frame; None: on another thread."""
        training = self._training
        known = training.introduction.facts
        if frame is not None:
            self._regular.leave()
            if not self._state.making_engine:
                self._begins(parameters_of(optimizer))
        self._updates.found_optimizer(optimizer)
        if frame is None or self._state.making_engine:
            return
        self._loading.evaluated(trains=False)  # the evaluation of an earlier model has ended
        if training.trained.model() is not None or self._state.engine_steps:
            return  # a wrapper or an engine has reported the model
        if training.tracker.step:
            training.optimized.forget()
        facts, found = training.introduction.facts, training.optimized.add(optimizer, frame)
        training.trained.find(training.optimized.sole())
        if known != facts | found:  # a script may make an optimizer for each of its tasks
            training.outbox.send_hello()
        facts.update(found)

    def _begins(self, parameters: list[Any]) -> None:
        """Another training may begin with these parameters, unless what made the updates before still exists."""
        trained = self._training.trained
        if trained.primary() is None and trained.engine() is None:
            self._training.begins(parameters)
            self._aligned = 0

    def stepping(self, optimizer: Any) -> bool:
        """A bare optimizer's step begins; return whether it is an update rather than a part of one."""
        if self._regular.follows(Code.STEPPING, optimizer):
            return True
        inner = self.in_update and self._updates.updater is not optimizer
        self._regular.note(Code.STEPPING, optimizer, inner=inner)
        return not inner and bool(self._updates.begin_update(optimizer))

    def stepped(self, optimizer: Any) -> None:
        """A bare optimizer's step has ended."""
        if not self._regular.follows(Code.STEPPED, optimizer):
            self._regular.note(Code.STEPPED, optimizer, inner=self._updates.updater is not optimizer)
            self._updates.end_update(optimizer)

    def closure(self) -> _Scope:
        """A call of the closure of a step, for the length of a ``with`` block: its work is no part of the update."""
        if not self.in_update:
            return _NOTHING
        self._regular.leave()
        self._updates.open_closure()
        return _Scope(lambda error: self._updates.close_closure(failed=error is not None))

    def scaler_step(self, optimizer: Any, scale: Any, scaled: Callable[[], bool]) -> _Scope:
        """A loss scaler's step, for the length of a ``with`` block: a skipped one if no optimizer stepped in it.

        ``scaled`` returns whether the gradients are still multiplied by the scale.
        """
        if self._state.engine_steps:
            return _NOTHING
        notes = self._training.tracker.notes
        if notes.grad_norm is not None and self._limits and scaled():
            self._training.tracker.own_notes().clipped = "scaled"
        updaters, tracker = self._training.updaters, self._training.tracker
        before = updaters.updates, tracker.step

        def over(error: BaseException | None) -> None:
            if error is None and (updaters.updates, tracker.step) == before:
                self._regular.leave()
                self._updates.skipped_update(optimizer, scale)

        return _Scope(over)

    def clipped(self, norm: Any, limit: Any = None) -> None:
        """Gradients were clipped to ``limit``, whose norm was ``norm``; the norm that an engine keeps replaces it."""
        if norm is not None and not self._regular.goes_on(Code.CLIPPED, None, norm):
            self._updates.note_grad_norm(norm)
            self._limits = limit != inf if isinstance(limit, int | float) else True
            notes = self._training.tracker.notes
            notes.clipped_before = self._limits and not notes.micro_steps
            if isinstance(limit, int | float) and limit == 0:
                notes.clipped = "zero"

    def adopt(self, *, updates: bool = True) -> bool:
        """Make this thread the training thread before the first update, or once the former one has ended.

        Return False if another thread trains. ``updates``: whether the thread updates; before the first update nothing
        else shows which thread trains.
        """
        may = not self.guard.thread_lives() if self._training.tracker.step else updates
        if self._state.engine_steps or not may:
            return False
        self.guard.adopt_thread()
        return True

    def making_engine(self) -> _Scope:
        """An engine is made: some optimizers step on zero gradients meanwhile (bf16, stage 0), which is no update."""
        state = self._state
        before = state.engine_steps
        state.engine_steps = state.making_engine = True

        def over(_: BaseException | None) -> None:
            state.engine_steps, state.making_engine = before, False

        return _Scope(over)

    @guarded
    def engine(
        self,
        engine: Any,
        describe: Callable[[Any], dict[str, Any]],
        partitions: Callable[[Any], int],
        share: Callable[[Any], tuple[int, int]],
    ) -> None:
        """An engine makes the updates from now on, unless it has no parameters to update.

        The functions return of an engine (of DeepSpeed, or with its attributes) fields of ``Hello``, the number of
        ranks over which its optimizer's state is partitioned (0: all), and the rank's place among the tensor-parallel
        ranks and their number.
        """
        if not updates_parameters(engine):
            return
        training = self._training
        state, trained = self._state, training.trained
        training.begins(list(engine.module.parameters()))
        self.guard.adopt_thread()
        training.updaters.made_engine()
        state.engine_steps, state.forward_by, training.tracker.light = True, "engine", DRIVEN
        trained.engine = weakref.ref(engine)
        trained.partitions = partitions(engine) or training.rank.world_size
        trained.tensor_parallel = BatchShare(*share(engine))
        facts = describe(engine)
        config = facts.get("deepspeed_config")
        facts["deepspeed_config"] = plain(config) if isinstance(config, dict) else None
        training.phases.check_device()
        self.trains("deepspeed", engine.module, step=int(getattr(engine, "global_steps", 0)), **facts)

    @guarded
    def trainer(self, model: Any, step: int, defaults: dict[str, Any]) -> None:
        """A Trainer begins to train after ``step``; ``defaults`` are fields of ``Hello`` unless an engine set them."""
        training = self._training
        training.introduction.facts["framework"] = "transformers"
        for name, value in defaults.items():
            training.introduction.facts.setdefault(name, value)
        if not self._state.forward_by:
            self._micro_steps.expect_forward("trainer")
        if training.rank.world_size == 1:  # several ranks begin another training at different times
            training.tracker.step = step
        self.trains("", None if self._state.engine_steps else model, step=step)

    def trainer_step(self, model: Any, inputs: Any, *, over_ranks: bool) -> _Scope:
        """A Trainer's micro-step, for the length of a ``with`` block; losses are divided by the accumulation.

        ``over_ranks``: losses are also divided by the label tokens of all ranks.
        """
        self._regular.leave()
        state = self._state
        state.sum_losses, state.normalised_over_ranks = True, over_ranks
        if state.forward_by != "engine":
            if state.forward_by != "trainer":
                self._micro_steps.expect_forward("trainer")
                self.trains("transformers", model)
            self._micro_steps.forwarding(None, (inputs,), {})
        return _Scope(lambda error: None if error is None else self._micro_steps.failed_forward())

    def trainer_loss(self, loss: Any) -> None:
        """The loss that it returned; an engine updates before that, so there the backpropagated losses count."""
        if not self._state.engine_steps:
            self._micro_steps.trained_micro_step(loss)

    @guarded
    def gathered(self, owner: Any, frame: FrameType) -> None:
        """A frame of the script has gathered partitioned parameters (``GatheredParameters``)."""
        self._edits.entered(owner, frame)

    @guarded
    def gathering_ends(self, owner: Any, *, kept: bool) -> None:
        """They are about to be released; ``kept``: one rank's values are written back to all."""
        training = self._training
        edit = self._edits.leaving(owner, kept, training.trained, training.rank.rank, training.tracker.step)
        if edit is not None:
            training.outbox.hand_over(edit)

    @guarded
    def loading_module(self, engine: Any) -> list[Any]:
        """A ZeRO-3 engine loads the weights of a checkpoint alone; return what ``loaded_module`` compares."""
        return partitions_of(engine)

    @guarded
    def loaded_module(self, engine: Any, before: list[Any]) -> None:
        """It has loaded them."""
        if are_as_before(engine, before):
            self._training.tracker.own_notes().unloaded = True

    @guarded
    def attending(self, config: Any, mask: Any, positions: Any, frame: FrameType, *, cached: bool) -> None:
        """A frame inside a forward of transformers makes an attention mask, of a mask and ``position_ids`` or None."""
        tracker, notes = self._training.tracker, self._training.tracker.notes
        sampled = self._attended < FIRST or is_examined(tracker.step + 1, tracker.budget.every)
        if sampled:
            self._attended += 1
            found = attended(config, mask, positions, cached, frame)
            if found is not None and len(notes.attended) < FIRST:
                tracker.own_notes().attended.append(found)
        if sampled or self._training.signs.unlabelled:
            self._receiving(frame)

    def _receiving(self, frame: FrameType) -> None:
        """Keep what a forward received, unless the batch that was noted for it has labels."""
        tracker, notes, micro_batch = self._training.tracker, self._training.tracker.notes, self._received_in
        noted = notes.seen and notes.seen[-1].labels is not None
        if noted or self.in_backward or tracker.phase == "eval" or len(notes.received) >= FIRST:
            return
        if micro_batch[0] is notes and micro_batch[1] == notes.micro_steps:
            return  # another forward of the micro-batch
        found = received(frame, self._training.forwards.is_trained)
        if found is not None:
            self._received_in = notes, notes.micro_steps
            self._without_labels = found if found.labels is None else None
            tracker.own_notes().received.append(found)

    def backward(self, losses: Sequence[Any], *, scaled: bool = False) -> _Scope:
        """As ``Events.backward``; a batch without labels gets those of the loss."""
        if len(losses) == 1 and not (self.in_backward or self.is_followed):
            self._label(losses[0])
        if self._sought < BACKWARDS and not self.in_backward:
            self._sought += 1
            self._seek_model(losses)
        if self._updates.gradients is not None and not self.in_backward:
            self._updates.see_kept()
        return super().backward(losses, scaled=scaled)

    @guarded
    def first_forward(self, module: Any) -> None:
        """A module is called before any step: where nothing else shows it, the forward begins here."""
        training = self._training
        if training.outbox.steps_done or self._state.forward_by or training.tracker.phase not in ("init", "idle"):
            return
        if training.trained.any_model() is None and not training.forwards.knows_optimizer:
            training.trained.find(weakref.ref(module))
        training.phases.enter("forward")

    @guarded
    def _seek_model(self, losses: Sequence[Any]) -> None:
        """Note what a first backward trains; find the model, if no optimizer or framework has named it."""
        training = self._training
        trained, parameters = training.trained, parameters_under(losses)
        self._updates.learned |= {id(each): weakref.ref(each) for each in parameters}
        is_named = trained.model() is not None or trained.engine() is not None
        if self._sought > 1 or is_named or training.forwards.knows_optimizer:
            return
        training.introduction.facts.update(training.optimized.add_parameters(parameters, sys._getframe(1)))
        called = {id(each) for each in getattr(trained.found(), "parameters", list)()}
        if not called.issuperset(map(id, parameters)):  # a part of the model was called first
            trained.find(training.optimized.sole())
        training.outbox.send_hello()

    @guarded
    def _label(self, loss: Any) -> None:
        batch, self._without_labels = self._without_labels, None
        notes, step = self._training.tracker.notes, self._training.tracker.step + 1
        noted = notes.seen[-1] if notes.seen else _UNSEEN
        if not notes.targets and (self._aligned < ALIGNED or step % ALIGNED_EVERY == 0):
            self._aligned += 1
            targets = labels_of(loss)  # not where other losses are added, which may look further ahead
            if targets is not None:
                rows = ids_of(loss) or [to_host(each) for each in (noted.ids,) if each is not None]
                notes.targets.append((rows, targets))
        if batch is not None:
            if notes.received and notes.received[-1] is batch:
                notes.received[-1] = batch._replace(labels=labels_of(loss, batch.ids))
            return
        is_received = self._received_in[0] is notes and self._received_in[1] == notes.micro_steps
        every = self._training.tracker.budget.every
        sampled = self._labelled < FIRST or is_examined(step, every) or self._training.signs.unlabelled
        if not sampled or is_received or len(notes.received) >= FIRST:
            return
        self._labelled += 1
        has_labels = noted.labels is not None
        if (labels := labels_of(loss, None if has_labels else noted.ids)) is None:
            return
        if has_labels:
            notes.seen[-1] = noted._replace(of_loss=labels)
        else:
            notes.received.append(noted._replace(labels=labels))

    @guarded
    def sharded(self, module: Any) -> None:
        """FSDP2 has sharded a module: the largest so far is the model, as its layers are sharded before it."""
        self._begins(list(module.parameters()))
        known = self._training.trained.model()
        if known is None or sum(1 for _ in module.parameters()) >= sum(1 for _ in known.parameters()):
            self.trains("fsdp", module)

    def adds_up(self, ranks: float) -> None:
        """Gradients of this many ranks are added up, and so are their losses."""
        self._state.added_ranks = max(self._state.added_ranks, ranks)
        self._state.normalised_over_ranks = True

    def divided(self, by: int) -> None:
        """A pipeline's schedule divides the step's losses by this number of micro-batches; 0: it does not."""
        self._training.tracker.own_notes().accumulation = by

    @guarded
    def stage(self, index: int, module: Any) -> None:
        """The rank has this stage of a pipeline, with this module; of several the lowest counts."""
        self._begins(list(module.parameters()))
        facts = self._training.introduction.facts
        known = facts.get("pipeline_stage")  # None after an engine of DeepSpeed without a pipeline
        facts["pipeline_stage"] = index if known is None else min(index, known)

    def wait_begins(self) -> Any:
        """A wait for other ranks begins; return the device event to give to ``waited``, or None."""
        events, notes = self._training.device.events, self._training.tracker.notes
        return events.mark() if events is not None and len(notes.waits) < MOST_WAITS else None

    def waited(self, begun: Any) -> None:
        """The wait has ended."""
        events, tracker = self._training.device.events, self._training.tracker
        if begun is not None and events is not None:
            tracker.own_notes().waits.append((tracker.phase, begun, events.mark()))

    def cost(self, ns: int) -> None:
        """Count the time of a hook's own work."""
        self.guard.spent_ns += ns

    @guarded
    def watch(self, updater: Any) -> None:
        """The script names the engine or optimizer whose updates are the steps."""
        training = self._training
        training.updaters.watch(updater)
        if hasattr(updater, "param_groups") and not self._state.engine_steps:
            training.trained.primary = weakref.ref(updater)
            self._updates.found_optimizer(updater)
            self.guard.adopt_thread()
            training.phases.check_device()
        training.outbox.send_hello()
