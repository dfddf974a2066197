"""The training thread of a rank: the parts behind the events of hooks."""

import os
from collections.abc import Callable, Sequence
from time import perf_counter_ns, time
from typing import Any, Literal

from ....protocol.messages.telemetry import StopAsked
from ..guard import guarded, nothing
from ..phases.budget import Budget
from ..phases.forwards import Forwards
from ..phases.tracker import FETCHING, ClosingRaw, Counts, Outbox, StepRaw, Tracker
from ..rank.context import Introduction, RankContext
from ..rank.model import Optimized, Trained, describe_models
from ..values.signs import SignReader
from .loading import Loading
from .micro_steps import MicroSteps
from .regular import Regular
from .state import Loop, Phases
from .updates import Updaters, Updates


class Training:
    """Combines the parts that follow the training thread, and passes its steps to the publisher."""

    def __init__(self, rank: RankContext, counts: Counts) -> None:
        self.rank = rank
        self.guard = rank.guard
        self.device = device = rank.device
        self.introduction = Introduction(rank)
        self.trained = trained = Trained()
        self.optimized = Optimized()
        self.outbox = outbox = Outbox()
        self.on_error: Callable[[BaseException], None] = nothing
        """Called with every exception that comes through a hook."""
        budget = Budget(rank.options.probe_budget / 100)
        self.tracker = tracker = Tracker(device.memory, device.mark_event, counts, self._end_step, rank.guard, budget)
        self.signs = SignReader(trained)
        self.updaters = Updaters(tracker, self._met_engine)
        self.forwards = forwards = Forwards(tracker)
        self.phases = phases = Phases(rank, tracker, outbox)
        loop = Loop(rank, trained, tracker, phases, forwards)
        self.state = loop.state
        self.loading = Loading(loop)
        self.micro_steps = MicroSteps(loop, self.loading, self._saw_forward)
        self.updates = Updates(loop, self.updaters)
        self.regular = Regular(
            loop, outbox, self.loading, self.micro_steps, self.updates, lambda: self.signs.unlabelled
        )
        phases.leave = self.regular.leave
        self._asked_to_stop = False
        self._shown = 0
        """Micro-steps without an update that a capture has ended after."""
        self._steps_before = 0
        """Steps that were done when the present training began."""

    def begins(self, parameters: Sequence[Any]) -> None:
        """Begin another training if these parameters are about to be updated and no earlier step has updated them.

        What was learned of the one before does not hold for it: who reports forwards, how losses add up, the
        framework. Without a step in between, they are further parameters of the same training.
        """
        done, known = self.outbox.steps_done, self.trained.any_model()
        if done == self._steps_before or self.state.rehearsing or self.forwards.updates_any(parameters):
            return
        own = set(map(id, parameters))
        if not own or (known is not None and any(id(each) in own for each in known.parameters())):
            return
        self._steps_before = done
        self.regular.leave()
        self.state.begin()
        self.trained.begin()
        self.loading.begin()
        self.micro_steps.begin()
        self.tracker.light = FETCHING
        self.introduction.begin()

    @guarded
    def saw_error(self, error: BaseException) -> None:
        """Handle an exception that came through a hook."""
        self.on_error(error)

    @guarded
    def asked_to_stop(self, by: Literal["SIGTERM", "ftmon stop"] = "SIGTERM") -> None:
        """Report, once, that the script was asked to stop; from any thread, and from a handler of a signal."""
        tracker, rank, now = self.tracker, self.rank, time()
        phase, since_ns = tracker.now()[:2]
        if self._asked_to_stop or os.getpid() != rank.process.pid:
            return
        self._asked_to_stop = True
        done, total = self.loading.evaluated_batches() if phase == "eval" else (0, 0)
        began = now - (perf_counter_ns() - since_ns) / 1e9
        grace = rank.options.stop_grace if by == "SIGTERM" else 0.0
        self.outbox.hand_over(StopAsked(rank.rank, now, tracker.step, phase, began, by, grace, done, total))

    @guarded
    def begin_cell(self, _info: Any = None) -> None:
        """A cell of a notebook begins: start-up is over, and a forward before a backward begins here."""
        self.regular.leave()
        if self.tracker.phase in ("init", "idle"):
            self.phases.check_device()
            self.tracker.begin("idle")

    @guarded
    def end_cell(self, _result: Any = None) -> None:
        """A cell has ended, or the process: a capture of backwards without any update so far ends too."""
        done = self.tracker.notes.micro_steps
        if not self.outbox.steps_done and done > self._shown and self.guard.is_training_thread():
            self._shown = done
            self.tracker.pause()

    @guarded
    def hand_over_closing(self) -> None:
        """Pass the record after the last step to the publisher; the process is about to end."""
        self.regular.leave()
        self.end_cell()
        self.loading.finish()
        self.outbox.hand_over(ClosingRaw(self.tracker.closing_step(measured=self.guard.is_training_thread())))

    def _end_step(self, raw: StepRaw) -> None:
        self.regular.end_step(raw)
        self.outbox.hand_over_steps(raw)

    def _saw_forward(self, dtype: str) -> None:
        self.introduction.forward_dtype = dtype
        self.outbox.send_hello()

    def _met_engine(self, modules: list[Any]) -> None:
        self.introduction.facts.update(describe_models(modules), flops=None)
        self.outbox.send_hello()
