"""Decides which ranks hold the others up: a pure function of what is known of every rank; "cannot tell" is an answer.

``judge`` returns a verdict or None from views, one a rank. Its rules, in this order:

1. No rank is past its own limit (``progress.limit``), stopped, gone or silent: no verdict. Ranks that were seen to wait
   for ``WAITED_S`` in a collective that a silent one has not entered are held up by that one. Where all have fallen
   silent, without progress for ``STOOD_S`` when they were heard last, their last reports are compared: ranks behind the
   furthest in a group's collectives are named, as likely only. While a rank's host is cut off no rank is named: the
   others wait for a host that is **unreachable**.
2. Some ranks sit inside a collective call past their limit (a blocking backend such as gloo shows that): - ranks
   outside of it that are stopped, gone, silent or past their *own* limit have not entered it: they are **hung**, those
   inside **wait**. Sure, unless a count says that such a rank had entered it already. - ranks outside that still move,
   or that are within their limit (a long evaluation or checkpoint): no verdict yet. - ranks outside that have finished
   several steps since, without entering it, **ran ahead**: they skip collectives. - all inside the same one: **cannot
   tell** (network, or the collective itself). Inside different ones at the same count: **mismatch**, without a name. At
   different counts: cannot tell, and the laggards are listed.
3. No rank is inside (NCCL returns at once; the host blocks later). Counts of collectives entered decide: ranks behind
   the furthest are **hung**, the furthest ones **wait**; only the lowest count is named. Equal counts, or counts that
   cannot be compared (ranks enter different numbers of collectives a step): a rank that is stuck while others move is
   hung by itself; otherwise **cannot tell**. A run of one rank names that rank. Where no collective is counted at all
   (DDP's own reducer runs in C++): ranks that are in data or forward while all others are in backward or the optimizer
   of the same micro-step, or beyond, are named, as likely only.
4. Some ranks have finished and others live on past ``EXIT_LIMIT_S`` (or their limit, in eval and checkpoint):
   a **hang at exit**, whatever the counts say. ``EXIT_SURE_S`` is enough where a rank sits in a collective of a group
   with a finished rank in it, or where its process sleeps after its goodbye or after the end of its script.

5. Every rank waits for an extension's build lock, or in a collective for one that does, and no compiler runs: a stale
   **lock**, at once.

A rank found asleep has a shorter limit, which counts only where others wait for it.

Where the ranks have been inspected (``RankView.evidence``), the comparison of their collectives (``collective_calls``)
goes before rules 2 and 3: a collective entered differently is a **mismatch**; following who waits for whom leads to the
ranks that are hung, or in a circle to a **deadlock**. And where counts do not separate, ranks asleep in code of their
own, while every other one sits in a collective, in a backward or in a wait for its device, are named as likely.
"""

from typing import Literal

from ...telemetry import STEP_PHASES
from .collective_calls import Waits, difference, skipped, waits
from .evidence import Call, Collective, LockWait, all_members
from .progress import LONG_PHASES
from .rank_view import Counts, RankView
from .verdicts import (
    Finished,
    Unclear,
    Verdict,
    ahead,
    alone,
    by_rank,
    crossed,
    deadlock,
    has_stacks,
    mismatch,
    missing,
    of_group,
    ranks_of,
    stale_lock,
    unclear,
    unreachable,
)

__all__ = ["EXIT_LIMIT_S", "EXIT_SURE_S", "EXIT_WORKING_S", "MOVING_S", "Verdict", "judge"]

EXIT_LIMIT_S = 30.0
"""After other ranks have finished, a rank may live on this long without progress."""

EXIT_SURE_S = 12.0
"""The same where it is certain that the rank waits for a finished one, or that its process sleeps after its goodbye."""

EXIT_WORKING_S = 300.0
"""The same where its process tree still works: an upload or a last evaluation."""

AHEAD_STEPS = 3
"""A rank that finished so many steps while another waited for it in a collective will not enter that one."""

LOCK_IDLE_S = 10.0
"""A build whose files were not written for this long, with no compiler running, is over."""

POINT_TO_POINT = frozenset(("send", "recv", "batch_isend_irecv"))
"""Calls that wait for one other rank; which one is not known."""

WAITED_S = 10.0
"""Ranks must have waited this long for a silent rank, whatever the limit of the phase they wait in."""

STOOD_S = 2.0
"""Ranks without progress for this long when they were heard last had stopped training before they fell silent."""

MOVING_S = 3.0
"""Progress within this many seconds proves that a rank moves."""


def judge(views: list[RankView]) -> Verdict | None:
    """Judge a stall from all ranks' views (the rules are this module's docstring); None: there is none."""
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
    if (left_behind := _build_lock(present)) is not None:
        return left_behind
    if (skipping := _run_ahead(present)) is not None:
        return skipping
    if not stuck:
        return _held_up_by_silence(present) or _silent_together(present)
    verdict = _stall(stuck, present)
    # Where all are asleep in one collective no rank is named: then the ordinary limits hold.
    if verdict is not None and verdict.kind == "unclear" and not any(view.overdue for view in stuck):
        return None
    return verdict


def _build_lock(present: list[RankView]) -> Verdict | None:
    """Name the lock of an extension's build that every rank waits for although no process builds."""
    waiting = [view for view in present if _at_build_lock(view) is not None]
    if not waiting:
        return None
    for view in present:
        lock, found = _at_build_lock(view), view.evidence
        if lock is not None and (lock.compiler or lock.idle_s < LOCK_IDLE_S):
            return None
        elsewhere = not view.inside and (found is None or found.place.doing not in ("collective", "backward"))
        if lock is None and (view.absent or elsewhere or view.age <= MOVING_S):
            return None
    return stale_lock(waiting, present, max(view.age for view in waiting))


def _at_build_lock(view: RankView) -> LockWait | None:
    lock = view.evidence.lock if view.evidence is not None else None
    return lock if lock is not None and lock.build and not view.absent and view.age > MOVING_S else None


def _run_ahead(present: list[RankView]) -> Verdict | None:
    """Name ranks that go on stepping while others wait in a collective that these have never entered."""
    standing = [view for view in present if view.age > MOVING_S]
    if len(standing) == len(present) or any(view.absent for view in present):
        return None
    for view in standing:
        found = skipped(view, present, AHEAD_STEPS)
        if found is not None:
            call, skippers = found
            waiting = [each for each in standing if each.rank not in skippers]
            collective = of_group(call.name, call.number, call.group, present)
            ranks = [each for each in present if each.rank in skippers]
            return ahead(ranks, waiting, collective, max(each.age for each in waiting))
    return None


def _held_up_by_silence(present: list[RankView]) -> Verdict | None:
    """Name silent ranks that others were found to wait for, though these may stay where they are for long."""
    if any(view.absent == "cut off" for view in present):
        return None
    graph = waits(present)
    if graph is None or not graph.roots:
        return None
    views = by_rank(present)
    roots, waiting = [views[rank] for rank in graph.roots], [views[rank] for rank in sorted(graph.of)]
    # A call that may be over already is no wait.
    open_calls = [wait.call.done is False for waits_of in graph.of.values() for wait in waits_of]
    if any(root.absent != "silent" for root in roots) or not all(open_calls) or min(v.age for v in waiting) <= WAITED_S:
        return None
    if any(root.phase in LONG_PHASES and root.age <= root.limit for root in roots):
        return None
    call = _held_up_in(graph)
    age = max(view.age for view in waiting)
    return missing(waiting, roots, of_group(call.name, call.number, call.group, present), age)


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
    call = Collective(furthest.inside or furthest.last_collective or "collective", furthest.group_sequence)
    return missing(waiting, late, call, max(view.age for view in present))


def _held_up_in(graph: Waits) -> Call:
    """Return a collective call in which a rank waits for a rank that itself waits in no call."""
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
    return Verdict(
        kind="exit",
        waiting=tuple(view.rank for view in still if view.inside),
        hung=tuple(view.rank for view in still if not view.inside),
        sure=True,
        age=max(view.age for view in still),
        collective=next((view.call for view in still if view.inside), None),
        views=by_rank(still),
        facts=Finished(tuple(view.rank for view in finished)),
    )


def _exit_limit(view: RankView, finished_peers: set[int]) -> float:
    found = view.evidence
    over = view.phase == "exit" or (found is not None and found.place.doing == "exiting")
    if found is not None and found.work and not view.inside:
        return max(EXIT_WORKING_S, view.patience)
    if (view.inside and finished_peers) or (over and found is not None and found.is_asleep):
        return EXIT_SURE_S
    return max(EXIT_LIMIT_S, view.limit) if view.phase in LONG_PHASES else EXIT_LIMIT_S


def _by_calls(stuck: list[RankView], present: list[RankView]) -> "Verdict | Literal['cannot say'] | None":
    """Judge by comparing the ranks' collectives, where those were inspected."""
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
    views = by_rank(present)
    waiting = [views[rank] for rank in sorted(graph.of)]
    if any(view.age <= MOVING_S for view in waiting):
        return None
    if graph.circle:
        return deadlock(graph, waiting, age) if all(view.stuck for view in waiting) else None
    awaited = [views[rank] for rank in graph.roots]
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
    name, number = example.call[:2] if example.inside else (call.name, call.number)
    return missing(waiting, late, of_group(name, number, call.group, present), age)


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
    return missing(others, elsewhere, None, age, sure=False) if elsewhere and others else None


def _some_inside(inside: list[RankView], present: list[RankView]) -> Verdict | None:
    counts = Counts(present)
    top = max(inside, key=counts.place)
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
            return unclear(present, age, Unclear("entered", top.call, ranks_of(waiting), ranks_of(entered)))
        return missing(waiting, late, top.call, age)
    if any(view.age <= MOVING_S for view in present):
        return None
    if len({view.inside for view in present}) > 1 and len({counts.place(view) for view in present}) == 1:
        return Verdict(
            kind="mismatch",
            waiting=ranks_of(present),
            hung=(),
            sure=True,
            age=age,
            collective=Collective("", top.collectives),
            views=by_rank(present),
        )
    alike = len({(view.inside, view.collectives) for view in present}) == 1
    return unclear(present, age, Unclear("same_collective", top.call) if alike else Unclear("other_counts"))


def _nobody_inside(stuck: list[RankView], present: list[RankView]) -> Verdict | None:
    age = max(view.age for view in stuck)
    if len(present) == 1:
        return alone(stuck, age)
    unable = [view for view in present if view.absent in ("stopped", "held", "gone")]
    if unable:
        return missing([view for view in stuck if not view.absent], unable, None, age)
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
        return missing(ahead, late, Collective(top.last_collective or "collective", top.collectives), age)
    silent = [view for view in present if view.absent]
    if silent:
        return missing([view for view in stuck if not view.absent], silent, None, age)
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
        return missing(others, early, None, age, sure=False)
    return _by_place(present, age) or unclear(present, age, Unclear("nobody_waits"))


def _has_entered(view: RankView, top: RankView, counts: Counts) -> bool:
    """Return whether a rank's last word was that it had entered the collective that ``top`` waits in."""
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
