"""The judge's view of a rank, the comparison of the ranks' collectives, and where a rank is, in words.

A rank in a collective of a group waits for every member that has entered fewer collectives of that group. These edges
form a graph; followed from the waiting ranks, they lead to ranks that do not wait, which block the others. If they only
form a cycle, no rank can continue: a deadlock of groups. Members that entered the collective of the same sequence
number under another name, or with a tensor of another size, are a mismatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...text import ranks_in_words
from .evidence import Call, Collective, Evidence, all_members

Absence = Literal["", "stopped", "held", "gone", "silent", "cut off"]

BLOCKED_S = 1.5  # a thread at one line for so many seconds, in a collective or with an unfinished one, is blocked
LOCK_ASLEEP_S = 4.0
"""Limit in seconds for a rank blocked on a file lock in the kernel while both it and the lock's holder are idle."""


@dataclass(frozen=True, slots=True)
class RankView:
    """The judge's view of one rank. Seconds are ages at the time of judging."""

    rank: int
    step: int
    phase: str
    age: float  # seconds without progress
    limit: float  # limit of its phase, in seconds without progress
    inside: str = ""  # the collective that it has entered and not left; empty outside of one
    last_collective: str = ""
    collectives: int = 0
    step_collectives: int = 0
    micro_step: int = 0
    per_step: int = -1  # number of collectives entered in its last finished step; -1: unknown
    absent: Absence = ""
    finished: bool = False
    group: str = ""  # the process group of its current or last collective
    group_sequence: int = 0  # number of that group's collectives that it has entered, as counted by its probe
    size: int = 0
    stood_s: float = 0.0  # seconds without progress in its last report
    asleep_limit: float = float("inf")  # limit in seconds if it is found asleep
    working_limit: float = 0.0  # limit in seconds if its process tree works; never less than `limit`
    latest: Evidence | None = None  # evidence of the last inspection, also from before its last progress
    steps_then: Mapping[int, int] = field(default_factory=dict[int, int])
    """Optimizer steps of every rank shortly after this rank's last progress."""
    evidence: Evidence | None = None  # evidence of an inspection since its last progress; None: not inspected

    @property
    def is_unable(self) -> bool:
        """Whether it cannot run."""
        return self.absent in ("stopped", "held", "gone")

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
        found, limit = self.evidence, self.asleep_limit
        if found is not None and found.lock is not None and not found.work:
            limit = min(limit, LOCK_ASLEEP_S)
        return self.overdue or (found is not None and found.is_asleep and self.age > limit)

    @property
    def place_in_step(self) -> tuple[int, bool]:
        """Its unfinished step, and whether it has begun it; larger is further."""
        return self.step, bool(self.micro_step) or self.phase in ("forward", "backward", "optimizer")

    @property
    def newest(self) -> str:
        """The name of the collective that it entered last; ``collective`` if unknown."""
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


SAME_SIZE = frozenset(
    ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_base")
) | {"reduce_scatter_tensor", "reduce_scatter_base"}
"""Collectives that require a tensor of the same size from every rank."""


TOGETHER_S = 2.0  # evidence of two ranks taken within this many seconds is of one inspection


@dataclass(frozen=True, slots=True)
class Difference:
    """Ranks that entered the same collective (group and sequence number) differently."""

    group: str
    number: int
    calls: dict[int, Call]
    shapes: bool  # true: the same collective with tensors of different sizes

    def odd_ones(self) -> tuple[int, ...]:
        """Return the ranks that differ from the majority; empty if there is no clear majority."""
        ways: dict[tuple[str, int], list[int]] = {}
        for rank, call in self.calls.items():
            ways.setdefault((call.name, call.size if self.shapes else 0), []).append(rank)
        ordered = sorted(ways.values(), key=len)
        if len(ordered) != 2 or len(ordered[0]) * 2 >= len(ordered[1]) + len(ordered[0]):
            return ()
        return tuple(sorted(ordered[0]))


@dataclass(frozen=True, slots=True)
class Wait:
    """The collective in which a rank waits, and the ranks for which it waits."""

    call: Call
    blockers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Waits:
    """All edges of the wait graph."""

    of: dict[int, list[Wait]]
    roots: tuple[int, ...]  # ranks that others wait for, directly or not, and that do not wait themselves

    @property
    def circle(self) -> bool:
        """Ranks that wait for each other in a cycle."""
        return bool(self.of) and not self.roots


def difference(views: Sequence[RankView]) -> Difference | None:
    """Return the first collective that members of a group entered differently; None if no difference is known."""
    known = [view for view in views if view.evidence is not None and view.evidence.calls.recent]
    sources = {view.evidence.calls.source for view in known if view.evidence is not None}
    if len(known) < 2 or len(sources) != 1:
        return None
    entered: dict[tuple[str, int], dict[int, Call]] = {}
    for view in known:
        for call in view.evidence.calls.recent if view.evidence is not None else ():
            entered.setdefault((call.group, call.number), {})[view.rank] = call
    for (group, number), calls in sorted(entered.items(), key=lambda item: item[0][1]):
        names = {call.name for call in calls.values()}
        sizes = {call.size for call in calls.values()}
        shapes = len(names) == 1 and len(sizes) > 1 and names <= SAME_SIZE and 0 not in sizes
        # Calls that all of them have finished do not matter.
        if (len(names) > 1 or shapes) and not all(call.done for call in calls.values()):
            return Difference(group, number, calls, shapes)
    return None


def waits(views: Sequence[RankView]) -> Waits | None:
    """Return the wait graph of the ranks that have not finished; None if the members of the groups are unknown."""
    members = all_members(view.evidence for view in views)
    if not members:
        return None
    by_rank = {view.rank: view for view in views}
    of: dict[int, list[Wait]] = {}
    for view in views:
        if view.is_unable:
            continue
        awaited = [(call, _blockers(call, view, members, by_rank)) for call in open_calls(view)]
        found = [Wait(call, blockers) for call, blockers in awaited if blockers]
        if found:
            of[view.rank] = found
    blocking = {rank for waiting in of.values() for wait in waiting for rank in wait.blockers}
    return Waits(of, tuple(sorted(blocking - of.keys())))


def skipped(waiting: RankView, others: Sequence[RankView], steps: int) -> tuple[Call, tuple[int, ...]] | None:
    """Return a collective of ``waiting``, and the ranks that finished ``steps`` steps since without entering it.

    None if every awaited rank may still enter it.
    """
    mine = waiting.evidence
    if mine is None:
        return None
    by_rank = {view.rank: view for view in others}
    for call in open_calls(waiting):
        found: list[int] = []
        for rank in mine.calls.members.get(call.group, ()):
            other = by_rank.get(rank)
            latest, then = other.latest if other is not None else None, waiting.steps_then.get(rank)
            if other is None or latest is None or then is None or latest.calls.source != mine.calls.source:
                continue
            number = call.number if not waiting.inside else _number(waiting)
            # Local SGD, and a trainer that broadcasts to evaluators, make steps without a collective of the group.
            each_step = waiting.step > 1 and number >= waiting.step - 1
            entered = latest.calls.last(call.group) >= number
            if each_step and not entered and latest.steps - then >= steps and other.step > waiting.step:
                found.append(rank)
        if found:
            return call, tuple(found)
    return None


def behind(other: RankView, view: RankView) -> bool:
    """Return whether ``other`` has not entered some open collective of ``view``."""
    return any(_behind(other, view, call) for call in open_calls(view))


def open_calls(view: RankView) -> list[Call]:
    """Return the collectives that a rank has entered and is not known to have left, one per group."""
    by_nccl = view.evidence is not None and view.evidence.calls.source == "nccl"
    if view.inside and not by_nccl:
        return [Call(view.group, _number(view), view.inside, view.size, False)] if view.group else []
    if view.evidence is None:
        return []
    first: dict[str, Call] = {}
    for call in view.evidence.calls.recent:
        if call.done is False:
            first.setdefault(call.group, call)
        elif call.done is None:
            first[call.group] = call  # unknown: the last one may be open
    return list(first.values())


def _number(view: RankView) -> int:
    """Return the current collective's number in the numbering of the rank's evidence, comparable between ranks."""
    calls = view.evidence.calls if view.evidence is not None else None
    return calls.last(view.group) if calls is not None and calls.recent else view.group_sequence


def _blockers(
    call: Call, view: RankView, members: Mapping[str, tuple[int, ...]], by_rank: Mapping[int, RankView]
) -> frozenset[int]:
    others = [by_rank[rank] for rank in members.get(call.group, ()) if rank in by_rank and rank != view.rank]
    return frozenset(each.rank for each in others if each.is_unable or _behind(each, view, call))


def _behind(other: RankView, view: RankView, call: Call) -> bool:
    """Return whether ``other`` has not entered ``call`` of ``view``."""
    mine, theirs = view.evidence, other.evidence
    if mine is not None and theirs is None and other.latest is not None:
        # It makes progress: what was read of it in the same inspection is evidence of its count, not of a stall.
        theirs = other.latest if abs(other.latest.taken - mine.taken) < TOGETHER_S else None
    same = mine is not None and theirs is not None and mine.calls.source == theirs.calls.source
    if mine is not None and theirs is not None and same and (theirs.by == "probe" or theirs.calls.source == "nccl"):
        return theirs.calls.last(call.group) < call.number
    # One of them did not answer: its last heartbeat is compared with the other's own count.
    counted = mine.calls.counted.get(call.group, 0) if mine is not None else 0
    if view.inside and view.group == call.group:
        counted = view.group_sequence
    return other.group == call.group and counted > 0 and other.group_sequence < counted


STOPPED, TRACED = "stopped by a signal (SIGSTOP)", "traced by a debugger"
_WHERE = {
    "init": "in start-up",
    "data": "in data loading",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
    "generate": "in generation",
    "eval": "in evaluation",
    "checkpoint": "in checkpointing",
    "idle": "in Python code outside any phase",
    "exit": "finished, but its process is still alive",
}
_ABSENT = {
    "stopped": "stopped by a signal",
    "held": "held at an out-of-memory error",
    "gone": "process gone",
    "silent": "process alive, but sends nothing",
    "cut off": "host cut off",
}


def collective(found: Collective | None) -> str:
    """Return the name of a collective: ``all_reduce #209``, ``#9 of the group of ranks 0 and 1``; empty for None."""
    if found is None:
        return ""
    number = f" #{found.number}" if found.number is not None else ""
    ranks = ranks_in_words(found.ranks) if found.ranks else ""
    group = f" of the group of {ranks}" if ranks else ""
    if found.group:
        group = f" of group {found.group} ({ranks})" if ranks else f" of group {found.group}"
    return f"{found.name}{number}{group}".strip()


def where(view: RankView) -> str:
    """Return where a rank is: from its own reports, with the line where its stacks show it."""
    found = view.evidence
    line = found.place.text if found is not None else ""
    phase = _WHERE.get(view.phase, f"in {view.phase}")
    if view.absent == "silent" and line:
        return f"{phase}, in native code that holds the GIL: {line}"
    if view.absent:
        return _ABSENT[view.absent]
    if found is not None and found.lock is not None:
        line = f"{line or 'at a lock'}, waits for the lock {found.lock.path}"
        if found.lock.holder:
            line += f" held by {found.lock.holder}"
    words = f"inside {collective(view.call)}" if view.inside else phase
    return f"{words}: {line}" if line else words
