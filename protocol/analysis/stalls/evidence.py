"""Evidence about a rank when a stall is suspected: plain facts, without conclusions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from .activity import Work
from .patience import RESUME_S
from .python_stacks import Frame, Place

ASLEEP_S = 2.0
"""A thread found asleep at the same line for this many seconds, in an idle process, counts as asleep."""

NOWHERE = Place("", "", "")


class Call(NamedTuple):
    """One collective that a rank has entered."""

    group: str
    """PyTorch's name for the process group."""
    number: int
    """Its sequence number within the group, equal on all ranks of the group."""
    name: str
    size: int
    """Elements of its tensor; 0: none, or unknown."""
    done: bool | None
    """None: unknown."""


class Collective(NamedTuple):
    """A collective that a verdict is about."""

    name: str
    """Empty: its name differs between ranks."""
    number: int | None
    """None: unknown."""
    ranks: tuple[int, ...] = ()
    """Ranks of its group; empty: all, or unknown."""
    group: str = ""
    """PyTorch's name for the group, if there are several."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of one rank."""

    source: str = ""
    """``recorder``: PyTorch's flight recorder; ``nccl``: NCCL's own count; ``calls``: the probe's count. Their numbers
    cannot be compared with each other."""
    recent: tuple[Call, ...] = ()
    """The latest calls of each group, oldest first."""
    counted: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of calls counted by the probe, by group."""
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The ranks of each group."""

    def last(self, group: str) -> int:
        """Return the number of the last collective entered in a group; 0: none."""
        return max((call.number for call in self.recent if call.group == group), default=0)


@dataclass(frozen=True, slots=True)
class LockWait:
    """A file lock that a rank waits for."""

    path: str
    build: bool = False
    """Whether it is PyTorch's lock for the build of an extension."""
    compiler: bool = False
    """For a build lock: whether a compiler runs on that host."""
    idle_s: float = 0.0
    """For a build lock: seconds since a file in its directory changed."""
    holder: str = ""
    """The process that holds it, in words; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of one rank at one moment."""

    taken: float
    """Seconds since the epoch on the hub's clock."""
    by: Literal["", "probe", "signal"] = ""
    """Source of its stacks: its probe's answer; or a signal, because native code held the GIL; empty: no stacks."""
    frames: tuple[Frame, ...] = ()
    """The training thread, innermost first."""
    place: Place = NOWHERE
    asleep: float = 0.0
    """Seconds for which the training thread is known to have slept at this line while the process did nothing."""
    stands: float = 0.0
    """Seconds for which the training thread has stood in these frames, asleep or spinning, while the rest of its
    process tree did nothing. Under NCCL a wait for the device or for other ranks spins: it takes a whole core."""
    restless: bool = False
    """Whether it has woken up since its last progress and not slept much longer since, as in a loop of retries."""
    work: Work = ""
    """Recent work of its process tree."""
    quiet: float | None = None
    """Seconds for which its process tree is known to have been idle; None: unknown."""
    timed: bool = False
    """Whether its training thread, or a dataloader worker that it waits for, sleeps for a set time."""
    wakes: float | None = None
    """Seconds until that sleep ends by itself; None: not asleep for a set time, or unknown."""
    loops: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict[str, tuple[tuple[int, int], ...]])
    """The loops around each line of the script that the training thread is in (``Frame.key``), as first and last line,
    innermost first."""
    gathers: int = 0
    """Number of times that it has entered DeepSpeed's ``GatheredParameters``."""
    threads: bool = False
    """Whether the script runs other Python threads in it, which may enter collectives too."""
    lock: "LockWait | None" = None
    """The file lock it waits for."""
    process: str = ""
    """The training thread's state in /proc: R, S, D, T ...; empty: not on this host."""
    wchan: str = ""
    """The kernel function in which it waits, if readable."""
    utilization: float | None = None
    """Recent share of time in which its device ran a kernel, percent; None: no device, or unknown."""
    calls: Calls = field(default_factory=Calls)
    nccl: Calls = field(default_factory=Calls)
    """The collectives that it has launched by NCCL's own count (RAS), by communicator; empty: unknown."""
    steps: int = 0
    """Optimizer steps that the hub had received from it at that time."""

    @property
    def is_asleep(self) -> bool:
        """Whether it slept at one line for ``ASLEEP_S``, its process tree did not work, and it does not wake soon."""
        return self.asleep >= ASLEEP_S and not self.restless and self.work != "works" and not self.resumes

    @property
    def resumes(self) -> bool:
        """Whether its sleep ends by itself within ``RESUME_S``."""
        return self.wakes is not None and self.wakes <= RESUME_S

    @property
    def may_resume(self) -> bool:
        """Whether its sleep ends by itself, at a time that is soon or unknown."""
        return self.resumes or (self.timed and self.wakes is None)

    @property
    def unfinished(self) -> bool:
        """Whether it has entered a collective that its device has not completed."""
        return any(call.done is False for call in self.calls.recent)


def read_calls(data: Any) -> Calls:
    """Decode a rank's answer about its collectives; return an empty one if it is invalid."""
    try:
        answer = msgspec.convert(data or {}, _Answer)
    except msgspec.ValidationError:
        return Calls()
    members = {group: tuple(ranks) for group, ranks in answer.ranks.items()}
    return Calls(answer.source, tuple(Call(*call) for call in answer.recent), answer.counted, members)


def all_members(evidences: Iterable[Evidence | None]) -> dict[str, tuple[int, ...]]:
    """Merge the ranks' information about their process groups."""
    found: dict[str, tuple[int, ...]] = {}
    for evidence in evidences:
        if evidence is not None:
            found.update(evidence.calls.members)
    return found


class _Answer(msgspec.Struct):
    source: str = ""
    recent: list[tuple[str, int, str, int, bool | None]] = []
    counted: dict[str, int] = {}
    ranks: dict[str, list[int]] = {}
