"""Analyses the stream: rank states, the run's state, alerts. Its failures never reach the stream.

Its conclusions are messages of the stream too; they are not fed back to the tracker and the detectors.
"""

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from ....protocol.analysis.findings import Finding
from ....protocol.analysis.findings.alert_store import AlertStore
from ....protocol.analysis.findings.requests import Action
from ....protocol.analysis.pipeline import Detectors
from ....protocol.analysis.stalls.rank_tracker import ProcessFact, RankTracker
from ....protocol.errors import ProtocolError
from ....protocol.messages import wire
from ....protocol.messages.oom import OomReport
from ....protocol.messages.telemetry import Step
from ....protocol.messages.wire import Frame, Message
from ....protocol.run.rundir import ExitFile, LeftoversFile, RunFile
from ..ranks.rank_link import Answers

_BATCH = 64
"""Maximum steps in a batch; more do not stay in the processor's cache."""
_TRACEBACKS = 20
"""Number of its own failures that are logged with a traceback."""


class Analysis:
    """Passes messages to tracker and detectors in their order. Main loop only.

    ``emit`` appends a conclusion to the stream and returns its number and time; ``keep`` writes an OOM report.
    """

    def __init__(
        self,
        run_file: RunFile,
        emit: Callable[[Message], tuple[int, float]],
        keep: Callable[[OomReport], OomReport] | None = None,
    ) -> None:
        self._emit = emit
        self.act: Callable[[Iterable[Action]], None] = lambda _: None
        """Sends the actions that detectors request."""
        self._store = AlertStore()
        self.tracker = RankTracker(has_launcher=run_file.kind != "watch")
        self._detectors = Detectors(self.tracker, self._store, keep)
        self._steps: list[tuple[float, Step]] = []
        """Steps collected for the detectors, with their times of receipt."""
        self._failures = 0

    def restore(self, frames: Iterable[Frame]) -> None:
        """Restore from the history that an earlier hub recorded; raises no alert."""
        frames = list(frames)
        self._guard(lambda: self.tracker.restore(frames))
        self._guard(lambda: self._detectors.restore(frames))

    def feed(self, seq: int, t: float, message: Message) -> None:
        """Analyse one message of the stream.

        Steps are collected, and the detectors process them in a batch: before the next message of another type, at
        ``_BATCH`` steps, or at ``flush``.
        """
        try:
            states = self.tracker.feed(seq, t, message)
            if states:
                self._conclude(states)
            if type(message) is Step:
                self._steps.append((t, message))
                if len(self._steps) >= _BATCH:
                    self.flush()
                return
            self.flush()
            alerts = self._detectors.feed(seq, t, message)
            if alerts:
                self._conclude(alerts)
        except Exception:
            self._failed()

    def flush(self) -> None:
        """Pass the collected steps to the detectors."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        try:
            alerts = self._detectors.steps(steps, self._failed)
            if alerts:
                self._conclude(alerts)
        except Exception:
            self._failed()

    def fact(self, fact: ProcessFact) -> None:
        """Analyse a fact of a rank's process."""
        self._guard(lambda: self._conclude(self.tracker.fact(fact)))

    def tick(self, now: float) -> None:
        """Run the detectors that depend on time, such as those for silent ranks."""
        self._guard(lambda: self._conclude(self.tracker.tick(now)))
        self._guard(lambda: self._conclude(self._detectors.tick(now)))

    def answered(self, action: Action, answers: Answers) -> None:
        """Analyse the stacks that a detector requested."""
        self._guard(lambda: self._conclude(self._detectors.stacks(time.time(), action, answers)))

    def begin_job(self) -> None:
        """Judge how each rank of the current job ended; later messages belong to the next job."""
        now = time.time()
        self._guard(lambda: self._conclude(self.tracker.close_job(now)))
        self._guard(lambda: self._conclude(self._detectors.tick(now)))
        self._guard(lambda: self._conclude(self._detectors.begin_job(now)))
        self._guard(self.tracker.begin_job)

    def follow_on(self) -> None:
        """Reset for another training in the same processes; the ranks keep their state."""
        self._guard(lambda: self._conclude(self._detectors.begin_job(time.time())))

    def job_ended_first(self, left: LeftoversFile) -> None:
        """Record that the job's command ended before its ranks."""
        found = left.exit_code, left.count, left.processes
        self._guard(lambda: self._conclude(self._detectors.job_ended_first(left.time, *found)))

    def ended(self, end: ExitFile) -> None:
        """Record the job's end."""
        state: Any = end.state if end.state in ("finished", "failed", "stopped") else "failed"
        self._guard(lambda: self._conclude(self.tracker.ended(time.time(), state, end.exit_code, end.text)))
        self._guard(lambda: self._conclude(self._detectors.tick(time.time())))

    def put(self, finding: Finding) -> None:
        """Raise, update or resolve the alert of one of the hub's own findings."""
        self._guard(lambda: self._conclude(self._detectors.put(time.time(), finding)))

    def _conclude(self, messages: Iterable[Message]) -> None:
        for message in messages:
            # A rank's texts may exceed the size limit of a message: then the message is dropped.
            with contextlib.suppress(OverflowError, ProtocolError):
                wire.decode_body(wire.encode_body(message))
                self._emit(message)
        actions = self._detectors.drain_actions()
        if actions:
            self.act(actions)

    def _guard(self, act: Callable[[], None]) -> None:
        self.flush()
        try:
            act()
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """Log an exception of a detector: only its verdict is lost."""
        self._failures += 1
        if self._failures <= _TRACEBACKS:
            traceback.print_exc(file=sys.stderr)
