"""Switches stacks on and off at the boundaries of one phase; runs on the training thread at low cost."""

import time

from ....protocol.analysis.memory.causes import Span
from ....protocol.messages.telemetry import Step
from .. import guard
from ..phases.tracker import Tracker
from .history import Recording

PATIENCE_STEPS = 24
"""Number of steps without the phase after which the recording is given up."""


class StackWindow:
    """A watcher of phase boundaries (``Tracker.watchers``) that removes itself when it is done."""

    def __init__(
        self, recording: Recording, tracker: Tracker, phase: str, steps: int, from_step: int, *, long: bool
    ) -> None:
        self.phase = phase
        self.long = long
        self.spans: list[Span] = []
        """Every occurrence that was recorded."""
        self.borders: list[tuple[int, int]] = []
        """Ends of the steps in which the phase occurred: step number, and microseconds since the epoch."""
        self.done = False
        self.failed = ""
        self.since = time.monotonic()
        self.cleared = -1
        """``Recording.cleared`` once stacks are on."""
        self._recording = recording
        self._tracker = tracker
        self._steps = steps
        self.from_step = from_step
        self._began = False
        self._on_us = -1
        self._start_bytes = 0
        self._waited = 0
        self._switch_ns = 0

    def __call__(self, ending: str, beginning: str) -> None:
        """Handle one phase boundary."""
        if self.done or self.failed:
            self.withdraw()
            return
        try:
            self._on_boundary(ending, beginning)
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            guard.log_error("switching stacks", error)

    def withdraw(self) -> None:
        """Stop watching boundaries."""
        tracker = self._tracker
        tracker.watchers = tuple(watcher for watcher in tracker.watchers if watcher is not self)

    def host_us(self, step: Step) -> int:
        """Return the phase's host time with stacks in us, switching included (averaged over several steps)."""
        if not self.phase:
            return step.host_us
        record = step.phase(self.phase)
        spent = self._switch_ns // 1000 // max(1, len(self.borders))
        return (record.host_us if record is not None else 0) + spent

    def _on_boundary(self, ending: str, beginning: str) -> None:
        if beginning == "end":
            self._end_step()
        elif self._began and self.phase:
            if ending == self.phase:
                self._off()
            if beginning == self.phase:
                self._on()

    def _end_step(self) -> None:
        tracker = self._tracker
        if self._began:
            if self._on_us >= 0 and (self.phase or len(self.borders) + 1 >= self._steps):
                self._off()
            if self.spans or not self.phase:
                self.borders.append((tracker.step, _now_us()))
            if len(self.borders) >= self._steps:
                self.done = True
                self.withdraw()
                return
            self._waited += 1
            if not self.borders and self._waited >= PATIENCE_STEPS:
                self.failed = f"phase {self.phase!r} did not occur in {self._waited} steps"
                self.withdraw()
                return
        elif tracker.step + 1 < self.from_step:
            return
        self._began = True
        if self._on_us < 0 and self.phase in ("", tracker.phase):
            self._on()

    def _on(self) -> None:
        start = time.perf_counter_ns()
        self._start_bytes = self._tracker.memory.read(self._tracker.sample).allocated
        if self._recording.mode != "stacks" and not self._recording.stacks(long=self.long):
            self.failed = "the script has begun to record memory history itself"
            return
        self.cleared = self._recording.cleared
        self._on_us = _now_us()
        self._switch_ns += time.perf_counter_ns() - start

    def _off(self) -> None:
        if self._on_us < 0:
            return
        start = time.perf_counter_ns()
        self.spans.append(Span(self._on_us, _now_us(), self._start_bytes))
        self._on_us = -1
        # If switching would clear the ring, the publisher switches after reading it.
        if self._recording.keeps_history and not self.long:
            self._recording.numbers()
        self._switch_ns += time.perf_counter_ns() - start


def _now_us() -> int:
    return time.time_ns() // 1000
