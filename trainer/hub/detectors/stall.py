"""Who holds the others up: a pure judgement from what is known of every rank, with "cannot tell" as an answer.

``judge`` looks at views (one a rank) and gives a verdict or None. Its rules, in this order:

1. Nobody is past its own limit (``progress.limit``), and nobody is stopped, gone or silent: no verdict. Ranks that were
   seen to wait for ``WAITED_S`` in a collective that a silent one has not entered are held up by that one. Where all
   have fallen silent, having stood still for ``STOOD_S`` when they were heard last, their last words are laid side by
   side: ranks behind the furthest in a group's collectives are named, as likely only.
   While a rank's host is cut off nobody is named: the others wait for a host that is **unreachable**.
2. Some ranks sit inside a collective call past their limit (a blocking backend such as gloo shows that):
   - ranks outside of it that are stopped, gone, silent or past their *own* limit have not entered it: they are
     **hung**, those inside **wait**. Sure, unless a count says that such a rank had entered it already.
   - ranks outside that still move, or that are within their limit (a long evaluation or checkpoint): no verdict yet.
   - all inside the same one: **cannot tell** (network, or the collective itself). Inside different ones at the same
     count: **mismatch**, nobody named. At different counts: cannot tell, and the laggards are listed.
3. Nobody is inside (NCCL returns at once; the host blocks later). Counts of collectives entered decide: ranks behind
   the furthest are **hung**, the furthest ones **wait**; only the lowest count is named. Equal counts, or counts that
   cannot be compared (ranks enter different numbers of collectives a step): a rank that is stuck while others move is
   hung by itself; otherwise **cannot tell**. A run of one rank names that rank. Where no collective is counted at all
   (DDP's own reducer runs in C++): ranks that are in data or forward while all others are in backward or the optimizer
   of the same micro-step, or beyond, are named, as likely only.
4. Some ranks have finished and others live on past ``EXIT_LIMIT_S`` (or their limit, in eval and checkpoint):
   a **hang at exit**, whatever the counts say. ``EXIT_SURE_S`` is enough where a rank sits in a collective of a group
   with a finished rank in it, or where its process sleeps after its goodbye or after the end of its script.

Where the ranks have been looked at (``RankView.evidence``), what their collectives say when laid side by side
(``calls``) goes before rules 2 and 3: a collective entered differently is a **mismatch**; who waits for whom leads to
the ranks that are hung, or in a circle: a **deadlock**. And where counts do not separate, ranks asleep in code of their
own, while every other one sits in a collective, in a backward or in a wait for its device, are named as likely.
"""

from typing import Literal

from ....protocol.telemetry import STEP_PHASES
from ....protocol.text import duration
from .calls import Waits, difference, waits
from .evidence import Call, all_members
from .progress import LONG_PHASES
from .verdicts import (
    Verdict,
    alone,
    crossed,
    deadlock,
    has_stacks,
    mismatch,
    missing,
    of_group,
    ranks_of,
    unclear,
    unreachable,
)
from .view import Counts, RankView, ranks_in_words

__all__ = ["EXIT_LIMIT_S", "EXIT_SURE_S", "MOVING_S", "Verdict", "judge"]

EXIT_LIMIT_S = 30.0
"""After other ranks have finished, a rank may live on this long without progress."""

EXIT_SURE_S = 12.0
"""The same where it is certain that the rank waits for a finished one, or that its process sleeps after its goodbye."""

POINT_TO_POINT = frozenset(("send", "recv", "batch_isend_irecv"))
"""Calls that wait for one other rank; which one is not known."""

WAITED_S = 10.0
"""So long ranks must have waited for one that sends nothing, whatever patience the phase has that they wait in."""

STOOD_S = 2.0
"""Ranks that had made no progress for so long when they were heard last did not fall silent while they trained on."""

MOVING_S = 3.0
"""Progress within this many seconds proves that a rank moves."""


def judge(views: list[RankView]) -> Verdict | None:
    """Judge a stall from all ranks' views (the rules are this module's docstring); None: there is nothing to say."""
    living = [view for view in views if not view.finished and view.absent != "gone"]
    finished = [view for view in views if view.finished]
    stuck = [view for view in living if view.stuck and (view.absent != "silent" or has_stacks(view))]
    ending = finished or any(view.phase == "exit" for view in living)
    if ending and living and (at_exit := _hang_at_exit(living, finished)) is not None:
        return at_exit
    # A rank that finished cannot enter anything any more; while its peers still move that is an ordinary end.
    if ending:
        return None
    present = [view for view in views if not view.finished]
    if not stuck:
        return _held_up_by_silence(present) or _silent_together(present)
    verdict = _stall(stuck, present)
    # A look that finds all asleep in one collective names nobody: then the ordinary patience holds.
    if verdict is not None and verdict.kind == "unclear" and not any(view.age > view.limit for view in stuck):
        return None
    return verdict


def _held_up_by_silence(present: list[RankView]) -> Verdict | None:
    """Name silent ranks that others were found to wait for, though these may stay where they are for long."""
    if any(view.absent == "cut off" for view in present):
        return None
    graph = waits(present)
    if graph is None or not graph.roots:
        return None
    by_rank = {view.rank: view for view in present}
    roots, waiting = [by_rank[rank] for rank in graph.roots], [by_rank[rank] for rank in sorted(graph.of)]
    # A call of which nobody knows whether it is over is no wait.
    open_calls = [wait.call.done is False for waits_of in graph.of.values() for wait in waits_of]
    if any(root.absent != "silent" for root in roots) or not all(open_calls) or min(v.age for v in waiting) <= WAITED_S:
        return None
    if any(root.phase in LONG_PHASES and root.age <= root.limit for root in roots):
        return None
    call = _held_up_in(graph)
    age = max(view.age for view in waiting)
    return missing(waiting, roots, f"{call.name} #{call.number}{of_group(call.group, present)}", age)


def _silent_together(present: list[RankView]) -> Verdict | None:
    """Name the ranks that were behind by the last words of all, where all stood still and then fell silent."""
    if len(present) < 2 or any(view.absent != "silent" or view.stood_s <= STOOD_S for view in present):
        return None
    if any(view.age <= (view.limit if view.phase in LONG_PHASES else WAITED_S) for view in present):
        return None
    furthest = max(present, key=lambda view: view.group_sequence)
    late = [view for view in present if view.group_sequence < furthest.group_sequence]
    if not late or {view.group for view in present} != {furthest.group} or not furthest.group:
        return None
    waiting = [view for view in present if view not in late]
    call = f"{furthest.inside or furthest.last_collective or 'collective'} #{furthest.group_sequence}"
    return missing(waiting, late, call, max(view.age for view in present))


def _held_up_in(graph: Waits) -> Call:
    """Give a call in which a rank waits for one that waits for nobody."""
    roots = set(graph.roots)
    return next(wait.call for rank in sorted(graph.of) for wait in graph.of[rank] if wait.blockers & roots)


def _stall(stuck: list[RankView], present: list[RankView]) -> Verdict | None:
    cut = [view for view in present if view.absent == "cut off"]
    if cut:
        return unreachable([view for view in stuck if not view.absent], cut)
    side_by_side = _by_calls(stuck, present)
    if side_by_side != "cannot say":
        return side_by_side
    inside = [view for view in stuck if view.inside and not view.absent]
    return _some_inside(inside, present) if inside else _nobody_inside(stuck, present)


def _hang_at_exit(living: list[RankView], finished: list[RankView]) -> Verdict | None:
    members = all_members(view.evidence for view in living)
    gone = {view.rank for view in finished}
    still = [
        view
        for view in living
        if view.absent not in ("silent", "cut off")
        and view.age > _exit_limit(view, gone & {*members.get(view.group, ())})
    ]
    if len(still) < len(living):
        return None
    done = tuple(view.rank for view in finished)
    left = tuple(view.rank for view in still)
    inside = tuple(view.rank for view in still if view.inside)
    example = next((view for view in still if view.inside), still[0])
    age = max(view.age for view in still)
    named = f" ({example.where()}, which a finished rank cannot enter)" if example.inside else f" ({example.where()})"
    others = f"{ranks_in_words(done)} finished, " if done else ""
    return Verdict(
        kind="exit",
        waiting=inside,
        hung=tuple(rank for rank in left if rank not in inside),
        sure=True,
        title=f"hang at exit: {others}{ranks_in_words(left)} still there after {duration(age)}",
        text=(
            f"{others}{ranks_in_words(left)} made no progress for {duration(age)}{named}. "
            "The launcher waits for ever on a rank like that: if the results are saved, kill the run."
        ),
        age=age,
        collective=example.call if example.inside else "",
        where={view.rank: view.where() for view in still},
    )


def _exit_limit(view: RankView, finished_peers: set[int]) -> float:
    found = view.evidence
    over = view.phase == "exit" or (found is not None and found.place.doing == "exiting")
    if (view.inside and finished_peers) or (over and found is not None and found.is_asleep):
        return EXIT_SURE_S
    return max(EXIT_LIMIT_S, view.limit) if view.phase in LONG_PHASES else EXIT_LIMIT_S


def _by_calls(stuck: list[RankView], present: list[RankView]) -> "Verdict | Literal['cannot say'] | None":
    """Judge by the ranks' collectives laid side by side, where those were looked at."""
    age = max(view.age for view in stuck)
    if any(view.absent == "cut off" for view in present):
        return "cannot say"
    found = difference(present)
    if found is not None:
        concerned = [view for view in present if view.rank in found.calls]
        moving = any(view.age <= MOVING_S and not view.absent for view in concerned)
        return None if moving else mismatch(found, present, age)
    graph = waits(present)
    if graph is None or not graph.of:
        return "cannot say"
    by_rank = {view.rank: view for view in present}
    waiting = [by_rank[rank] for rank in sorted(graph.of)]
    if any(view.age <= MOVING_S for view in waiting):
        return None
    if graph.circle:
        return deadlock(graph, waiting, age) if all(view.stuck for view in waiting) else None
    awaited = [by_rank[rank] for rank in graph.roots]
    roots = [view for view in awaited if not view.inside or view.absent] or awaited
    late = [view for view in roots if view.absent or view.stuck]
    if len(late) < len(roots):
        return None  # who is awaited may be at work
    if any(view.inside and not view.absent for view in late):
        # It is in what is no collective, a recv that nobody sends to; or in one that the others have left already,
        # and then it is the network, or the collective itself.
        apart = all(view.inside in POINT_TO_POINT for view in late)
        return crossed(late, waiting, graph, age) if apart else "cannot say"
    call = _held_up_in(graph)
    example = next(view for view in waiting if any(wait.call is call for wait in graph.of[view.rank]))
    name = example.call if example.inside else f"{call.name} #{call.number}"
    return missing(waiting, late, f"{name}{of_group(call.group, present)}", age)


def _by_place(present: list[RankView], age: float) -> Verdict | None:
    """Name ranks that sleep in code of their own while every other one sits where it waits for others."""
    elsewhere, others = [], []
    for view in present:
        doing = view.evidence.place.doing if view.evidence is not None else ""
        if view.inside or doing in ("collective", "backward", "device"):
            others.append(view)
        elif view.evidence is not None and view.evidence.is_asleep and doing and not view.absent and view.stuck:
            elsewhere.append(view)
        else:
            return None
    return missing(others, elsewhere, "", age, sure=False) if elsewhere and others else None


def _some_inside(inside: list[RankView], present: list[RankView]) -> Verdict | None:
    counts = Counts(present)
    top = max(inside, key=counts.place)
    name = top.call
    age = max(view.age for view in inside)
    outside = [view for view in present if not view.inside or view.absent]
    if outside:
        late = [view for view in outside if view.absent or view.stuck]
        if not late:
            return None
        waiting = [view for view in present if view.inside and not view.absent]
        entered = [view for view in late if _has_entered(view, top, counts)]
        if entered:
            if placed := _by_place(present, age):
                return placed
            reason = (
                f"{ranks_in_words(ranks_of(waiting))} in {name}, which {ranks_in_words(ranks_of(entered))} entered too"
            )
            return unclear(present, age, reason)
        return missing(waiting, late, name, age)
    if any(view.age <= MOVING_S for view in present):
        return None
    if len({view.inside for view in present}) > 1 and len({counts.place(view) for view in present}) == 1:
        calls = "; ".join(
            f"{ranks_in_words([view.rank for view in present if view.inside == call])}: {call}"
            for call in sorted({view.inside for view in present})
        )
        return Verdict(
            kind="mismatch",
            waiting=ranks_of(present),
            hung=(),
            sure=True,
            title=f"mismatched collectives for {duration(age)}: {calls}",
            text=(
                f"Every rank is inside its collective #{top.collectives}, but not the same one ({calls}). They wait "
                "for each other for ever. Look for code that takes another branch on some ranks."
            ),
            age=age,
            collective=f"#{top.collectives}",
            where={view.rank: view.where() for view in present},
        )
    if len({(view.inside, view.collectives) for view in present}) == 1:
        reason = f"every rank is inside {name}: the network, or the collective itself"
    else:
        reason = "every rank is inside a collective, but not at the same count"
    return unclear(present, age, reason)


def _nobody_inside(stuck: list[RankView], present: list[RankView]) -> Verdict | None:
    age = max(view.age for view in stuck)
    if len(present) == 1:
        return alone(stuck, age)
    unable = [view for view in present if view.absent in ("stopped", "held", "gone")]
    if unable:
        return missing([view for view in stuck if not view.absent], unable, "", age)
    still = [view for view in present if view.absent or view.age > MOVING_S]
    counts = Counts(present)
    lowest = min(counts.place(view) for view in present)
    ahead = [view for view in present if counts.place(view) > lowest]
    if counts.comparable and ahead:
        behind = [view for view in present if counts.place(view) == lowest]
        late = [view for view in behind if view.absent or view.stuck]
        if not late or len(late) < len(behind) or any(view.age <= MOVING_S and not view.absent for view in ahead):
            # Those behind still move or may take their time, or those ahead do not wait at all.
            return alone(late, age) if late and len(still) == len(late) else None
        top = max(ahead, key=counts.place)
        return missing(ahead, late, f"{top.last_collective or 'collective'} #{top.collectives}", age)
    silent = [view for view in present if view.absent]
    if silent:
        return missing([view for view in stuck if not view.absent], silent, "", age)
    if len(stuck) < len(present):
        return alone(stuck, age) if len(still) == len(stuck) else None
    early = [view for view in present if view.phase in ("data", "forward")]
    others = [view for view in present if view.phase in ("backward", "optimizer")]
    if (
        not any(view.collectives for view in present)
        and early
        and len(early) + len(others) == len(present)
        and max(_place(view) for view in early) < min(_place(view) for view in others)
    ):
        return missing(others, early, "", age, sure=False)
    return _by_place(present, age) or unclear(present, age, "no rank is seen to wait for another one")


def _has_entered(view: RankView, top: RankView, counts: Counts) -> bool:
    """Tell whether a rank's last word was that it had entered the collective that ``top`` waits in."""
    if view.absent in ("stopped", "held", "gone"):
        return False
    if view.absent == "silent" and view.evidence is not None and has_stacks(view):
        return view.evidence.place.doing == "collective"
    if view.absent == "silent" and view.inside:
        return True
    return counts.comparable and counts.place(view) >= counts.place(top)


def _place(view: RankView) -> tuple[int, int, int]:
    """Where a rank is in the order of an ordinary step."""
    return view.step, view.micro_step, STEP_PHASES.index(view.phase)
