"""The training thread of a rank: everything that its hooks report to."""

from collections.abc import Callable

from ..guard import guarded
from ..phases.forwards import Forwards
from ..phases.marks import ClosingRaw, StepRaw
from ..phases.outbox import Outbox
from ..phases.tracker import Counts, Tracker
from ..phases.updaters import Updaters
from ..rank.context import RankContext
from ..rank.hello import Introduction
from ..rank.model import describe_models
from ..rank.optimized import Optimized
from ..rank.trained import Trained
from .loading import Loading
from .manual_updates import ManualUpdates
from .micro_steps import MicroSteps
from .phases import Phases
from .state import LoopState
from .updates import Updates


def _nothing(_error: BaseException) -> None:
    return None


class Training:
    """Combines the parts that follow the training thread, and passes its steps to the publisher.

    Args:
        rank: this rank.
        introduction: the contents of its hello.
        trained: filled in by hooks.
        outbox: receives finished steps.
        counts: the collective counters.
    """

    def __init__(
        self,
        rank: RankContext,
        introduction: Introduction,
        trained: Trained,
        outbox: Outbox,
        counts: Counts,
    ) -> None:
        device = rank.device
        self.rank = rank
        self.guard = rank.guard
        self.device = device
        self.introduction = introduction
        self.trained = trained
        self.optimized = Optimized()
        self.outbox = outbox
        self.on_error: Callable[[BaseException], None] = _nothing
        """Called with every exception that comes through a hook."""
        self.state = state = LoopState()
        self.tracker = tracker = Tracker(device.memory, device.mark_event, counts, self._finish_step)
        self.updaters = updaters = Updaters(tracker, self._finish_step, self._met_updater)
        self.forwards = forwards = Forwards(tracker)
        self.phases = phases = Phases(rank, tracker, outbox)
        self.loading = loading = Loading(rank, trained, tracker, phases, forwards, state)
        self.micro_steps = MicroSteps(
            rank, introduction, trained, outbox, tracker, phases, forwards, loading, updaters, state
        )
        self.manual_updates = ManualUpdates(rank.guard, tracker, forwards, self._finish_step)
        self.updates = Updates(rank.guard, trained, tracker, phases, forwards, updaters, state)

    @guarded
    def saw_error(self, error: BaseException) -> None:
        """Handle an exception that came through a hook."""
        self.on_error(error)

    @guarded
    def hand_over_closing(self) -> None:
        """Pass the record after the last step to the publisher; the process is about to end."""
        self.updaters.flush()
        self.manual_updates.finish()
        self.loading.finish()
        self.outbox.hand_over(ClosingRaw(self.tracker.closing_step(measured=self.guard.is_training_thread())))

    def _finish_step(self, raw: StepRaw) -> None:
        self.outbox.hand_over_step(raw)

    def _met_updater(self) -> None:
        """Send the hello of the trained engines, if several train."""
        modules = [updater.module for updater in self.updaters.known if hasattr(updater, "module")]
        if len(modules) > 1:
            self.introduction.facts.update(describe_models(modules), flops=None)
            self.outbox.send_hello()
