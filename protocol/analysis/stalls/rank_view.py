"""One rank as the judge of stalls sees it, and how far ranks are in the sequence of their collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .evidence import Collective, Evidence

Absence = Literal["", "stopped", "held", "gone", "silent", "cut off"]

LOCK_ASLEEP_S = 4.5
"""Limit of a rank that is blocked on a file lock in the kernel while both it and the lock's holder are idle."""


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as the judge sees it. Seconds are ages at the moment of judging."""

    rank: int
    step: int
    phase: str
    age: float
    """Seconds without progress."""
    limit: float
    """How many seconds without progress its phase allows."""
    inside: str = ""
    """The collective it has entered and not left; empty outside of one."""
    last_collective: str = ""
    collectives: int = 0
    step_collectives: int = 0
    micro_step: int = 0
    per_step: int = -1
    """Collectives it entered in its last finished step; -1 when not known."""
    absent: Absence = ""
    finished: bool = False
    group: str = ""
    """The process group of the collective it is in, or was in last."""
    group_sequence: int = 0
    """How many of that group it has entered, as its probe counts."""
    size: int = 0
    stood_s: float = 0.0
    """Seconds without progress in its last report."""
    asleep_limit: float = float("inf")
    """How many seconds without progress its phase allows a rank that is found asleep."""
    working_limit: float = 0.0
    """The same for a rank whose process tree is found at work; never less than ``limit``."""
    latest: Evidence | None = None
    """What the last inspection found, including before its last progress."""
    steps_then: Mapping[int, int] = field(default_factory=dict[int, int])
    """Optimizer steps that every rank had made shortly after this one's last progress."""
    evidence: Evidence | None = None
    """What an inspection found since its last progress; None: not inspected."""

    @property
    def works(self) -> bool:
        """Its process tree was found to read, write, send, receive or compile since its last progress."""
        found = self.evidence
        return found is not None and (found.work == "works" or found.place.doing == "compiling")

    @property
    def patience(self) -> float:
        """Seconds without progress that its phase allows it, asleep or not."""
        return max(self.limit, self.working_limit) if self.works else self.limit

    @property
    def overdue(self) -> bool:
        """Past the patience of its phase, whether or not others wait for it."""
        return not self.finished and self.age > self.patience

    @property
    def stuck(self) -> bool:
        """Past its own limit, which is a shorter one for a rank that was found asleep."""
        if self.finished:
            return False
        found = self.evidence
        asleep = found is not None and found.is_asleep
        limit = self.asleep_limit
        if found is not None and found.lock is not None and not found.work:
            limit = min(limit, LOCK_ASLEEP_S)
        return self.overdue or (asleep and self.age > limit)

    @property
    def call(self) -> Collective:
        """The collective it is inside of, with its count; before the first one only the name."""
        return Collective(self.inside, self.collectives or None)


class Counts:
    """Makes the collective counts of ranks comparable, where they are.

    A rank's place is its step and the collectives entered within it where ranks report that, else its total.
    """

    def __init__(self, views: Sequence[RankView]) -> None:
        per_step = {view.per_step for view in views if view.per_step >= 0}
        self._within_step = any(view.step_collectives for view in views)
        self.comparable = len(per_step) <= 1 and any(view.collectives for view in views)
        """Counts mean the same on every rank: all entered equally many in their last step, where that is known."""

    def place(self, view: RankView) -> tuple[int, int]:
        """Return where a rank is in the sequence of collectives; the larger, the further."""
        return (view.step, view.step_collectives) if self._within_step else (0, view.collectives)
