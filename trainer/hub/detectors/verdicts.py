"""The verdicts on a stall, and how each is put into words: who, where, since when, what to do."""

from dataclasses import dataclass, field
from typing import Literal

from ....protocol.text import duration
from .calls import Difference, Waits
from .evidence import all_members
from .view import RankView, ranks_in_words

ALONE_DATA_S = 30.0
"""Data loading that holds up no other rank may take this long before it is called a stall."""

VerdictKind = Literal["missing", "alone", "mismatch", "deadlock", "unreachable", "unclear", "exit"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who waits for whom, in which collective, how sure, and the figures it rests on."""

    kind: VerdictKind
    waiting: tuple[int, ...]
    hung: tuple[int, ...]
    sure: bool
    title: str
    text: str
    age: float
    """Seconds since the last progress of those concerned."""
    collective: str = ""
    """The collective concerned and its count, ``all_reduce #209``."""
    where: dict[int, str] = field(default_factory=dict[int, str])
    """For each rank concerned, where it is, in words."""
    differs: tuple[int, ...] = ()
    """Of a mismatch, the ranks that differ from most others; empty when there is no majority."""

    @property
    def signature(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What makes this verdict another one than before."""
        return self.kind, self.waiting, self.hung


def mismatch(found: Difference, present: list[RankView], age: float) -> Verdict:
    """Say that ranks entered one collective differently."""
    ways: dict[str, list[int]] = {}
    for rank, call in found.calls.items():
        size = f" of {call.size:,} elements" if call.size else ""
        ways.setdefault(f"{call.name}{size}", []).append(rank)
    calls = "; ".join(f"{ranks_in_words(sorted(ranks))}: {words}" for words, ranks in sorted(ways.items()))
    odd = found.odd_ones()
    what = "mismatched shapes" if found.shapes else "mismatched collectives"
    group = of_group(found.group, present)
    differs = f" {ranks_in_words(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others." if odd else ""
    mend = "sizes that differ between ranks" if found.shapes else "code that takes another branch on some ranks"
    return Verdict(
        kind="mismatch",
        waiting=tuple(sorted(found.calls)),
        hung=(),
        sure=True,
        title=f"{what} for {duration(age)}: {calls}",
        text=(
            f"Collective #{found.number}{group} was not entered alike: {calls}.{differs} "
            f"They wait for each other for ever. Look for {mend}."
        ),
        age=age,
        collective=f"#{found.number}{group}",
        where={view.rank: view.where() for view in present},
        differs=odd,
    )


def crossed(apart: list[RankView], waiting: list[RankView], graph: Waits, age: float) -> Verdict:
    """Say that ranks wait in a collective for ranks that wait in a send or a receive."""
    call = graph.of[waiting[0].rank][0].call
    who, others = ranks_in_words(ranks_of(apart)), ranks_in_words(ranks_of(waiting))
    inside = " and ".join(sorted({view.inside for view in apart}))
    calls = f"{who}: {inside}; {others}: {call.name} #{call.number}"
    return Verdict(
        kind="mismatch",
        waiting=ranks_of([*apart, *waiting]),
        hung=(),
        sure=True,
        title=f"mismatched calls for {duration(age)}: {calls}",
        text=(
            f"{who} {'waits' if len(apart) == 1 else 'wait'} in {inside} for another rank, and {others} in "
            f"{call.name} for {who}. Look for a send without its receive, or a branch that only some ranks take."
        ),
        age=age,
        collective=f"{call.name} #{call.number}",
        where={view.rank: view.where() for view in (*apart, *waiting)},
        differs=ranks_of(apart),
    )


def deadlock(graph: Waits, waiting: list[RankView], age: float) -> Verdict:
    """Say that ranks wait for each other in different groups."""
    ways: dict[str, list[int]] = {}
    for view in waiting:
        call = graph.of[view.rank][0].call
        ways.setdefault(f"{call.name} #{call.number}{of_group(call.group, waiting, always=True)}", []).append(view.rank)
    calls = "; ".join(
        f"{ranks_in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {words}" for words, ranks in ways.items()
    )
    return Verdict(
        kind="deadlock",
        waiting=ranks_of(waiting),
        hung=(),
        sure=True,
        title=f"deadlock of process groups for {duration(age)}: {calls}",
        text=(
            f"{calls}. Each waits for a rank that waits in another group, so none can ever go on. "
            "Have all ranks enter the collectives of their groups in the same order."
        ),
        age=age,
        collective=next(iter(ways)),
        where={view.rank: view.where() for view in waiting},
    )


def of_group(group: str, views: list[RankView], *, always: bool = False) -> str:
    """Name a process group by its ranks, unless it is all of them; ``always``: by PyTorch's name for it too."""
    members = all_members(view.evidence for view in views).get(group, ())
    ranks = ranks_in_words(members) if members else ""
    if always:
        return f" of group {group} ({ranks})" if ranks else f" of group {group}"
    return f" of the group of {ranks}" if members and not {view.rank for view in views} <= set(members) else ""


def unreachable(waiting: list[RankView], cut: list[RankView]) -> Verdict | None:
    """Say that ranks wait while the host of others is cut off: of those nothing is known, so none is named."""
    if not waiting:
        return None
    age = max(view.age for view in waiting)
    who, others = ranks_in_words(ranks_of(cut)), ranks_in_words(ranks_of(waiting))
    call = next((view.call for view in waiting if view.inside), "")
    waits = f"{others} {'waits' if len(waiting) == 1 else 'wait'} {duration(age)}{f' in {call}' if call else ''}"
    return Verdict(
        kind="unreachable",
        waiting=ranks_of(waiting),
        hung=(),
        sure=False,
        title=f"{waits}: the host of {who} is cut off",
        text=(
            f"{waits}. Nothing is heard from the host of {who}, so what they do is not known; once the link is back "
            "they are heard again, and the training may go on by itself."
        ),
        age=age,
        collective=call,
        where={view.rank: view.where() for view in (*cut, *waiting)},
    )


def missing(
    waiting: list[RankView], late: list[RankView], name: str, age: float, *, sure: bool = True
) -> Verdict | None:
    """Name the ranks that others wait for; where nobody waits, as stuck by themselves."""
    if not waiting:
        return alone(late, age)
    who, others = ranks_in_words(ranks_of(late)), ranks_in_words(ranks_of(waiting))
    waits = f"{others} {'waits' if len(waiting) == 1 else 'wait'} {duration(age)}"
    places = sorted({view.where() for view in late})
    where = places[0] if len(places) == 1 else "; ".join(f"rank {view.rank}: {view.where()}" for view in late[:4])
    # A rank that is stopped or gone may have entered the collective; it holds the others up all the same.
    if name and not all(view.absent in ("stopped", "held", "gone") for view in late):
        fault = f"{who} {'has' if len(late) == 1 else 'have'} not entered {name}"
    else:
        fault = f"{who}: {where}"
    return Verdict(
        kind="missing",
        waiting=ranks_of(waiting),
        hung=ranks_of(late),
        sure=sure and not any(view.absent == "silent" and not has_stacks(view) for view in late),
        title=f"{fault}; {waits}",
        text=(
            f"{waits}{f' in {name}' if name else ''}, held up by {who}: {where}. "
            f"The stacks of {who} say at which line. A wait like this ends only if {who} goes on."
        ),
        age=age,
        collective=name,
        where={view.rank: view.where() for view in (*late, *waiting)},
    )


def alone(stuck: list[RankView], age: float) -> Verdict | None:
    """Name ranks that are stuck and hold up nobody that can be seen; None where data loading may take longer."""
    # A shard that is fetched or a disk that is slow holds up nobody else: data loading may take longer then.
    stuck = [view for view in stuck if view.phase != "data" or view.age > ALONE_DATA_S or view.absent]
    if not stuck:
        return None
    worst = max(stuck, key=lambda view: view.age)
    names = ranks_in_words(ranks_of(stuck))
    return Verdict(
        kind="alone",
        waiting=(),
        hung=ranks_of(stuck),
        sure=True,
        title=f"{names} made no progress for {duration(age)}, {worst.where()}",
        text=(
            f"{names} made no progress for {duration(age)}, {worst.where()} of step {worst.step}; that phase usually "
            f"allows {duration(worst.limit)} at most. The stacks say at which line."
        ),
        age=age,
        where={view.rank: view.where() for view in stuck},
    )


def unclear(present: list[RankView], age: float, reason: str) -> Verdict:
    """Say that nothing moves, and that the evidence does not separate."""
    return Verdict(
        kind="unclear",
        waiting=tuple(view.rank for view in present if view.inside),
        hung=(),
        sure=False,
        title=f"no progress for {duration(age)}, cannot tell which rank: {reason}",
        text=f"{ranks_in_words(ranks_of(present))} made no progress for {duration(age)}. Cannot tell who is to blame: "
        f"{reason}. Compare the stacks of all ranks.",
        age=age,
        where={view.rank: view.where() for view in present},
    )


def ranks_of(views: list[RankView]) -> tuple[int, ...]:
    """List the ranks of views, ascending."""
    return tuple(sorted(view.rank for view in views))


def has_stacks(view: RankView) -> bool:
    """Tell whether it is known at which line a rank is."""
    return view.evidence is not None and bool(view.evidence.frames)
