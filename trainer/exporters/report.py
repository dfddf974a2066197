"""What every target of ``--report-to`` has in common: its interface, and the bounded queue in front of it.

A target is a system that receives a run's messages and alerts, through its own client. Its client may block for any
time and raise anything: it runs in a thread of its own, in a process of its own, behind a queue that drops its oldest
messages and counts their points. To add a target: one file with a class that implements ``Target``, and its line in
``protocol.run.targets.REPORT_TARGETS``.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...protocol.errors import FtmonError
from ...protocol.figures import FIGURES, points
from ...protocol.messages.control import Alert
from ...protocol.messages.hosts import Job
from ...protocol.messages.wire import Frame
from ...protocol.run.rundir import RunFile
from ...protocol.text import sanitize

QUEUED = 10_000  # Messages that wait at most: some 40 MB, and 100 s of 100 messages a second
ALERTS_QUEUED = 1_000
MOST_AT_ONCE = 500  # Messages in one call of ``Target.points``
SILENT_SECONDS = 3.0  # Time after which a call that has not returned is reported
OPEN_SECONDS = 30.0  # The same for ``open``: some clients import for long
_FIRST_RETRY_SECONDS = 2.0
_LONGEST_RETRY_SECONDS = 60.0
_KINDS = (*FIGURES, Job)


class Sent(NamedTuple):
    """A message for a target. Its values are ``protocol.figures.points(frame.message)``."""

    frame: Frame
    live: bool
    """False: from the state of the run, which is asked for at first and after a gap: it may be older than what was sent
    before, and may repeat it."""


class Target(Protocol):
    """A system that receives a run. All methods are called by one thread; each may block, and may raise anything.

    The text of an ``FtmonError`` is shown as it is, so it contains no key; of other errors only the type is shown.
    """

    seconds: float  # Time between two calls of ``points``
    end_seconds: float  # Time after the end of the run for what is left; less than ``targets.EXPORTERS_END_SECONDS``

    def open(self, run: RunFile) -> None:
        """Connect to the system; called again after a while if it raises."""
        ...

    def points(self, batch: Sequence[Sent]) -> None:
        """Send messages, each of which has figures or is a ``Job``; ``batch`` may be empty. They are not sent again."""
        ...

    def alert(self, alert: Alert) -> None:
        """Send an alert that was raised or, with ``alert.resolved``, resolved."""
        ...

    def close(self) -> None:
        """Send what is left and disconnect."""
        ...


class Feed:
    """Passes messages to a target in a thread; ``put`` never waits. Use ``start``, then ``end``."""

    def __init__(self, target: Target, run: RunFile) -> None:
        self._target = target
        self._run = run
        self._waiting: deque[Sent] = deque()
        self._passed: list[Sent] = []  # Messages that the target has been given, and has not taken yet
        self._alerts: deque[Alert] = deque()
        self._alerts_seen: set[tuple[int, bool]] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._due = threading.Event()  # The target is called before its time: the queue fills, or the run has ended
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._thread = threading.Thread(target=self._work, name="target", daemon=True)
        self.seconds, self.end_seconds = target.seconds, target.end_seconds
        self.dropped = 0  # Points that did not reach the target
        self._error = ""  # Why the last call failed; empty: it succeeded
        self._silent_at: float | None = None  # When the call under way counts as not answered

    @property
    def error(self) -> str:
        """Why the target accepts nothing now; empty: it does."""
        at = self._silent_at
        return self._error or ("no answer yet" if at is not None and time.monotonic() > at else "")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, frame: Frame, live: bool) -> None:
        """Queue a message; if the queue is full, the oldest one is dropped."""
        message = frame.message
        with self._lock:
            if isinstance(message, Alert):
                key = message.id, message.resolved is not None
                if key not in self._alerts_seen and len(self._alerts) < ALERTS_QUEUED:
                    self._alerts_seen.add(key)
                    self._alerts.append(message)
            elif isinstance(message, _KINDS):
                if len(self._waiting) >= QUEUED:
                    self._drop([self._waiting.popleft()])
                self._waiting.append(Sent(frame, live))
                if len(self._waiting) > QUEUED // 2 and not self._error:
                    self._due.set()

    def check(self, missed: int) -> None:
        """Do nothing: the thread passes messages on."""

    def end(self, seconds: float) -> bool:
        """Have the target send what is left; return whether it was done within ``seconds``.

        A target whose last call failed has ``SILENT_SECONDS``.
        """
        self._ending.set()
        self._due.set()
        self._thread.join(min(seconds, SILENT_SECONDS) if self._error else seconds)
        done = not self._thread.is_alive()
        with self._lock:
            self._drop([*self._passed, *self._waiting])
            self._waiting.clear()
        return done

    def _drop(self, batch: Sequence[Sent]) -> None:
        self.dropped += sum(sum(1 for _ in points(sent.frame.message)) for sent in batch if sent.live)

    def _work(self) -> None:
        while error := self._failure(lambda: self._target.open(self._run), OPEN_SECONDS):
            self._error = error
            if self._ending.wait(self._retry_seconds):
                return
            self._retry_seconds = min(2 * self._retry_seconds, _LONGEST_RETRY_SECONDS)
        self._error = ""
        while not self._ending.is_set():
            started = time.monotonic()
            self._pass_on()
            if self._due.wait(max(0.0, self._target.seconds - (time.monotonic() - started))):
                self._due.clear()
        while self._waiting or self._alerts:
            self._pass_on()
        self._error = self._failure(self._target.close) or self._error

    def _pass_on(self) -> None:
        """Pass on all that waits; after a failure, the rest waits for the next time."""
        while True:
            with self._lock:
                alerts = list(self._alerts)
                self._alerts.clear()
                batch = [self._waiting.popleft() for _ in range(min(MOST_AT_ONCE, len(self._waiting)))]
                self._passed = batch
            error = self._failure(lambda batch=batch: self._target.points(batch))
            with self._lock:
                self._drop(batch if error else [])
                self._passed = []
            for alert in alerts:
                error = self._failure(lambda alert=alert: self._target.alert(alert)) or error
            self._error = error
            if error or not self._waiting:
                return

    def _failure(self, function: Callable[[], object], seconds: float = SILENT_SECONDS) -> str:
        """Call a method of the target; return why it failed, empty if it succeeded."""
        self._silent_at = time.monotonic() + seconds
        try:
            function()
        except FtmonError as error:
            return str(error)
        except Exception as error:
            return sanitize(f"its client raised {type(error).__name__}", 200)
        finally:
            self._silent_at = None
        return ""
