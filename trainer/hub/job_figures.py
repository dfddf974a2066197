"""Figures of one job, accumulated from its ranks' telemetry: steps, peaks by phase, losses, step times, ends."""

from dataclasses import dataclass, field
from math import isfinite

import msgspec

from ...protocol.analysis.deaths.detector import is_nearer_cause
from ...protocol.messages.control import RankState
from ...protocol.messages.hosts import Job, JobPhase, JobRank, JobStateName
from ...protocol.messages.telemetry import Closing, DeviceInfo, Failure, Goodbye, Hello, Step
from ...protocol.messages.wire import Message

_TEXT_LIMIT = 500


@dataclass(slots=True)
class _PhaseTally:
    name: str
    allocated: int = 0
    reserved: int = 0
    resident: int | None = None
    step: int = 0
    host_us: int = 0

    def message(self) -> JobPhase:
        return JobPhase(self.name, self.allocated, self.reserved, self.resident, self.step, self.host_us)


@dataclass(slots=True)
class RankTally:
    """One process of a job and its counts."""

    hello: Hello
    first: int = 0
    step: int = 0
    steps: int = 0
    host_us: int = 0
    first_us: int = 0
    loss: float | None = None
    phases: dict[str, _PhaseTally] = field(default_factory=dict[str, _PhaseTally])
    goodbye: str = ""  # The reason in its ``Goodbye``; empty before that
    failure: str = ""
    state: RankState | None = None  # Its last state as judged by the hub, if any

    @property
    def ended(self) -> bool:
        """Whether no further messages of it are expected."""
        judged = self.state is not None and self.state.state in ("gone", "finished")
        return judged or (self.state is None and bool(self.goodbye))

    @property
    def succeeded(self) -> bool:
        """Whether it ended without an error."""
        if self.state is not None and self.state.state in ("gone", "finished"):
            return self.state.state == "finished"
        return self.goodbye in ("finished", "stopped")

    def restarts(self, step: Step) -> bool:
        """Return whether this process counts its steps from 1 again, because it started another training."""
        return self.steps > 1 and step.step <= self.first < self.step

    def add_step(self, step: Step) -> None:
        """Count one finished step."""
        if not self.steps:
            self.first, self.first_us = step.step, step.host_us
        self.steps += 1
        self.step = step.step
        self.host_us += step.host_us
        if step.loss is not None and isfinite(step.loss):
            self.loss = step.loss
        self.add_phases(step)

    def add_phases(self, step: Step | Closing) -> None:
        """Count the phases of a step, or those after the last one, such as a final evaluation or save."""
        for record in step.phases:
            phase = self.phases.get(record.name)
            if phase is None:
                phase = self.phases[record.name] = _PhaseTally(record.name)
            phase.host_us += record.host_us
            highest = max(each.resident or each.allocated for each in self.phases.values())
            if isinstance(step, Step) and record.coarse and not step.owns_peak(record, highest):
                continue
            if record.reserved.peak > phase.reserved:
                phase.reserved = record.reserved.peak
            resident = record.resident
            if record.allocated.peak > phase.allocated:
                phase.allocated = record.allocated.peak
                phase.step = step.step if resident is None else phase.step
            if resident is not None and (phase.resident is None or resident.peak > phase.resident):
                phase.resident, phase.step = resident.peak, step.step

    def message(self) -> JobRank:
        """Return the message about this rank."""
        hello, state = self.hello, self.state
        process = hello.rank, hello.pid, hello.start_ticks, hello.host
        return JobRank(
            *process,
            *(self.step, self.steps, self.host_us, self.loss),
            state=(state.state if state is not None else self.goodbye) if self.ended else "",
            text=(self.failure or (state.text if state is not None and self.ended else ""))[:_TEXT_LIMIT],
            exit_code=state.exit_code if state is not None else None,
            signal=state.signal if state is not None else None,
            phases=[phase.message() for phase in self.phases.values()],
        )


class JobTally:
    """One job: its ranks by number, and its state.

    ``started`` is the time at which its first rank reported; ``shown``: its telemetry is in the stream.
    """

    def __init__(self, number: int, started: float, shown: bool) -> None:
        self.number = number
        self.started = started
        self.shown = shown
        self.ranks: dict[int, RankTally] = {}
        self.ended: float | None = None
        self.version = 0  # Incremented with every change
        self.followed = False  # Whether its processes have started another training
        self._first_to_fail: int | None = None

    @property
    def world_size(self) -> int:
        """World size as reported by its ranks."""
        return max((rank.hello.world_size for rank in self.ranks.values()), default=0)

    @property
    def stepped(self) -> bool:
        """Whether some rank has finished a step."""
        return any(rank.steps for rank in self.ranks.values())

    @property
    def all_ended(self) -> bool:
        """Whether all ranks that reported have ended."""
        return bool(self.ranks) and all(rank.ended for rank in self.ranks.values())

    def join(self, hello: Hello) -> None:
        """Register a rank's ``Hello``, or a later one of the same process."""
        known = self.ranks.get(hello.rank)
        if known is not None and (known.hello.pid, known.hello.start_ticks) == (hello.pid, hello.start_ticks):
            known.hello = hello
        else:
            self.ranks[hello.rank] = RankTally(hello)
        self.ended = None
        self.version += 1

    def add(self, message: Message) -> None:
        """Count a step, the phases after the last one, or the end of one of its ranks."""
        if not isinstance(message, Step | Closing | Goodbye | Failure):
            return
        rank = self.ranks.get(message.rank)
        if rank is None:
            return
        if isinstance(message, Step):
            rank.add_step(message)
        elif isinstance(message, Closing):
            rank.add_phases(message)
        elif isinstance(message, Failure):
            self._failed(message.rank, message.error)
        else:
            rank.goodbye = message.reason
            if message.reason == "failed":
                self._failed(message.rank, message.text)
        self.version += 1

    def state(self, state: RankState) -> None:
        """Record the state of a rank as the hub judges it."""
        rank = self.ranks.get(state.rank)
        if rank is None or (state.pid and state.pid != rank.hello.pid):
            return
        rank.state = state
        if state.state == "gone" and self._first_to_fail is None:
            self._first_to_fail = state.rank
        self.version += 1

    def close(self, now: float) -> None:
        """Record that its processes are gone."""
        if self.ended is None:
            self.ended = now
            self.version += 1

    def message(self, now: float) -> Job:
        """Return the message about the job's current state."""
        ranks = [self.ranks[number] for number in sorted(self.ranks)]
        losses = [rank.loss for rank in ranks if rank.loss is not None]
        made = max(ranks, key=lambda rank: rank.steps, default=None)
        lowest = ranks[0].hello if ranks else None
        state, text = self._state(ranks)
        return Job(
            number=self.number,
            time=now,
            state=state,
            started=self.started,
            ended=self.ended,
            text=text,
            world_size=self.world_size,
            restart=max((rank.hello.restart for rank in ranks), default=0),
            argv=list(lowest.argv) if lowest is not None else [],
            model=next((rank.hello.model for rank in ranks if rank.hello.model), ""),
            shown=self.shown,
            first_step=made.first if made is not None else 0,
            step=min((rank.step for rank in ranks), default=0),
            steps=made.steps if made is not None else 0,
            loss=sum(losses) / len(losses) if losses else None,
            step_us=_mean_us(made) if made is not None else 0,
            ranks=[rank.message() for rank in ranks],
            failed_rank=self._first_to_fail,
        )

    def restore(self, job: Job, hellos: dict[tuple[int, int], Hello]) -> None:
        """Restore the counts of an earlier hub.

        ``hellos`` are by pid and start time; ranks without one get the values of the job.
        """
        self.ended = job.ended
        for known in job.ranks:
            hello = hellos.get((known.pid, known.start_ticks)) or _hello_of(job, known)
            tally = RankTally(hello, job.first_step, known.step, known.steps, known.host_us, loss=known.loss)
            tally.first_us = max(0, known.host_us - job.step_us * max(0, known.steps - 1))
            for each in known.phases:
                tally.phases[each.name] = _PhaseTally(*msgspec.structs.astuple(each))
            _restore_end(tally, known, job.time)
            self.ranks[known.rank] = tally
        self._first_to_fail = job.failed_rank
        if self._first_to_fail is None:
            ended = (rank for rank, tally in self.ranks.items() if tally.failure or tally.ended)
            self._first_to_fail = next((rank for rank in ended if not self.ranks[rank].succeeded), None)
        # Its processes have started another training: the job finished, although none of them has ended.
        self.followed = job.state == "finished" and not self.all_ended

    def _failed(self, rank: int, error: str) -> None:
        tally = self.ranks[rank]
        tally.failure = tally.failure or error[:_TEXT_LIMIT]
        first = self._first_failed
        if first is None or is_nearer_cause(error, first.failure):
            self._first_to_fail = rank

    @property
    def _first_failed(self) -> RankTally | None:
        return None if self._first_to_fail is None else self.ranks.get(self._first_to_fail)

    def _state(self, ranks: list[RankTally]) -> tuple[JobStateName, str]:
        if self.ended is None:
            return ("training" if self.stepped else "starting"), ""
        if self.followed:
            return "finished", ""
        first = self._first_failed
        if first is not None and not first.succeeded:
            why = first.failure or (first.state.text if first.state is not None else "")
            line = next((line.strip() for line in why.splitlines() if line.strip()), "")
            return "failed", f"rank {first.hello.rank}: {line}"[:_TEXT_LIMIT].removesuffix(": ")
        missing = self.world_size - len(ranks)
        if all(rank.succeeded for rank in ranks) and missing <= 0:
            return ("stopped" if any(rank.goodbye == "stopped" for rank in ranks) else "finished"), ""
        if missing > 0:
            return "failed", f"{missing} of {self.world_size} ranks never reported"
        return "ended", "its processes are gone"


def _hello_of(job: Job, rank: JobRank) -> Hello:
    """Return a substitute for a ``Hello`` that the recording no longer has, or never had (a concurrent job)."""
    process = rank.rank, rank.rank, job.world_size, rank.host, rank.pid, rank.start_ticks
    device = DeviceInfo("cpu", 0, "", 0)
    return Hello(*process, device, "cuda", job.started, model=job.model, argv=job.argv, restart=job.restart)


def _restore_end(tally: RankTally, known: JobRank, time: float) -> None:
    if known.state in ("finished", "failed", "stopped"):
        tally.goodbye = known.state
    if known.state in ("gone", "finished"):
        state = "gone" if known.state == "gone" else "finished"
        end = 0.0, known.pid, known.exit_code, known.signal
        tally.state = RankState(known.rank, state, time, known.text, *end)
    if known.state != "finished":
        tally.failure = known.text


def _mean_us(rank: RankTally) -> int:
    """Return the mean host time of a step, us, without the first: it loads kernels and creates optimizer states."""
    if rank.steps > 1:
        return (rank.host_us - rank.first_us) // (rank.steps - 1)
    return rank.host_us
