"""The judge's view of one rank, and the ranks' positions in the sequence of their collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .evidence import Collective, Evidence

Absence = Literal["", "stopped", "held", "gone", "silent", "cut off"]

BLOCKED_S = 1.5
"""A thread that stands at one line for this many seconds, in a collective or with an unfinished one, is blocked."""
LOCK_ASLEEP_S = 4.0
"""Limit in seconds for a rank blocked on a file lock in the kernel while both it and the lock's holder are idle."""


@dataclass(frozen=True, slots=True)
class RankView:
    """The judge's view of one rank. Seconds are ages at the time of judging."""

    rank: int
    step: int
    phase: str
    age: float
    """Seconds without progress."""
    limit: float
    """Limit of its phase, in seconds without progress."""
    inside: str = ""
    """The collective that it has entered and not left; empty outside of one."""
    last_collective: str = ""
    collectives: int = 0
    step_collectives: int = 0
    micro_step: int = 0
    per_step: int = -1
    """Number of collectives entered in its last finished step; -1: unknown."""
    absent: Absence = ""
    finished: bool = False
    group: str = ""
    """The process group of its current or last collective."""
    group_sequence: int = 0
    """Number of that group's collectives that it has entered, as counted by its probe."""
    size: int = 0
    stood_s: float = 0.0
    """Seconds without progress in its last report."""
    asleep_limit: float = float("inf")
    """Limit in seconds if it is found asleep."""
    working_limit: float = 0.0
    """Limit in seconds if its process tree works; never less than ``limit``."""
    latest: Evidence | None = None
    """Evidence of the last inspection, also from before its last progress."""
    steps_then: Mapping[int, int] = field(default_factory=dict[int, int])
    """Optimizer steps of every rank shortly after this rank's last progress."""
    evidence: Evidence | None = None
    """Evidence of an inspection since its last progress; None: not inspected."""

    @property
    def works(self) -> bool:
        """Whether its process tree reads, writes, sends, receives or compiles, or its device computes."""
        found = self.evidence
        return found is not None and (found.work in ("works", "device") or found.place.doing == "compiling")

    @property
    def patience(self) -> float:
        """Limit of its phase in seconds without progress, given its activity."""
        resumes = self.evidence is not None and self.evidence.resumes
        return max(self.limit, self.working_limit) if self.works or resumes else self.limit

    @property
    def blocked(self) -> bool:
        """Whether its training thread waits for other ranks or for its device, and does nothing else.

        Its phase's limit does not apply then: it belongs to a rank that works. Under NCCL the wait is often in no call
        of a collective: the host waits for a value that the device computes after it.
        """
        found = self.evidence
        if found is None or self.absent or found.stands < BLOCKED_S or found.resumes:
            return False
        return bool(self.inside) or found.place.doing in ("collective", "device", "backward") or found.unfinished

    @property
    def overdue(self) -> bool:
        """Whether it exceeds ``patience``, regardless of whether others wait for it."""
        return not self.finished and self.age > self.patience

    @property
    def stuck(self) -> bool:
        """Whether it exceeds its own limit, which is shorter for a rank found asleep."""
        if self.finished:
            return False
        found = self.evidence
        asleep = found is not None and found.is_asleep
        limit = self.asleep_limit
        if found is not None and found.lock is not None and not found.work:
            limit = min(limit, LOCK_ASLEEP_S)
        return self.overdue or (asleep and self.age > limit)

    @property
    def place_in_step(self) -> tuple[int, bool]:
        """Its unfinished step, and whether it has begun it; larger is further."""
        return self.step, bool(self.micro_step) or self.phase in ("forward", "backward", "optimizer")

    @property
    def newest(self) -> str:
        """Return the name of the collective that it entered last; ``collective`` if unknown."""
        return self.inside or self.last_collective or "collective"

    @property
    def call(self) -> Collective:
        """Its current collective, with its count; only the name before the first one."""
        return Collective(self.inside, self.collectives or None)


class Counts:
    """Compares the collective counts of ranks, if they are comparable.

    A rank's position is its step and the collectives entered within it, if ranks report that, else its total count.
    """

    def __init__(self, views: Sequence[RankView]) -> None:
        per_step = {view.per_step for view in views if view.per_step >= 0}
        self._within_step = any(view.step_collectives for view in views)
        self.comparable = len(per_step) <= 1 and any(view.collectives for view in views)
        """Whether counts are comparable: all ranks entered equally many collectives in their last step, if known."""

    def place(self, view: RankView) -> tuple[int, int]:
        """Return a rank's position in the sequence of collectives; larger is further."""
        return (view.step, view.step_collectives) if self._within_step else (0, view.collectives)
