"""One rank as the judge of stalls sees it, and how far ranks are in the sequence of their collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .evidence import Evidence

Absence = Literal["", "stopped", "held", "gone", "silent", "cut off"]

_WHERE = {
    "init": "in start-up",
    "data": "in data loading",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
    "eval": "in evaluation",
    "checkpoint": "in checkpointing",
    "idle": "in Python code outside any phase",
    "exit": "said goodbye, but its process lives on",
}
_ABSENT = {
    "stopped": "stopped by a signal",
    "held": "held at an out-of-memory error",
    "gone": "its process is gone",
    "silent": "its process lives but sends nothing",
    "cut off": "its host is cut off",
}


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
    """How long it had made no progress when it was heard last."""
    asleep_limit: float = float("inf")
    """How many seconds without progress its phase allows a rank that is found asleep."""
    evidence: Evidence | None = None
    """What a look at it found since its last progress; None: nobody looked."""

    @property
    def stuck(self) -> bool:
        """Past its own limit, which is a shorter one for a rank that was found asleep."""
        if self.finished:
            return False
        asleep = self.evidence is not None and self.evidence.is_asleep
        return self.age > self.limit or (asleep and self.age > self.asleep_limit)

    @property
    def call(self) -> str:
        """The collective it is inside of with its count, ``all_reduce #209``; before the first one only the name."""
        return f"{self.inside} #{self.collectives}" if self.collectives else self.inside

    def where(self) -> str:
        """Say in words where it is: from its own reports, and at which line where its stacks tell."""
        line = self.evidence.place.text if self.evidence is not None else ""
        if self.absent == "silent" and line:
            return f"{_WHERE.get(self.phase, f'in {self.phase}')}, in native code that holds Python's lock: {line}"
        if self.absent:
            return _ABSENT[self.absent]
        words = f"inside {self.call}" if self.inside else _WHERE.get(self.phase, f"in {self.phase}")
        return f"{words}: {line}" if line else words


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


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0, 1 and 4``, ``512 ranks``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
    return f"{len(ranks)} ranks"
