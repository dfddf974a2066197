"""Captures stacks for one phase: switched on by the training thread where that phase begins, and off where it ends.

Python stacks slow allocations down (23 % of a step if all have them, measured on an H200), so they are recorded for one
phase of one step, after a spike or on request. The publisher then reads the trace and sends the ``Cause``. The cost is
measured: the phase's host time with stacks, and its median over earlier steps.
"""

import statistics
import time
from collections import defaultdict, deque
from typing import Any, NamedTuple

from ....protocol.analysis.memory.causes import Span, blocks_at_peak, blocks_left, grouped, reaches_back
from ....protocol.messages.memory import Cause
from ....protocol.messages.telemetry import Step
from .. import guard
from ..phases.tracker import Tracker
from ..values.batch import model_sizes
from .snapshots import Answer, CaptureContext, Recording

PATIENCE_STEPS = 24  # Number of steps without the phase after which the recording is given up


class StackWindow:
    """Switches stacks on and off at the boundaries of one phase (``Tracker.watchers``); removes itself when done."""

    def __init__(
        self, recording: Recording, tracker: Tracker, phase: str, steps: int, from_step: int, *, long: bool
    ) -> None:
        self.phase, self.long, self.from_step = phase, long, from_step
        self.spans: list[Span] = []
        self.borders: list[tuple[int, int]] = []
        """Ends of the steps in which the phase occurred: step number, and microseconds since the epoch."""
        self.done = False
        self.failed = ""
        self.since = time.monotonic()
        self.cleared = -1
        self._recording, self._tracker, self._steps = recording, tracker, steps
        self._began = False
        self._on_us = -1
        self._start_bytes = self._waited = self._switch_ns = 0

    def __call__(self, ending: str, beginning: str) -> None:
        """Handle a phase boundary."""
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


MOST_STEPS = 3
MOST_WANTS = 4
USUAL_STEPS = 8
AHEAD_STEPS = 3  # Number of steps ahead of the recorded one for which the recorder is reserved
LEAST_SECONDS, MOST_SECONDS = 20.0, 900.0
REASONS = ("asked", "spike", "leak", "oom")


class _Want(NamedTuple):
    armed: StackWindow
    reason: Any
    answer: Answer
    patience: float  # Seconds to wait for its step once it has the recorder; it waits twice as long for the recorder


class StackCapture:
    """Finds the causes of one rank's transients, one at a time; for the publisher thread."""

    def __init__(self, context: CaptureContext) -> None:
        self._rank, self._tracker, self._trained = context.rank, context.tracker, context.trained
        self._pace, self._recording, self._send = context.pace, context.recording, context.send
        self._usual: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=USUAL_STEPS))
        self._wants: list[_Want] = []
        self._now: _Want | None = None
        self._deadline = 0.0
        self._was_off = False
        self._step: Step | None = None

    def want(self, phase: str, steps: int, from_step: int, reason: str, answer: Answer) -> None:
        """Record stacks for a phase (empty: the whole step) of 1 to ``MOST_STEPS`` steps, from ``from_step`` on.

        ``reason`` is one of ``REASONS``: ``leak`` searches for memory that stayed, the others for transients.
        """
        recording, tracker = self._recording, self._tracker
        if self._rank.device.memory.measure != "cuda":
            answer(False, "this rank computes on the CPU: its allocations leave no trace to read", {})
        elif recording.by_script:
            answer(False, "the script records memory history itself; it is left alone", {})
        elif len(self._wants) >= MOST_WANTS:
            answer(False, f"{len(self._wants)} recordings of stacks are waiting already", {})
        else:
            leak = reason == "leak"
            armed = StackWindow(recording, tracker, phase, min(MOST_STEPS, max(1, steps)), from_step, long=leak)
            seconds = (PATIENCE_STEPS + max(0, from_step - tracker.step)) * self._pace.usual
            patience = min(MOST_SECONDS, max(LEAST_SECONDS, seconds))
            self._wants.append(_Want(armed, reason if reason in REASONS else "asked", answer, patience))
            self._begin()

    def note(self, step: Step) -> None:
        """Handle a sent step: keep the armed one, or add an ordinary one to the usual host times."""
        armed = self._now.armed if self._now is not None else None
        if armed is not None and armed.borders and step.step >= armed.borders[0][0]:
            if armed.done and step.step == armed.borders[-1][0]:
                self._step = step
            return
        self._keep("", step.host_us)
        for record in step.phases:
            self._keep(record.name, record.host_us)

    def tick(self) -> None:
        """Read the stacks of an armed step once its message has been sent; drop requests whose phase did not occur."""
        if not self._wants:
            return
        self._begin()
        want = self._now
        if want is None:
            return
        armed = want.armed
        try:
            if armed.done and self._step is not None:
                cause = self._find(armed, want.reason, self._step)
                self._send(cause)
                self._finish(want, True, _in_words(cause))
            elif armed.failed:
                self._finish(want, False, armed.failed)
            elif time.monotonic() >= self._deadline:
                what = f"phase {armed.phase!r} did not occur" if armed.phase else "no step ended"
                self._finish(want, False, f"{what} in {want.patience:.0f} s")
        except Exception as error:
            guard.log_error("finding a cause", error)
            self._finish(want, False, f"{type(error).__name__}: {error}")

    def _begin(self) -> None:
        """Acquire the recorder for a step that is near, if it is free; drop requests that waited too long for it."""
        tracker, now = self._tracker, time.monotonic()
        for want in list(self._wants):
            if want is not self._now and now > want.armed.since + 2 * want.patience:
                self._wants.remove(want)
                want.answer(False, f"the recorder was not free in {2 * want.patience:.0f} s", {})
        if self._now is not None:
            return
        near = next((want for want in self._wants if tracker.step + AHEAD_STEPS >= want.armed.from_step), None)
        if near is None or not self._recording.claim("arm"):
            return
        self._now, self._was_off, self._step = near, self._recording.mode == "off", None
        self._deadline = now + near.patience
        tracker.watchers = (*tracker.watchers, near.armed)

    def _keep(self, phase: str, host_us: int) -> None:
        self._usual[phase].append(host_us)

    def _finish(self, want: _Want, ok: bool, text: str) -> None:
        self._now, self._step = None, None
        self._wants.remove(want)
        want.armed.withdraw()
        if self._was_off or want.armed.long:
            self._recording.off()  # the recorder of numbers, if there is one, switches it on again
        elif self._recording.mode != "off":
            self._recording.numbers()
        self._recording.release()
        want.answer(ok, text, {})

    def _find(self, armed: StackWindow, reason: Any, step: Step) -> Cause:
        start = time.perf_counter_ns()
        leak = reason == "leak"
        trace = self._recording.read(self._rank.device.memory.device_index)
        notes: list[str] = []
        begin = armed.spans[0].begin_us
        if armed.cleared != self._recording.cleared:
            notes.append("the history was cleared during the recording")
        if not reaches_back(trace, begin, self._recording.entries):
            notes.append(f"the trace holds the last {len(trace)} entries, and does not reach back to the beginning")
        if leak:
            borders = armed.borders
            # Memory that one step allocates for the next, a batch fetched ahead, is no leak: it is freed a step later.
            border = borders[-2][1] if len(borders) > 1 else borders[-1][1]
            blocks = blocks_left(trace, begin, border, borders[-1][1])
        else:
            blocks = blocks_at_peak(trace, armed.spans)
        groups, attributed = grouped(trace, blocks, kept_counts=leak)
        transient, peak = (attributed, 0) if leak else _transient(step, armed.phase)
        if not leak and peak and abs(blocks.total_bytes - peak) > 0.02 * peak:
            notes.append(f"the trace gives {blocks.total_bytes} bytes at the peak, the allocator counted {peak}")
        if len(armed.spans) > 1 and armed.phase:
            notes.append(f"the highest of {len(armed.spans)} occurrences")
        sizes = model_sizes(self._trained)
        usual = self._usual.get(armed.phase)
        return Cause(
            rank=self._rank.rank,
            step=step.step,
            phase=armed.phase,
            time=time.time(),
            reason=reason,
            transient_bytes=transient,
            groups=groups,
            peak_bytes=peak,
            attributed_bytes=min(attributed, transient),
            parameter_bytes=sizes.parameter_bytes,
            trainable=sizes.trainable,
            armed_us=armed.host_us(step),
            usual_us=round(statistics.median(usual)) if usual else 0,
            note="; ".join(notes),
            read_us=(time.perf_counter_ns() - start) // 1000,
            vocabulary=sizes.vocabulary,
        )


def _transient(step: Step, phase: str) -> tuple[int, int]:
    if phase:
        record = step.phase(phase)
        return (record.allocated.transient, record.allocated.peak) if record is not None else (0, 0)
    if not step.phases:
        return 0, 0
    peak = max(record.allocated.peak for record in step.phases)
    return max(0, peak - max(step.phases[0].allocated.start, step.phases[-1].allocated.end)), peak


def _in_words(cause: Cause) -> str:
    where = f"{cause.phase} of step {cause.step}" if cause.phase else f"step {cause.step}"
    innermost = next((group.frames[-1] for group in cause.groups if group.frames), "no stack says where")
    what = "left behind by" if cause.reason == "leak" else "was allocated and freed in"
    return f"{cause.transient_bytes / 2**20:.1f} MiB {what} {where}: {innermost}"
