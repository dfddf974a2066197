"""Moves from phase to phase, and detects meanwhile the device that the script computes on."""

from collections.abc import Callable
from typing import Any

from ..guard import guarded, nothing
from ..phases.outbox import Outbox
from ..phases.tracker import Tracker
from ..rank.context import RankContext


class Phases:
    """The tracker's interface for the training thread."""

    def __init__(self, rank: RankContext, tracker: Tracker, outbox: Outbox) -> None:
        self.guard = rank.guard
        self.enter: Callable[[str], None] = self._enter_unsettled
        """Moves to a phase; the tracker's own method once the device is settled."""
        self.met_cuda: Callable[[], None] = nothing
        """Called once, when the script has CUDA running."""
        self._device = rank.device
        self._tracker = tracker
        self._outbox = outbox

    def interrupt(self, phase: str) -> None:
        """Move to a phase from one that may have begun only just now."""
        if not self._device.settled:
            self.settle()
        self._tracker.interrupt(phase)

    @guarded
    def open(self, phase: str) -> str:
        """Begin an explicit phase; the result, None after an error, goes to ``close``."""
        if not self._device.settled:
            self.settle()
        return self._tracker.open_scope(phase)

    @guarded
    def close(self, before: str) -> None:
        """End an explicit phase."""
        self._tracker.close_scope(before)

    @guarded
    def check_device(self) -> None:
        """Check whether the script has CUDA running, unless the device is settled."""
        if not self._device.settled:
            self.settle()

    def settle(self) -> None:
        """Check whether the script has CUDA running; the device is not settled yet."""
        device = self._device
        if device.settle(self._note_script_reset):
            self._tracker.switch(device.memory, device.mark_event, device.blank)
            self.met_cuda()
            self._outbox.send_hello()

    def _enter_unsettled(self, phase: str) -> None:
        if self._device.settled:
            self.enter = self._tracker.enter
        else:
            self.settle()
        self._tracker.enter(phase)

    def _note_script_reset(self, stats: Any) -> None:
        guard = self.guard
        if guard.enabled and guard.is_training_thread():
            self._tracker.note_reset(stats)
