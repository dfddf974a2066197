"""The jobs of a run: one process group of ranks each, with its own steps, peaks, loss and end.

A driver script that starts ``deepspeed`` once per configuration has one job per start, and ``torchrun --max-restarts``
has one job per attempt. The hub numbers jobs from 1 in the order in which their first rank reported.
"""

from typing import Literal

import msgspec

from .bounds import Name, Rank, Time, Whole

JobStateName = Literal["starting", "training", "finished", "failed", "stopped", "ended"]
"""``ended``: its processes are gone, and how they ended is unknown."""

OVER = ("finished", "failed", "stopped", "ended")
"""States of a job that has ended."""


class JobPhase(msgspec.Struct, frozen=True, omit_defaults=True):
    """One phase of one rank over a whole job."""

    name: str
    allocated_peak: Whole
    """Highest allocated bytes."""
    reserved_peak: Whole
    resident_peak: Whole | None = None
    """Highest resident set size (CPU only)."""
    peak_step: Whole = 0
    """The step of the highest peak (of the resident set where it is measured, else of allocated memory)."""
    host_us: Whole = 0
    """Host time, summed over the job's steps."""

    @property
    def peak(self) -> int:
        """Highest peak of the resident set where it is measured, else of allocated memory."""
        return self.resident_peak if self.resident_peak is not None else self.allocated_peak


class JobRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank of a job."""

    rank: Rank
    pid: Whole
    start_ticks: Whole
    host: Name = ""
    step: Whole = 0
    """The last step it finished."""
    steps: Whole = 0
    """Steps it finished in this job."""
    host_us: Whole = 0
    """Host time of those steps."""
    loss: float | None = None
    """The last step's loss."""
    state: str = ""
    """Its final state in this job; empty while the job runs."""
    text: str = ""
    """Reason of that state, in a few words."""
    exit_code: int | None = None
    signal: int | None = None
    phases: list[JobPhase] = []

    @property
    def peak_phase(self) -> JobPhase | None:
        """The phase with the highest peak; None before the first step."""
        return max(self.phases, key=lambda phase: phase.peak, default=None)


class Job(msgspec.Struct, tag="job", frozen=True, omit_defaults=True):
    """One job of a run: sent at its start, every few seconds while it makes steps, and at its end."""

    number: Whole
    """1 for the run's first job."""
    time: Time
    state: JobStateName
    started: Time
    """When its first rank reported."""
    ended: Time | None = None
    text: str = ""
    """Why it failed, in a few words."""
    world_size: Whole = 0
    restart: Whole = 0
    """Number of the restart by ``torchrun --max-restarts``; 0 for the first attempt."""
    argv: list[str] = []
    """The command line of its lowest rank."""
    model: str = ""
    shown: bool = True
    """True: its telemetry is in the stream. False: it ran at the same time as that job, and is only counted."""
    first_step: Whole = 0
    step: Whole = 0
    """The last step that every rank has finished."""
    steps: Whole = 0
    """Optimizer updates of the rank that made most."""
    loss: float | None = None
    """Mean over ranks of the last loss."""
    step_us: Whole = 0
    """Mean host time of a step, without the first step if there are others."""
    ranks: list[JobRank] = []
    failed_rank: Rank | None = None
    """The rank that failed first; None: none, or unknown."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in OVER

    @property
    def peak_rank(self) -> JobRank | None:
        """The rank with the highest peak; None before the first step."""
        return max((rank for rank in self.ranks if rank.phases), key=_peak, default=None)

    @property
    def allocated_peak(self) -> int:
        """Highest allocated bytes of any rank."""
        return max((phase.allocated_peak for rank in self.ranks for phase in rank.phases), default=0)

    @property
    def reserved_peak(self) -> int:
        """Highest reserved bytes of any rank."""
        return max((phase.reserved_peak for rank in self.ranks for phase in rank.phases), default=0)

    @property
    def peak(self) -> int:
        """Highest peak (``JobPhase.peak``) of any rank; 0 before the first step."""
        rank = self.peak_rank
        return _peak(rank) if rank is not None else 0


def _peak(rank: JobRank) -> int:
    phase = rank.peak_phase
    return phase.peak if phase is not None else 0
