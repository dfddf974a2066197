"""Evidence of a rank when a stall is suspected: plain facts, each with its time; nothing is concluded here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from .activity import Work
from .python_stacks import Frame, Place

ASLEEP_S = 2.5
"""A thread seen asleep at the same line for this long, in an idle process, counts as asleep."""

NOWHERE = Place("", "", "")


class Call(NamedTuple):
    """One collective that a rank has entered."""

    group: str
    """PyTorch's name for the process group."""
    number: int
    """Its number within the group: the same one on every rank of the group."""
    name: str
    size: int
    """Elements of its tensor; 0: none, or not known."""
    done: bool | None
    """None: not known."""


class Collective(NamedTuple):
    """A collective that a verdict is about."""

    name: str
    """Empty: ranks call it by different names."""
    number: int | None
    """None: not known."""
    ranks: tuple[int, ...] = ()
    """Of its group; empty: all, or not known."""
    group: str = ""
    """PyTorch's name for the group, where there are several."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of one rank."""

    source: str = ""
    """``recorder``: PyTorch's flight recorder; ``calls``: the probe's count. Their numbers differ by a constant."""
    recent: tuple[Call, ...] = ()
    """The last ones of each group, oldest first."""
    counted: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many the probe counted, by group."""
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
    """It is PyTorch's lock around the build of an extension."""
    compiler: bool = False
    """Of a build lock: a compiler runs on that host."""
    idle_s: float = 0.0
    """Of a build lock: seconds since a file beside it changed."""
    holder: str = ""
    """Who holds it, in words; empty: not known."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of one rank at one moment."""

    taken: float
    """Seconds since the epoch on the hub's clock."""
    by: Literal["", "probe", "signal"] = ""
    """How its stacks were had: its probe answered; or native code held Python's lock and a signal had them written;
    empty: not at all."""
    frames: tuple[Frame, ...] = ()
    """The training thread, innermost first."""
    place: Place = NOWHERE
    asleep: float = 0.0
    """Seconds for which the training thread is known to have slept at this line while the process did nothing."""
    restless: bool = False
    """It has slept and woken up again since its last progress: it waits in small pieces, as a loop of retries does."""
    work: Work = ""
    """What its process tree was found to do lately."""
    quiet: float | None = None
    """Seconds for which its process tree is known to have done nothing; None: not known."""
    lock: "LockWait | None" = None
    """The file lock it waits for."""
    process: str = ""
    """The training thread's state in /proc: R, S, D, T ...; empty: not on this host."""
    wchan: str = ""
    """The kernel function it waits in, where that may be read."""
    utilization: float | None = None
    """Percent of time its device ran a kernel, lately; None: no device, or not known."""
    calls: Calls = field(default_factory=Calls)
    steps: int = 0
    """Optimizer steps the hub had seen of it then."""

    @property
    def is_asleep(self) -> bool:
        """Whether it slept at one line for ``ASLEEP_S``."""
        return self.asleep >= ASLEEP_S and not self.restless


def read_calls(data: Any) -> Calls:
    """Read a rank's answer about its collectives; an empty one where it makes no sense."""
    try:
        answer = msgspec.convert(data or {}, _Answer)
    except msgspec.ValidationError:
        return Calls()
    members = {group: tuple(ranks) for group, ranks in answer.ranks.items()}
    return Calls(answer.source, tuple(Call(*call) for call in answer.recent), answer.counted, members)


def all_members(evidences: Iterable[Evidence | None]) -> dict[str, tuple[int, ...]]:
    """Put together what the ranks know of their process groups."""
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
