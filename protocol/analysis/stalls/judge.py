"""Decides which ranks block the others: a pure function of the state of every rank. "Cannot tell" is a verdict too.

``judge`` returns a verdict or None from the views of all ranks. Its rules, in this order:

0. The ranks' inspection (``RankView.evidence``) shows that the wait cannot end: every rank concerned is **blocked**
   (``RankView.blocked``: it stands at one line, asleep or spinning, in a collective or with one that its device has
   not completed), and either a collective was entered differently (**mismatch**), or each waits for a rank that waits
   elsewhere (**deadlock**), or they wait for a rank whose script has ended (**left**). No phase's limit applies: it
   belongs to a rank that works.
1. No rank has exceeded its limit (``progress.limit``) or is stopped, gone or silent: no verdict. Ranks known to have
   waited ``WAITED_S`` in a collective that a silent rank has not entered are blocked by that rank. If all ranks are
   silent and had made no progress for ``STOOD_S`` at their last reports, those reports are compared: ranks behind the
   others in a group's collectives are named, as likely only. While a rank's host is cut off no rank is named: the
   others wait for an **unreachable** host.
2. Some ranks have exceeded their limit inside a collective call (visible with blocking backends such as gloo):

   - Ranks outside that are stopped, gone, silent or past their *own* limit have not entered it: they are **hung**,
     those inside **wait**. Certain, unless a count shows that such a rank had entered it.
   - Ranks outside that make progress or are within their limit (a long evaluation or checkpoint): no verdict yet.
   - Ranks outside that have finished several steps since without entering it **ran ahead**: they skip collectives.
   - All ranks inside the same collective: **cannot tell** (the network, or the collective itself). Inside different
     ones at the same count: **mismatch**, without naming a rank. At different counts: cannot tell; the ranks with
     lower counts are listed.
3. No rank is inside a call (NCCL returns at once; the host blocks later). The counts of entered collectives decide:
   ranks with the highest count **wait**, those with the lowest are **hung**. If the counts are equal or not comparable
   (ranks enter different numbers of collectives per step), a rank that is stuck while others make progress is hung by
   itself; otherwise **cannot tell**. In a run of one rank, that rank is named. If no collective is counted (DDP's
   reducer runs in C++), ranks in data or forward while all others are in backward or the optimizer of the same
   micro-step, or further, are named, as likely only.
4. Some ranks have finished and others live on for more than ``EXIT_LIMIT_S`` (in eval and checkpoint, their limit): a
   **hang at exit**, regardless of the counts. ``EXIT_SURE_S`` suffices if its process sleeps after its goodbye or
   after the end of its script.
5. Every rank waits for an extension's build lock, or in a collective for a rank that does, and no compiler runs: a
   stale **lock**, at once.

A rank found asleep has a shorter limit, which applies only if others wait for it.

If the ranks have been inspected, the comparison of their collectives (``collective_calls``) precedes rules 2 and 3: the
wait graph leads to the hung ranks. While every rank has entered the collectives that the others wait for, none is
named, and the devices may take ``ENTERED_S`` to complete them. If counts do not decide, ranks asleep in user code while
all others are in a collective, in a backward or in a wait for their device are named as likely.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ...messages.telemetry import STEP_PHASES
from .collectives import Counts, Difference, RankView, Waits, behind, difference, open_calls, skipped, waits
from .evidence import Call, Collective, LockWait, all_members
from .progress import LONG_PHASES, action_patience

EXIT_LIMIT_S = 30.0  # after other ranks have finished, a rank may live on for this many seconds without progress
EXIT_SURE_S = 9.0  # the same if its process sleeps after its goodbye
LEFT_S = 4.0  # the same if it waits in a collective that a finished rank has not entered
ENTERED_S = 60.0
"""Seconds without progress after which a verdict follows although every rank has entered the same collectives: a device
may compute for that long before it reaches them."""
EXIT_WORKING_S = 300.0  # the same if its process tree still works, as in an upload or a last evaluation
AHEAD_STEPS = 3
"""A rank that finished this many steps while another waited for it in a collective will not enter that collective."""
LOCK_IDLE_S = 10.0  # a build whose files are not written for so many seconds, without a running compiler, is over
POINT_TO_POINT = frozenset(("send", "recv", "batch_isend_irecv"))  # calls that wait for one unknown rank
WAITED_S = 10.0  # minimum wait for a silent rank, in seconds, regardless of the limit of the waiting ranks' phase
STOOD_S = 2.0  # ranks without progress for so many seconds at their last report had stopped before they became silent
MOVING_S = 3.0  # a rank with progress within this many seconds is not stuck
ALONE_DATA_S = 30.0  # seconds that data loading may take before it counts as a stall, if no other rank is blocked by it
_STRUCTURAL = ("mismatch", "deadlock", "ahead", "lock", "left")
"""Verdicts that prove by themselves that the collectives concerned cannot complete."""

VerdictKind = Literal[
    "missing", "ahead", "lock", "alone", "mismatch", "deadlock", "left", "unreachable", "unclear", "exit"
]


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """Ranks in a send or a receive (``mismatch``), of a host that is cut off (``unreachable``), or ended (``exit``)."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CircularWait:
    """Collectives of ranks that wait for each other in different groups."""

    calls: Mapping[int, Collective]


@dataclass(frozen=True, slots=True)
class RanAhead:
    """Steps of ranks that skip collectives, and of those that wait for them."""

    step: int
    behind: int


@dataclass(frozen=True, slots=True)
class StaleLocks:
    """Locks that a build left behind."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """Ranks whose script has ended, in whose collectives others wait."""

    steps: Mapping[int, int]  # optimizer steps that each of them has finished, by rank
    step: int  # unfinished step of those that wait


@dataclass(frozen=True, slots=True)
class Unclear:
    """Why the evidence does not identify a rank."""

    why: Literal["entered", "same_collective", "other_counts", "nobody_waits"]
    """``entered``: a rank outside the collective had entered it too."""
    collective: Collective | None = None
    inside: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()


Facts = Difference | OtherRanks | CircularWait | RanAhead | StaleLocks | Left | Unclear


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks wait for which, in which collective, with which certainty and figures."""

    kind: VerdictKind
    waiting: tuple[int, ...]
    hung: tuple[int, ...]
    sure: bool
    age: float  # seconds since the last progress of those concerned
    collective: Collective | None = None
    views: Mapping[int, RankView] = field(default_factory=dict[int, RankView])
    """The judge's view of each rank concerned, named ranks first."""
    differs: tuple[int, ...] = ()  # for a mismatch, the ranks that differ from the majority; empty if there is none
    facts: Facts | None = None
    contradicted: bool = False  # whether NCCL's own counts (RAS) show that other ranks are behind than those named

    @property
    def signature(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Identity of the verdict; a change means that it is a different one."""
        return self.kind, self.waiting, self.hung


def by_rank(views: Iterable[RankView]) -> dict[int, RankView]:
    """Return views by rank, in the given order."""
    return {view.rank: view for view in views}


def ranks_of(views: Iterable[RankView]) -> tuple[int, ...]:
    """Return the ranks of views, ascending."""
    return tuple(sorted(view.rank for view in views))


def _verdict(
    kind: VerdictKind,
    waiting: list[RankView],
    hung: list[RankView],
    collective: Collective | None = None,
    *,
    sure: bool = True,
    age: float | None = None,
    views: list[RankView] | None = None,
    facts: Facts | None = None,
) -> Verdict:
    """Return a verdict; the default of ``age`` is the longest of ``waiting``, that of ``views`` all ranks named."""
    age = max(view.age for view in waiting) if age is None else age
    concerned = by_rank([*hung, *waiting] if views is None else views)
    return Verdict(kind, ranks_of(waiting), ranks_of(hung), sure, age, collective, concerned, facts=facts)


def _mismatch(found: Difference, present: list[RankView], age: float) -> Verdict:
    call = _of_group("", found.number, found.group, present)
    concerned = [view for view in present if view.rank in found.calls]
    sure = not _have_threads(present)
    verdict = _verdict("mismatch", concerned, [], call, sure=sure, age=age, views=present, facts=found)
    return replace(verdict, differs=found.odd_ones())


def _crossed(apart: list[RankView], waiting: list[RankView], graph: Waits) -> Verdict:
    """Return the verdict that ranks wait in a collective for ranks in a send or a receive."""
    call, ranks = graph.of[waiting[0].rank][0].call, ranks_of(apart)
    named = Collective(call.name, call.number)
    return replace(_verdict("mismatch", [*apart, *waiting], [], named, facts=OtherRanks(ranks)), differs=ranks)


def _deadlock(graph: Waits, waiting: list[RankView]) -> Verdict:
    members = all_members(view.evidence for view in waiting)
    calls: dict[int, Collective] = {}
    for view in waiting:
        call = graph.of[view.rank][0].call
        calls[view.rank] = Collective(call.name, call.number, members.get(call.group, ()), call.group)
    first, sure = next(iter(calls.values())), not _have_threads(waiting)
    return _verdict("deadlock", waiting, [], first, sure=sure, facts=CircularWait(calls))


def _left_behind(waiting: list[RankView], finished: list[RankView]) -> Verdict:
    view = max(waiting, key=lambda each: each.age)
    call = next(iter(open_calls(view)), None)
    named = view.call if view.inside else Collective(call.name, call.number) if call is not None else None
    facts = Left({each.rank: each.step - 1 for each in finished}, max(each.step for each in waiting))
    return _verdict("left", waiting, [], named, facts=facts)


def _of_group(name: str, number: int | None, group: str, views: list[RankView]) -> Collective:
    """Return a collective with the ranks of its group, or without if the group has all ranks."""
    members = all_members(view.evidence for view in views).get(group, ())
    return Collective(name, number, () if {view.rank for view in views} <= set(members) else members)


def _missing(
    waiting: list[RankView], late: list[RankView], collective: Collective | None, age: float, *, sure: bool = True
) -> Verdict | None:
    """Return the verdict on ranks that others wait for; if none waits, on ranks stuck by themselves."""
    if not waiting:
        return _alone(late, age)
    sure = sure and not any(view.absent == "silent" and not _has_stacks(view) for view in late)
    return _verdict("missing", waiting, late, collective, sure=sure, age=age)


def _alone(stuck: list[RankView], age: float) -> Verdict | None:
    """Return the verdict on ranks that are stuck without blocking others; None if data loading may take longer."""
    # Fetching a shard, or a slow disk, blocks no other rank: then data loading may take longer.
    stuck = [view for view in stuck if view.overdue or view.absent]
    stuck = [view for view in stuck if view.phase != "data" or view.age > ALONE_DATA_S or view.absent]
    return _verdict("alone", [], stuck, age=age) if stuck else None


def _unclear(present: list[RankView], age: float, facts: Unclear) -> Verdict:
    waiting = [view for view in present if view.inside]
    return _verdict("unclear", waiting, [], sure=False, age=age, views=present, facts=facts)


def _have_threads(views: Iterable[RankView]) -> bool:
    """Return whether a script's other threads may still enter the collectives that its training thread does not."""
    return any(view.evidence is not None and view.evidence.threads for view in views)


def _has_stacks(view: RankView) -> bool:
    return view.evidence is not None and bool(view.evidence.frames)


def judge(views: list[RankView]) -> Verdict | None:
    """Judge a stall from all ranks' views (the rules are this module's docstring); None: there is none.

    If PyTorch's flight recorder has no collectives, NCCL's own counts (RAS) are compared. If both exist and NCCL shows
    that other ranks are behind than those named, the verdict is not sure.
    """
    by_nccl = _by_nccl(views)
    recorded = any(view.evidence is not None and view.evidence.calls.source == "recorder" for view in views)
    if by_nccl is None or recorded:
        verdict = _judge(views)
        return _checked(verdict, by_nccl) if verdict is not None and by_nccl is not None else verdict
    return _judge(by_nccl)


def _by_nccl(views: list[RankView]) -> list[RankView] | None:
    """Return the views with NCCL's counts as the ranks' collectives; None if a present rank's counts are unknown."""
    found = [view.evidence for view in views if not view.finished and not view.absent]
    if not found or not all(evidence is not None and evidence.nccl.recent for evidence in found):
        return None
    return [
        replace(view, evidence=replace(view.evidence, calls=view.evidence.nccl)) if view.evidence is not None else view
        for view in views
    ]


def _checked(verdict: Verdict, by_nccl: list[RankView]) -> Verdict:
    """Return the verdict, not sure if NCCL's counts show that only ranks other than those concerned are behind."""
    graph = waits([view for view in by_nccl if not view.finished])
    late = {rank for edges in graph.of.values() for wait in edges for rank in wait.blockers} if graph else set[int]()
    concerned = set(verdict.hung or (verdict.waiting if verdict.kind in ("deadlock", "mismatch") else ()))
    if not concerned or not late or late & concerned:
        return verdict
    return replace(verdict, sure=False, contradicted=True)


def _judge(views: list[RankView]) -> Verdict | None:
    living = [view for view in views if not view.finished and view.absent != "gone"]
    finished = [view for view in views if view.finished]
    stuck = [view for view in living if view.stuck and (view.absent != "silent" or _has_stacks(view))]
    if finished and (waiting := _wait_for_finished(living, finished)):
        return _left_behind(waiting, finished)
    ending = finished or any(view.phase == "exit" for view in living)
    if ending and living and (at_exit := _hang_at_exit(living, finished)) is not None:
        return at_exit
    # A finished rank enters no more collectives; while its peers make progress, that is an ordinary end.
    if ending:
        return None
    present = [view for view in views if not view.finished]
    if (stale := _build_lock(present)) is not None:
        return stale
    if (skipping := _run_ahead(present)) is not None:
        return skipping
    if (tangle := _tangle(present)) is not None:
        return tangle
    if _all_entered(present):
        return None
    if not stuck:
        return _held_up_by_silence(present) or _silent_together(present)
    verdict = _stall(stuck, present)
    # If all are asleep in one collective, no rank is named, and the ordinary limits apply.
    if verdict is not None and verdict.kind == "unclear" and not any(view.overdue for view in stuck):
        return None
    return verdict


def _tangle(present: list[RankView]) -> Verdict | None:
    """Return a verdict on blocked ranks that wait for each other: it needs no limit, since none can continue."""
    if any(view.absent for view in present):
        return None
    views = by_rank(present)
    found = difference(present)
    graph = waits(present) if found is None else None
    concerned = [views[rank] for rank in found.calls] if found is not None else []
    if graph is not None and graph.circle:
        concerned = [views[rank] for rank in sorted(graph.of)]
    if not concerned or any(not view.blocked or view.age <= MOVING_S for view in concerned):
        return None
    if found is not None:
        return _mismatch(found, present, max(view.age for view in concerned))
    return _deadlock(graph, concerned) if graph is not None else None


def _all_entered(present: list[RankView]) -> bool:
    """Return whether every rank has entered the collectives that the others wait for, and the devices may be busy."""
    if any(view.absent or view.evidence is None or view.age > ENTERED_S for view in present):
        return False
    recorded = all(view.evidence is not None and view.evidence.calls.source == "recorder" for view in present)
    if not recorded or not any(view.blocked for view in present):
        return False
    graph = waits(present)
    return graph is not None and not graph.of and all(view.blocked or view.works for view in present)


def _wait_for_finished(living: list[RankView], finished: list[RankView]) -> list[RankView]:
    """Return the living ranks if each is blocked, some in a collective that a finished rank will not enter."""
    if not all(view.absent == "stopped" or ((view.blocked or view.inside) and view.age > LEFT_S) for view in living):
        return []
    members = all_members(view.evidence for view in living)
    awaited = [view for view in living if any(_will_not_enter(each, view, members) for each in finished)]
    return living if awaited else []


def _will_not_enter(finished: RankView, view: RankView, members: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether ``view`` has an open collective of a group with a finished rank that ended in an earlier step."""
    groups = {call.group for call in open_calls(view)}
    if not any(finished.rank in members.get(group, ()) for group in groups):
        return False
    # An interrupted run's ranks end one after the other.
    return finished.age > MOVING_S and (finished.place_in_step < view.place_in_step or behind(finished, view))


def _build_lock(present: list[RankView]) -> Verdict | None:
    """Return a verdict if every rank waits for the lock of an extension's build that no process runs."""
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
    paths = {lock.path for view in waiting if (lock := _at_build_lock(view)) is not None}
    return _verdict("lock", waiting, [], views=present, facts=StaleLocks(tuple(sorted(paths))))


def _at_build_lock(view: RankView) -> LockWait | None:
    lock = view.evidence.lock if view.evidence is not None else None
    return lock if lock is not None and lock.build and not view.absent and view.age > MOVING_S else None


def _run_ahead(present: list[RankView]) -> Verdict | None:
    """Return a verdict on ranks that keep making steps while others wait in a collective that they never entered."""
    standing = [view for view in present if view.age > MOVING_S]
    if len(standing) == len(present) or any(view.absent for view in present):
        return None
    for view in standing:
        found = skipped(view, present, AHEAD_STEPS)
        if found is not None:
            call, skippers = found
            waiting = [each for each in standing if each.rank not in skippers]
            collective = _of_group(call.name, call.number, call.group, present)
            ahead = [each for each in present if each.rank in skippers]
            steps = RanAhead(max(each.step for each in ahead), min(each.step for each in waiting))
            return _verdict("ahead", waiting, ahead, collective, views=waiting, facts=steps)
    return None


def _held_up_by_silence(present: list[RankView]) -> Verdict | None:
    """Return a verdict on silent ranks that others are known to wait for, even within the others' limits."""
    if any(view.absent == "cut off" for view in present):
        return None
    graph = waits(present)
    if graph is None or not graph.roots:
        return None
    views = by_rank(present)
    roots, waiting = [views[rank] for rank in graph.roots], [views[rank] for rank in sorted(graph.of)]
    # A call that may have finished is not a wait.
    open_calls = [wait.call.done is False for waits_of in graph.of.values() for wait in waits_of]
    if any(root.absent != "silent" for root in roots) or not all(open_calls) or min(v.age for v in waiting) <= WAITED_S:
        return None
    if any(root.phase in LONG_PHASES and root.age <= root.limit for root in roots):
        return None
    call = _held_up_in(graph)
    age = max(view.age for view in waiting)
    return _missing(waiting, roots, _of_group(call.name, call.number, call.group, present), age)


def _silent_together(present: list[RankView]) -> Verdict | None:
    """Return a verdict on the ranks behind according to the last reports, if all stalled and then became silent."""
    if len(present) < 2 or any(view.absent != "silent" or view.stood_s <= STOOD_S for view in present):
        return None
    if any(view.age <= (view.limit if view.phase in LONG_PHASES else WAITED_S) for view in present):
        return None
    furthest = max(present, key=lambda view: view.group_sequence)
    late = [view for view in present if view.group_sequence < furthest.group_sequence]
    if not late or {view.group for view in present} != {furthest.group} or not furthest.group:
        return None
    waiting = [view for view in present if view not in late]
    call = Collective(furthest.newest, furthest.group_sequence)
    return _missing(waiting, late, call, max(view.age for view in present))


def _held_up_in(graph: Waits) -> Call:
    """Return a collective call in which a rank waits for a rank that does not wait in a call itself."""
    roots = set(graph.roots)
    return next(wait.call for rank in sorted(graph.of) for wait in graph.of[rank] if wait.blockers & roots)


def _stall(stuck: list[RankView], present: list[RankView]) -> Verdict | None:
    cut = [view for view in present if view.absent == "cut off"]
    if cut:
        waiting = [view for view in stuck if not view.absent]
        call = next((view.call for view in waiting if view.inside), None)
        facts, views = OtherRanks(ranks_of(cut)), [*cut, *waiting]
        return _verdict("unreachable", waiting, [], call, sure=False, views=views, facts=facts) if waiting else None
    side_by_side = _by_calls(stuck, present)
    if side_by_side != "cannot say":
        return side_by_side
    inside = [view for view in stuck if view.inside and not view.absent]
    return _some_inside(inside, present) if inside else _nobody_inside(stuck, present)


def _hang_at_exit(living: list[RankView], finished: list[RankView]) -> Verdict | None:
    still = [view for view in living if view.absent not in ("silent", "cut off") and view.age > _exit_limit(view)]
    if len(still) < len(living):
        return None
    waiting, hung = [view for view in still if view.inside], [view for view in still if not view.inside]
    call, age = waiting[0].call if waiting else None, max(view.age for view in still)
    return _verdict("exit", waiting, hung, call, age=age, views=still, facts=OtherRanks(ranks_of(finished)))


def _exit_limit(view: RankView) -> float:
    found = view.evidence
    over = view.phase == "exit" or (found is not None and found.place.doing == "exiting")
    if found is not None and found.work and not view.inside:
        return max(EXIT_WORKING_S, view.patience)
    if over and found is not None and found.is_asleep:
        return EXIT_SURE_S
    return max(EXIT_LIMIT_S, view.limit) if view.phase in LONG_PHASES else EXIT_LIMIT_S


def _by_calls(stuck: list[RankView], present: list[RankView]) -> "Verdict | Literal['cannot say'] | None":
    age = max(view.age for view in stuck)
    if any(view.absent == "cut off" for view in present):
        return "cannot say"
    found = difference(present)
    if found is not None:
        concerned = [view for view in present if view.rank in found.calls]
        moving = any(view.age <= MOVING_S and not view.absent for view in concerned)
        return None if moving else _mismatch(found, present, age)
    graph = waits(present)
    if graph is None or not graph.of:
        return "cannot say"
    views = by_rank(present)
    waiting = [views[rank] for rank in sorted(graph.of)]
    if any(view.age <= MOVING_S for view in waiting):
        return None
    if graph.circle:
        return _deadlock(graph, waiting) if all(view.stuck or view.blocked for view in waiting) else None
    awaited = [views[rank] for rank in graph.roots]
    roots = [view for view in awaited if not view.inside or view.absent] or awaited
    late = [view for view in roots if view.absent or view.stuck]
    if len(late) < len(roots):
        return None  # an awaited rank may be working
    if any(view.inside and not view.absent for view in late):
        # It is in a recv without a sender, which is not a collective; or in a collective that the others have left,
        # so that the cause is the network or the collective itself.
        apart = all(view.inside in POINT_TO_POINT for view in late)
        return _crossed(late, waiting, graph) if apart else "cannot say"
    call = _held_up_in(graph)
    example = next(view for view in waiting if any(wait.call is call for wait in graph.of[view.rank]))
    name, number = example.call[:2] if example.inside else (call.name, call.number)
    return _missing(waiting, late, _of_group(name, number, call.group, present), age)


def _by_place(present: list[RankView], age: float) -> Verdict | None:
    """Return a verdict on ranks asleep in user code while every other rank waits for others."""
    elsewhere, others = [], []
    for view in present:
        doing = view.evidence.place.doing if view.evidence is not None else ""
        if view.inside or doing in ("collective", "backward", "device"):
            others.append(view)
        elif view.evidence is not None and view.evidence.is_asleep and doing and not view.absent and view.stuck:
            elsewhere.append(view)
        else:
            return None
    return _missing(others, elsewhere, None, age, sure=False) if elsewhere and others else None


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
            return _unclear(present, age, Unclear("entered", top.call, ranks_of(waiting), ranks_of(entered)))
        return _missing(waiting, late, top.call, age)
    if any(view.age <= MOVING_S for view in present):
        return None
    if len({view.inside for view in present}) > 1 and len({counts.place(view) for view in present}) == 1:
        return _verdict("mismatch", present, [], Collective("", top.collectives))
    alike = len({(view.inside, view.collectives) for view in present}) == 1
    return _unclear(present, age, Unclear("same_collective", top.call) if alike else Unclear("other_counts"))


def _nobody_inside(stuck: list[RankView], present: list[RankView]) -> Verdict | None:
    age = max(view.age for view in stuck)
    if len(present) == 1:
        return _alone(stuck, age)
    unable = [view for view in present if view.is_unable]
    if unable:
        return _missing([view for view in stuck if not view.absent], unable, None, age)
    still = [view for view in present if view.absent or view.age > MOVING_S]
    counts = Counts(present)
    lowest = min(counts.place(view) for view in present)
    ahead = [view for view in present if counts.place(view) > lowest]
    if counts.comparable and ahead:
        behind = [view for view in present if counts.place(view) == lowest]
        late = [view for view in behind if view.absent or view.stuck]
        if not late or len(late) < len(behind) or any(view.age <= MOVING_S and not view.absent for view in ahead):
            # Ranks behind still make progress or are within their limit, or ranks ahead do not wait.
            return _alone(late, age) if late and len(still) == len(late) else None
        top = max(ahead, key=counts.place)
        return _missing(ahead, late, Collective(top.newest, top.collectives), age)
    silent = [view for view in present if view.absent]
    if silent:
        return _missing([view for view in stuck if not view.absent], silent, None, age)
    if len(stuck) < len(present):
        return _alone(stuck, age) if len(still) == len(stuck) else None
    early = [view for view in present if view.phase in ("data", "forward")]
    others = [view for view in present if view.phase in ("backward", "optimizer")]
    if (
        not any(view.collectives for view in present)
        and early
        and len(early) + len(others) == len(present)
        and max(_place(view) for view in early) < min(_place(view) for view in others)
    ):
        return _missing(others, early, None, age, sure=False)
    return _by_place(present, age) or _unclear(present, age, Unclear("nobody_waits"))


def _has_entered(view: RankView, top: RankView, counts: Counts) -> bool:
    """Return whether a rank last reported having entered the collective in which ``top`` waits."""
    if view.is_unable:
        return False
    if view.absent == "silent" and view.evidence is not None and _has_stacks(view):
        return view.evidence.place.doing == "collective"
    if view.absent == "silent" and view.inside:
        return True
    return counts.comparable and counts.place(view) >= counts.place(top)


def _place(view: RankView) -> tuple[int, int, int]:
    """Return a rank's position in the order of an ordinary step."""
    return view.step, view.micro_step, STEP_PHASES.index(view.phase)


class RankFacts(NamedTuple):
    """Facts of one rank."""

    patience: float  # time limit of its phase while it computes, seconds
    quiet: float | None = None  # seconds for which its process tree is known to have been idle; None: unknown
    gone: bool = False
    may_resume: bool = False
    """Whether it waits for an answer from the network, or sleeps for a set time, as until a server's Retry-After."""
    blocked: bool = False  # whether it waits in a collective or for its device


def unproven(kind: str, sure: bool, waiting: Sequence[int], hung: Sequence[int], ranks: Mapping[int, RankFacts]) -> str:
    """Return what proof is missing to end the run for a verdict that has stood for ``--hang-grace``; empty: none.

    An alert needs only suspicion. Ending a run needs both: other ranks are blocked in a collective that the named ranks
    must enter (or that cannot match), and the named ranks' process trees have been idle for their phase's time limit.
    """
    if kind in _STRUCTURAL:
        return "" if sure else "other threads of the script, or NCCL's own counters, may say otherwise"
    if kind == "unreachable":
        return "the host is cut off"
    if kind == "missing" and not sure:
        return "it is not certain that the others wait for it"
    if kind == "unclear" and not all(facts.blocked for facts in ranks.values()):
        return "some rank is in no collective"
    named, awaited = hung or tuple(ranks), False
    if kind in ("missing", "exit"):
        named, awaited = (hung, bool(waiting)) if kind == "missing" else ((*hung, *waiting), True)
    return next(filter(None, (_still(rank, ranks, awaited=awaited) for rank in named)), "")


def _still(rank: int, ranks: Mapping[int, RankFacts], *, awaited: bool) -> str:
    """Return what work a rank's processes may still be doing; empty: none."""
    facts = ranks.get(rank)
    if facts is None:
        return f"nothing is known of rank {rank}"
    if facts.gone:
        return ""
    needed = action_patience(facts.patience, awaited=awaited, may_resume=facts.may_resume)
    if facts.quiet is None:
        return f"it is not known what rank {rank}'s processes do"
    if facts.quiet < needed:
        return f"rank {rank}'s processes did something {facts.quiet:.0f} s ago; {needed:.0f} s of rest are needed"
    return ""
