"""Selects the job whose messages are in the stream: starts a job, excludes concurrent ones, starts the next training.

``JobTable`` maps processes to jobs; this module applies the result to the rest of the hub.
"""

import socket
import time
from collections.abc import Callable, Iterable

from ...protocol.analysis.findings.finding import Finding
from ...protocol.analysis.hub_facts import ConcurrentJobFacts, JobFailedFacts
from ...protocol.host.process import ProcessId, is_alive
from ...protocol.messages.control import RankState
from ...protocol.messages.hosts import Job
from ...protocol.messages.telemetry import Hello, Step
from ...protocol.messages.wire import Message
from .core import Core
from .detect import PortWatch
from .end import EndDetector
from .job_figures import JobTally
from .ranks import identity_of

# Maps each process of a run to its job, and selects the job in the stream.
#
# A **job** is one process group of ranks. A rank's ``Hello`` belongs to an existing job if
#
# - the job already has that process; or
# - the job has no rank of that number, has the same world size and restart count, its ranks on that host were
#   launched by the same process (``Hello.launch``; unknown matches any), and the job is running or was launched by that
#   process. A rank that starts the other ranks of its host (Lightning's ``devices=2`` without a launcher) counts as
#   launched by the same process; or
# - the job's process of that rank is gone while others of it live, launched by the same process: a single rank was
#   restarted.
#
# Any other ``Hello`` starts a job, which replaces the previous one in the stream. If a process of the previous job with
# the same rank still lives, the two jobs run concurrently. Then the later one is counted (``JobTally``) but kept out of
# the stream, where its ranks, steps and charts would be mixed with the other's, until the job there has ended.
#
# Processes that count their steps from 1 again (a loop over configurations in one script) start a job too.


REFRESH_S = 4.0  # Seconds between messages about a job that makes steps; longer for jobs with many ranks
LATE_S = 30.0
"""Seconds after the end of all other ranks in which a rank may still report: without collectives, one rank may finish
before another has imported its libraries."""
RANKS_A_SECOND = 16
MOST_JOBS = 10_000  # Maximum number of jobs per run; later ranks count towards the last one


class JobTable:
    """All jobs of a run. ``lives`` returns whether the process of a ``Hello`` is known to be alive."""

    def __init__(self, lives: Callable[[Hello], bool]) -> None:
        self._lives = lives
        self.jobs: dict[int, JobTally] = {}
        self.shown: JobTally | None = None  # The job in the stream
        self.off_stream: set[str] = set()  # Senders whose messages are kept out of the stream
        self._of: dict[str, JobTally] = {}
        self._renamed: dict[str, Hello] = {}
        """By sender: a ``Hello`` with another model; the next steps show whether it starts a job."""
        self._reported: dict[int, tuple[int, float]] = {}  # By job: the version and time of the last message about it
        self._all_ended: dict[int, float] = {}  # By job: when all its ranks were first found to have ended

    def hello(self, hello: Hello, now: float) -> tuple[JobTally, bool]:
        """Return the job of a ``Hello``, and whether it starts that job, which is concurrent if not ``shown``."""
        sender = identity_of(hello)
        known = self._of.get(sender)
        if known is not None:
            if self._renames(known, hello):
                self._renamed[sender] = hello
            else:
                known.join(hello)
            return known, False
        job = next((job for job in reversed(self.jobs.values()) if self._belongs(job, hello)), None)
        if job is None and len(self.jobs) >= MOST_JOBS:
            job = self.shown
        if job is not None:
            job.join(hello)
            self._of[sender] = job
            if not job.shown:
                self.off_stream.add(sender)
            return job, False
        return self._begin(hello, sender, now), True

    def _begin(self, hello: Hello, sender: str, now: float) -> JobTally:
        before = self.shown
        beside = before is not None and self._at_the_same_time(before, hello)
        job = JobTally(len(self.jobs) + 1, now, shown=not beside)
        self.jobs[job.number] = job
        job.join(hello)
        self._of[sender] = job
        if beside:
            self.off_stream.add(sender)
            return job
        if before is not None:
            # Late messages of the previous job's ranks must not enter the new job.
            self.off_stream |= self._senders(before)
        self.shown = job
        return job

    def _senders(self, job: JobTally) -> set[str]:
        return {sender for sender, owner in self._of.items() if owner is job}

    def add(self, sender: str, message: Message) -> None:
        """Count a message for the job of its sender."""
        job = self._of.get(sender)
        if job is not None:
            job.add(message)

    def step(self, sender: str, step: Step) -> bool:
        """Count a step; True if it is the first of another training in the same processes."""
        job = self._of.get(sender)
        rank = job.ranks.get(step.rank) if job is not None else None
        if job is None or rank is None or (job is self.shown and rank.restarts(step)):
            return job is not None and rank is not None
        renamed = self._renamed.pop(sender, None)
        if renamed is not None:
            job.join(renamed)
        rank.add_step(step)
        job.version += 1
        return False

    def follow(self, now: float) -> JobTally:
        """Start the job of another training in the processes of the current one."""
        before = self.shown
        assert before is not None
        job = JobTally(len(self.jobs) + 1, now, shown=True)
        self.jobs[job.number] = self.shown = job
        before.followed = True
        before.close(now)
        for rank in before.ranks.values():
            sender = identity_of(rank.hello)
            job.join(self._renamed.pop(sender, rank.hello))
            self._of[sender] = job
        return job

    def state(self, state: RankState) -> None:
        """Record a rank's state in the current job, or in an earlier one (if its exit status arrived late)."""
        jobs = [] if self.shown is None else [self.shown, *reversed(self.jobs.values())]
        for job in jobs:
            rank = job.ranks.get(state.rank)
            if rank is not None and (not state.pid or rank.hello.pid == state.pid):
                job.state(state)
                return

    def poll(self, now: float) -> list[Job]:
        """Close jobs whose ranks have all ended; return the tallies to report."""
        for job in self.jobs.values():
            if job.ended is None and (self._is_over(job, now) if job.shown else not self._any_lives(job)):
                job.close(now)
        return [found for job in self.jobs.values() if (found := self._due(job, now)) is not None]

    def next_concurrent(self) -> JobTally | None:
        """Return a running job to switch to, if the job in the stream has ended; None if there is none."""
        if self.shown is None or self.shown.ended is None:
            return None
        job = next((job for job in self.jobs.values() if not job.shown and job.ended is None), None)
        if job is None:
            return None
        job.shown = True
        job.version += 1
        self.off_stream |= self._senders(self.shown)
        self.off_stream -= self._senders(job)
        self.shown = job
        return job

    def describe(self, job: JobTally, now: float) -> Job:
        """Return the message about a job, and count it as sent."""
        self._reported[job.number] = job.version, now
        return job.message(now)

    def close(self, now: float) -> list[Job]:
        """Close all jobs at the end of the run."""
        for job in self.jobs.values():
            job.close(now)
        told = {number: version for number, (version, _) in self._reported.items()}
        return [self.describe(job, now) for job in self.jobs.values() if told.get(job.number) != job.version]

    def restore(self, messages: Iterable[Message]) -> None:
        """Restore the jobs of an earlier hub from their last messages and the latest ``Hello`` messages."""
        known = list(messages)
        hellos = {(hello.pid, hello.start_ticks): hello for hello in known if isinstance(hello, Hello)}
        for number, job in sorted({job.number: job for job in known if isinstance(job, Job)}.items()):
            tally = self.jobs[number] = JobTally(number, job.started, job.shown)
            tally.restore(job, hellos)
            self._reported[number] = tally.version, job.time
            for rank in job.ranks:
                sender = f"rank-{rank.rank}-{rank.pid}-{rank.start_ticks}"
                self._of[sender] = tally
                if not job.shown:
                    self.off_stream.add(sender)
            if job.shown:
                if self.shown is not None:
                    self.off_stream |= self._senders(self.shown)
                self.shown = tally

    def _is_over(self, job: JobTally, now: float) -> bool:
        if not job.all_ended:
            self._all_ended.pop(job.number, None)
            return False
        since = self._all_ended.setdefault(job.number, now)
        may_grow = len(job.ranks) < job.world_size and all(rank.succeeded for rank in job.ranks.values())
        return not may_grow or not 0 <= now - since < LATE_S

    def _renames(self, job: JobTally, hello: Hello) -> bool:
        rank = job.ranks.get(hello.rank)
        return job is self.shown and rank is not None and rank.steps > 0 and rank.hello.model not in ("", hello.model)

    def _due(self, job: JobTally, now: float) -> Job | None:
        version, at = self._reported.get(job.number, (-1, 0.0))
        if version == job.version:
            return None
        wait = max(REFRESH_S, len(job.ranks) / RANKS_A_SECOND)
        return self.describe(job, now) if job.ended is not None or now - at >= wait else None

    def _belongs(self, job: JobTally, hello: Hello) -> bool:
        known = next(iter(job.ranks.values()), None)
        if known is None or (known.hello.world_size, known.hello.restart) != (hello.world_size, hello.restart):
            return False
        here = [rank.hello for rank in job.ranks.values() if rank.hello.host == hello.host]
        same = any(_launched_together(other, hello) for other in here)
        if not same and hello.launch and any(other.launch for other in here):
            return False
        taken = job.ranks.get(hello.rank)
        if taken is None:
            return job.ended is None or (same and job.number == len(self.jobs))
        if not same or taken.succeeded or self._lives(taken.hello):
            return False
        return any(rank is not taken and not rank.ended and self._lives(rank.hello) for rank in job.ranks.values())

    def _at_the_same_time(self, before: JobTally, hello: Hello) -> bool:
        if before.ended is not None:
            return False
        taken = before.ranks.get(hello.rank)
        return taken is not None and not taken.ended and not taken.goodbye and self._lives(taken.hello)

    def _any_lives(self, job: JobTally) -> bool:
        return any(not rank.goodbye and self._lives(rank.hello) for rank in job.ranks.values())


def _launched_together(one: Hello, other: Hello) -> bool:
    """Return whether one process launched both ranks, or one of the ranks launched the other."""
    if not one.launch or not other.launch:
        return False
    return one.launch == other.launch or one.launch == _process(other) or other.launch == _process(one)


def _process(hello: Hello) -> str:
    """Return a rank's process in the form of ``Hello.launch``."""
    return f"{hello.pid}-{hello.start_ticks}"


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
        self.state = self._jobs.state
        self.add = self._jobs.add

    def restore(self, messages: Iterable[Message]) -> None:
        """Restore the jobs that an earlier hub recorded."""
        self._jobs.restore(messages)

    def join(self, hello: Hello, t: float) -> bool:
        """Assign a rank's ``Hello`` to a job; False if that job is kept out of the stream."""
        job, is_new = self._jobs.hello(hello, t)
        if job.shown:
            if is_new:
                self._begin(job)
            return True
        if is_new:
            self._core.emit(self._jobs.describe(job, t))
            self._report_concurrent(job.number, hello)
        self._core.rank_hosts.senders.add(identity_of(hello))
        return False

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
