"""Commits the recording and reports its problems: losses, write errors of the disk, a removed recording."""

import time
from collections.abc import Callable
from threading import Event

from ....protocol.analysis.findings import Finding
from ....protocol.analysis.hub_facts import RemovedRecordingFacts
from ...host.flow import Post
from ..analyses.analysis import Analysis
from ..ranks.agents import Agents
from .stream import Stream


class Commits:
    """Commits the stream. Main loop only, except ``then_set``.

    ``last_recorded`` is when the earlier hub's last message was recorded, or the run began, seconds since the epoch.
    """

    def __init__(
        self,
        stream: Stream,
        agents: Agents,
        analysis: Analysis,
        report: Callable[[], None],
        post: Post,
        last_recorded: float,
    ) -> None:
        self._stream = stream
        self._agents = agents
        self._analysis = analysis
        self._report = report
        self._post = post
        self._last_recorded = last_recorded
        self._unreported = False
        """Whether messages lost between two hubs are not reported yet."""
        self._disk_trouble = False
        self._disk_notice = ""

    def missed(self, count: int) -> None:
        """Record the loss of ``count`` messages that an earlier hub had received or that were in flight to it."""
        self._stream.recorder.writer.lose(
            count, self._last_recorded, time.time(), "a hub ended before it had recorded them"
        )
        self._unreported = True

    def commit(self) -> None:
        """Commit the messages appended since the last call."""
        self._report_missed()
        numbers = self._agents.unconfirmed()
        self._stream.commit((lambda: self._post(lambda: self._agents.confirm(numbers))) if numbers else None)
        notice = self._stream.recorder.writer.notice
        if notice != self._disk_notice:
            self._disk_notice = notice
            self._analysis.put(Finding("recording_removed", RemovedRecordingFacts(notice), severity="error"))
        trouble = bool(self._stream.recorder.error)
        if trouble != self._disk_trouble:  # report at once, not with the next regular report
            self._disk_trouble = trouble
            self._report()

    def commit_all(self, seconds: float) -> None:
        """Commit, and wait at most ``seconds`` for the disk."""
        self.commit()
        written = Event()
        self._stream.commit(written.set)
        written.wait(seconds)

    def commit_when_due(self) -> None:
        """Commit at once if too many messages are uncommitted to wait for the next tick."""
        if self._stream.commit_due:
            self.commit()

    def then_set(self, done: Event) -> None:
        """Commit everything published so far, then set the event; called by the history thread."""

        def commit() -> None:
            self._report_missed()
            self._stream.commit(done.set)

        self._post(commit)

    def _report_missed(self) -> None:
        """Report a loss in the transaction that records it, since this hub too may be killed at any moment."""
        if self._unreported:
            self._unreported = False
            self._report()
