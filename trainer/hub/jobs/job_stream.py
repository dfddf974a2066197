"""Selects the job whose messages are in the stream: starts a job, excludes concurrent ones, starts the next training.

``JobTable`` maps processes to jobs; this module applies the result to the rest of the hub.
"""

import socket
import time
from collections.abc import Callable, Iterable

from ....protocol.analysis.findings import Finding
from ....protocol.analysis.hub_facts import ConcurrentJobFacts, JobFailedFacts
from ....protocol.host.process import ProcessId, is_alive
from ....protocol.messages.telemetry import Hello, Step
from ....protocol.messages.wire import Message
from ..core import Core
from ..detect.port_watch import PortWatch
from ..end.end_detector import EndDetector
from ..ranks.rank_link import identity_of
from .job_figures import JobTally
from .job_table import MOST_JOBS, JobTable


class JobStream:
    """Puts the jobs of a run into the stream. Main loop only.

    ``register`` registers a rank's ``Hello``; ``end_job`` collects the facts about the processes so far.
    """

    def __init__(
        self,
        core: Core,
        end_detector: EndDetector,
        ports: PortWatch,
        register: Callable[[Hello], None],
        end_job: Callable[[], None],
    ) -> None:
        self._core = core
        self._end_detector = end_detector
        self._ports = ports
        self._register = register
        self._end_job = end_job
        self._jobs = JobTable(self._lives)
        self.off_stream = self._jobs.off_stream
        """Senders whose messages are kept out of the stream."""
        self.state = self._jobs.state
        self.add = self._jobs.add

    def restore(self, messages: Iterable[Message]) -> None:
        """Restore the jobs that an earlier hub recorded."""
        self._jobs.restore(messages)

    def join(self, hello: Hello, t: float) -> bool:
        """Assign a rank's ``Hello`` to a job; False if that job is kept out of the stream."""
        joined = self._jobs.hello(hello, t)
        if joined.begins:
            self._begin(joined.job)
        elif joined.first_concurrent:
            self._core.emit(self._jobs.describe(joined.job, t))
            self._report_concurrent(joined.job.number, hello)
        if joined.concurrent:
            self._core.rank_hosts.senders.add(identity_of(hello))
        return not joined.concurrent

    def step(self, sender: str, step: Step, t: float) -> bool:
        """Count a step; return whether it starts a job, as the first step of another training in that process."""
        if not self._jobs.step(sender, step) or len(self._jobs.jobs) >= MOST_JOBS:
            return False
        self._follow_on(t)
        self._jobs.step(sender, step)
        return True

    def tick(self) -> None:
        """Emit changed jobs; if the job in the stream has ended, switch to a concurrent one."""
        for job in self._jobs.poll(time.time()):
            self._core.emit(job)
            if not job.shown and job.state == "failed":
                facts = JobFailedFacts(job.number, job.text)
                self._core.analysis.put(Finding("job_failed", facts, severity="error", key=str(job.number)))
        following = self._jobs.next_concurrent()
        if following is not None:
            self._begin(following)
            self._introduce(following)

    def close(self) -> None:
        """Emit all jobs at the end of the run."""
        for job in self._jobs.close(time.time()):
            self._core.emit(job)

    def _begin(self, job: JobTally) -> None:
        if job.number > 1 or self._jobs.shown is not job:
            self._end_job()
            self._core.analysis.begin_job()
            self._describe_others(job, time.time())
            self._core.rank_hosts.begin_job()
            self._end_detector.begin_job()
            self._ports.begin_job()
        self._core.emit(self._jobs.describe(job, time.time()))

    def _follow_on(self, t: float) -> None:
        """Start the job of another training in the same processes."""
        job = self._jobs.follow(t)
        self._core.analysis.follow_on()
        self._describe_others(job, t)
        self._core.emit(self._jobs.describe(job, t))
        self._introduce(job)

    def _describe_others(self, job: JobTally, t: float) -> None:
        for other in self._jobs.poll(t):
            if other.number != job.number:
                self._core.emit(other)

    def _introduce(self, job: JobTally) -> None:
        """Append the ``Hello`` messages of a job's ranks to the stream again."""
        for rank in job.ranks.values():
            self._register(rank.hello)
            self._core.emit(rank.hello)

    def _report_concurrent(self, number: int, hello: Hello) -> None:
        shown = self._jobs.shown.number if self._jobs.shown is not None else 0
        facts = ConcurrentJobFacts(number, shown, hello.rank, list(hello.argv))
        self._core.analysis.put(Finding("concurrent_job", facts, key=str(number)))

    def _lives(self, hello: Hello) -> bool:
        """Return whether a rank's process is alive: from /proc on this host, from its agent's report on others."""
        if hello.host == socket.gethostname():
            return is_alive(ProcessId(hello.pid, hello.start_ticks))
        tracked = self._core.analysis.tracker.ranks.get(hello.rank)
        fact = tracked.fact if tracked is not None else None
        return fact is not None and fact.pid == hello.pid and fact.alive
