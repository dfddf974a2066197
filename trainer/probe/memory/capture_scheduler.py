"""Schedules step captures: allocator events of one step, and the composition of each phase's peak.

One step in a few thousand is enough, at no cost to the others. The next capture starts once the time of the last one,
on the training thread and on this one, is less than ``TIME_SHARE`` of the time since. It starts later if the hub has to
analyse captures of many ranks. The first few steps are always captured, and the next one on request.
"""

import time
from typing import Any

from ....protocol.analysis.allocator.composition import entries_of_step
from ....protocol.messages.memory import Composition, StepTrace
from .. import guard
from ..rank.model import Trained
from .composition import Roots, StepCapture, composition_on_cpu, step_trace
from .snapshots import Answer, CaptureContext

TIME_SHARE = 0.002
MIN_SECONDS = 1.0
HUB_SECONDS = 15e-6  # Seconds between captures per entry and rank: the hub takes 3 us an entry, a fifth of one core
FIRST_STEPS = 3
PATIENCE_SECONDS = 45.0
AFTER_FAILURE_SECONDS = 60.0
DECISION_SECONDS = 1.0
NEARLY_FULL = 0.7  # Share of the device's memory that is reserved, beyond which the recorder stays on
REASONS = ("asked", "spike", "leak")


def _roots(trained: Trained) -> Roots:
    optimizer = trained.primary()
    return Roots(trained.engine(), trained.model() if optimizer is not None else trained.any_model(), optimizer)


class CaptureScheduler:
    """Captures steps of one rank; for the publisher thread."""

    def __init__(self, context: CaptureContext) -> None:
        self._rank, self._tracker, self._trained = context.rank, context.tracker, context.trained
        self._pace, self._recording, self._send = context.pace, context.recording, context.send
        self._wanted = context.rank.options.allocator_events
        self._capture: StepCapture | None = None
        self._cleared = 0
        self._captured = self._reserved = 0
        self._decides = 0.0  # When the recorder is next switched
        self._entries = 0  # Entries of the latest captured step
        self._next = 0.0
        self._reason: Any = ""
        self._answers: list[Answer] = []
        self._ready: list[StepTrace | Composition] = []
        """Results to be sent after their step's own message, which waits for the device."""
        self._sent_step = 0
        self._deadline = 0.0

    def want(self, reason: str, answer: Answer) -> None:
        """Capture the next step; ``answer`` is called once that is done, or with the reason why not."""
        if self._recording.by_script and self._rank.device.memory.measure == "cuda":
            answer(False, "the script records memory history itself; it is left alone", {})
            return
        self._reason = reason if reason in REASONS else "asked"
        self._answers.append(answer)
        patience = max(PATIENCE_SECONDS, 3 * self._pace.usual)
        self._deadline = max(self._deadline, time.monotonic() + patience)

    def note_sent(self, step: int) -> None:
        """Record that the message of step ``step`` has been sent."""
        self._sent_step = step

    def tick(self) -> None:
        """Begin a capture when one is due, and make its messages once its step is over."""
        try:
            self._tick()
        except Exception as error:
            self._wanted = False
            self._drop()
            self._answer(False, f"{type(error).__name__}: {error}")
            guard.log_error("a step capture", error)
        self.send_ready()

    def send_ready(self) -> None:
        """Send the results of steps whose own messages have been sent."""
        while self._ready and self._ready[0].step <= self._sent_step:
            self._send(self._ready.pop(0))

    def _tick(self) -> None:
        recording = self._recording
        cuda = self._rank.device.memory.measure == "cuda"
        if not (self._wanted or self._answers):
            if self._capture is not None:
                self._drop()  # no longer awaited
                if cuda and not (recording.by_script or recording.owner):
                    recording.off()
            return
        capture = self._capture
        if cuda and (recording.by_script or recording.owner):
            self._drop()
        elif capture is None:
            if not cuda or self._keep_recording():
                self._begin_when_due(cuda)
        elif capture.done:
            self._finish(cuda)
            self._begin_when_due(cuda)
        elif capture.on_cuda != cuda:
            self._drop()  # made before the script had CUDA running
        elif capture not in self._tracker.watchers:
            self._tracker.watchers = (*self._tracker.watchers, capture)
        if self._answers and time.monotonic() > self._deadline:
            self._answer(False, "no step ended in time")

    def _keep_recording(self) -> bool:
        """Switch the recorder on or off between captures; return False if it is the script's.

        It is off where its entries cost more of a step than the budget, unless the device is nearly full: what it has
        recorded explains a failed allocation.
        """
        recording, device, now = self._recording, self._rank.device, time.monotonic()
        if now < self._decides:
            return not recording.by_script
        self._decides = now + DECISION_SECONDS
        reserved = device.memory.read(self._tracker.sample).reserved
        is_full = reserved > NEARLY_FULL * device.info.capacity_bytes
        if is_full or self._tracker.budget.affords(self._entries):
            return recording.mode != "off" or recording.numbers()
        return recording.mode == "off" or recording.off()

    def _begin_when_due(self, cuda: bool) -> None:
        if self._answers or (self._wanted and (self._captured < FIRST_STEPS or time.monotonic() >= self._next)):
            self._begin(cuda)

    def _begin(self, cuda: bool) -> None:
        tracker, trained, recording = self._tracker, self._trained, self._recording
        reason = self._reason or ("first" if self._captured < FIRST_STEPS else "periodic")
        index = self._rank.device.memory.device_index if cuda else None
        if cuda:
            recording.numbers(whole=True)
            self._cleared = recording.cleared
        self._capture = StepCapture(tracker, lambda: _roots(trained), index, reason)
        tracker.watchers = (*tracker.watchers, self._capture)

    def _drop(self) -> None:
        """Cancel the capture under way; another one follows."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.withdraw()

    def _finish(self, cuda: bool) -> None:
        capture, recording = self._capture, self._recording
        self._capture = None
        if capture is None:
            return
        if capture.failed:
            guard.log(f"the capture of step {capture.step} failed: {capture.failed}")
            self._captured += 1
            self._next = time.monotonic() + AFTER_FAILURE_SECONDS
            self._answer(False, capture.failed)
            return
        if self._reason:
            capture.reason = self._reason  # requested while it was under way
        rank, read, entries = self._rank.rank, self._rank.device.memory.read, 0
        if cuda:
            if recording.cleared != self._cleared:
                return  # a new history was begun meanwhile: the next step is captured
            device = self._rank.device.memory.device_index
            found = step_trace(capture, recording.snapshot, device, rank, read, recording.entries, self._reserved)
            entries = entries_of_step(found)
            if entries:
                recording.fit(entries)
                self._entries = entries
            if self._wanted and self._tracker.budget.affords(entries):
                recording.numbers()
            else:
                recording.off()
            self._reserved = sum(segment.size for segment in found.snapshot.segments)
        else:
            found = composition_on_cpu(capture, rank, read)
        if isinstance(found, StepTrace) or found.phases:
            # No message of an unfinished step follows.
            (self._send if capture.unfinished else self._ready.append)(found)
        self._captured += 1
        spent = (found.read_us + found.walk_us) / 1e6
        ours = HUB_SECONDS * entries * self._rank.world_size
        self._next = time.monotonic() + max(MIN_SECONDS, spent / TIME_SHARE, ours)
        self._answer(True, f"step {capture.step}")

    def _answer(self, ok: bool, text: str) -> None:
        answers, self._answers, self._reason = self._answers, [], ""
        for answer in answers:
            answer(ok, text, {})
