"""The verdicts on a stall: which ranks block which, in which collective, with the evidence; texts are elsewhere."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .collective_calls import Difference, Waits, open_calls
from .evidence import Call, Collective, all_members
from .rank_view import RankView

ALONE_DATA_S = 30.0
"""Seconds that data loading may take before it counts as a stall, if no other rank is blocked by it."""

VerdictKind = Literal[
    "missing", "ahead", "lock", "alone", "mismatch", "deadlock", "left", "unreachable", "unclear", "exit"
]


@dataclass(frozen=True, slots=True)
class DifferentCalls:
    """A collective that ranks entered differently."""

    calls: Mapping[int, Call]


@dataclass(frozen=True, slots=True)
class InPointToPoint:
    """Ranks that wait in a send or a receive while the others wait for them in a collective."""

    apart: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CircularWait:
    """Ranks that wait for each other in different groups."""

    calls: Mapping[int, Collective]


@dataclass(frozen=True, slots=True)
class CutOff:
    """Ranks whose host is cut off."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RanAhead:
    """Steps of ranks that skip collectives, and of those that wait for them."""

    step: int
    behind: int
    """Step of the ranks that wait for them."""


@dataclass(frozen=True, slots=True)
class StaleLocks:
    """Locks that a build left behind."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Ranks that have ended while others live on."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """Ranks whose script has ended, in whose collectives others wait."""

    steps: Mapping[int, int]
    """Optimizer steps that each of them has finished, by rank."""
    step: int
    """Unfinished step of those that wait."""


@dataclass(frozen=True, slots=True)
class Unclear:
    """Why the evidence does not identify a rank."""

    why: Literal["entered", "same_collective", "other_counts", "nobody_waits"]
    """``entered``: a rank outside the collective had entered it too."""
    collective: Collective | None = None
    inside: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()


Facts = DifferentCalls | InPointToPoint | CircularWait | CutOff | RanAhead | StaleLocks | Finished | Left | Unclear


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks wait for which, in which collective, with which certainty and figures."""

    kind: VerdictKind
    waiting: tuple[int, ...]
    hung: tuple[int, ...]
    sure: bool
    age: float
    """Seconds since the last progress of those concerned."""
    collective: Collective | None = None
    """The collective concerned."""
    views: Mapping[int, RankView] = field(default_factory=dict[int, RankView])
    """The judge's view of each rank concerned, named ranks first."""
    differs: tuple[int, ...] = ()
    """For a mismatch, the ranks that differ from the majority; empty if there is none."""
    facts: Facts | None = None
    contradicted: bool = False
    """Whether NCCL's own counts (RAS) show that other ranks are behind than those named."""

    @property
    def signature(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Identity of the verdict; a change means that it is a different one."""
        return self.kind, self.waiting, self.hung


def mismatch(found: Difference, present: list[RankView], age: float) -> Verdict:
    """Return the verdict that ranks entered one collective differently."""
    return Verdict(
        kind="mismatch",
        waiting=tuple(sorted(found.calls)),
        hung=(),
        sure=not _have_threads(present),
        age=age,
        collective=of_group("", found.number, found.group, present),
        views=by_rank(present),
        differs=found.odd_ones(),
        facts=DifferentCalls(found.calls),
    )


def crossed(apart: list[RankView], waiting: list[RankView], graph: Waits, age: float) -> Verdict:
    """Return the verdict that ranks wait in a collective for ranks in a send or a receive."""
    call = graph.of[waiting[0].rank][0].call
    return Verdict(
        kind="mismatch",
        waiting=ranks_of([*apart, *waiting]),
        hung=(),
        sure=True,
        age=age,
        collective=Collective(call.name, call.number),
        views=by_rank([*apart, *waiting]),
        differs=ranks_of(apart),
        facts=InPointToPoint(ranks_of(apart)),
    )


def deadlock(graph: Waits, waiting: list[RankView], age: float) -> Verdict:
    """Return the verdict that ranks wait for each other in different groups."""
    members = all_members(view.evidence for view in waiting)
    calls: dict[int, Collective] = {}
    for view in waiting:
        call = graph.of[view.rank][0].call
        calls[view.rank] = Collective(call.name, call.number, members.get(call.group, ()), call.group)
    return Verdict(
        kind="deadlock",
        waiting=ranks_of(waiting),
        hung=(),
        sure=not _have_threads(waiting),
        age=age,
        collective=next(iter(calls.values())),
        views=by_rank(waiting),
        facts=CircularWait(calls),
    )


def left_behind(waiting: list[RankView], finished: list[RankView]) -> Verdict:
    """Return the verdict that ranks wait in a collective for ranks whose script has ended."""
    view = max(waiting, key=lambda each: each.age)
    call = view.call if view.inside else next(iter(open_calls(view)), None)
    return Verdict(
        kind="left",
        waiting=ranks_of(waiting),
        hung=(),
        sure=True,
        age=view.age,
        collective=call if isinstance(call, Collective) or call is None else Collective(call.name, call.number),
        views=by_rank(waiting),
        facts=Left({each.rank: each.step - 1 for each in finished}, max(each.step for each in waiting)),
    )


def of_group(name: str, number: int | None, group: str, views: list[RankView]) -> Collective:
    """Return a collective with the ranks of its group, or without if the group has all ranks."""
    members = all_members(view.evidence for view in views).get(group, ())
    return Collective(name, number, () if {view.rank for view in views} <= set(members) else members)


def unreachable(waiting: list[RankView], cut: list[RankView]) -> Verdict | None:
    """Return the verdict that ranks wait for a host that is cut off; no rank is named."""
    if not waiting:
        return None
    return Verdict(
        kind="unreachable",
        waiting=ranks_of(waiting),
        hung=(),
        sure=False,
        age=max(view.age for view in waiting),
        collective=next((view.call for view in waiting if view.inside), None),
        views=by_rank([*cut, *waiting]),
        facts=CutOff(ranks_of(cut)),
    )


def missing(
    waiting: list[RankView], late: list[RankView], collective: Collective | None, age: float, *, sure: bool = True
) -> Verdict | None:
    """Return the verdict on ranks that others wait for; if none waits, on ranks stuck by themselves."""
    if not waiting:
        return alone(late, age)
    return Verdict(
        kind="missing",
        waiting=ranks_of(waiting),
        hung=ranks_of(late),
        sure=sure and not any(view.absent == "silent" and not has_stacks(view) for view in late),
        age=age,
        collective=collective,
        views=by_rank([*late, *waiting]),
    )


def ahead(ranks: list[RankView], waiting: list[RankView], collective: Collective, age: float) -> Verdict:
    """Return the verdict on ranks that skip collectives and run ahead of the waiting ones."""
    return Verdict(
        kind="ahead",
        waiting=ranks_of(waiting),
        hung=ranks_of(ranks),
        sure=True,
        age=age,
        collective=collective,
        views=by_rank(waiting),
        facts=RanAhead(max(view.step for view in ranks), min(view.step for view in waiting)),
    )


def stale_lock(waiting: list[RankView], present: list[RankView], age: float) -> Verdict | None:
    """Return the verdict that ranks wait for a stale build lock."""
    locks = sorted({view.evidence.lock.path for view in waiting if view.evidence and view.evidence.lock})
    if not locks:
        return None
    return Verdict(
        kind="lock",
        waiting=ranks_of(waiting),
        hung=(),
        sure=True,
        age=age,
        views=by_rank(present),
        facts=StaleLocks(tuple(locks)),
    )


def alone(stuck: list[RankView], age: float) -> Verdict | None:
    """Return the verdict on ranks that are stuck without blocking others; None if data loading may take longer."""
    # Fetching a shard, or a slow disk, blocks no other rank: then data loading may take longer.
    stuck = [view for view in stuck if view.overdue or view.absent]
    stuck = [view for view in stuck if view.phase != "data" or view.age > ALONE_DATA_S or view.absent]
    if not stuck:
        return None
    return Verdict(kind="alone", waiting=(), hung=ranks_of(stuck), sure=True, age=age, views=by_rank(stuck))


def unclear(present: list[RankView], age: float, facts: Unclear) -> Verdict:
    """Return the verdict that no rank makes progress and the evidence does not identify one."""
    waiting = tuple(view.rank for view in present if view.inside)
    return Verdict(kind="unclear", waiting=waiting, hung=(), sure=False, age=age, views=by_rank(present), facts=facts)


def _have_threads(views: Iterable[RankView]) -> bool:
    """Return whether a script's other threads may still enter the collectives that its training thread does not."""
    return any(view.evidence is not None and view.evidence.threads for view in views)


def by_rank(views: Iterable[RankView]) -> dict[int, RankView]:
    """Return views by rank, in the given order."""
    return {view.rank: view for view in views}


def ranks_of(views: Iterable[RankView]) -> tuple[int, ...]:
    """Return the ranks of views, ascending."""
    return tuple(sorted(view.rank for view in views))


def has_stacks(view: RankView) -> bool:
    """Return whether a rank's current line is known."""
    return view.evidence is not None and bool(view.evidence.frames)
