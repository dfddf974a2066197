"""Who holds the others up: a pure judgement from what is known of every rank, with "cannot tell" as an answer.

``judge`` looks at views (one a rank) and gives a verdict or None. Its rules, in this order:

1. Nobody is past its own limit (``progress.limit``), and nobody is stopped, gone or silent: no verdict.
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
   a **hang at exit**, whatever the counts say.
"""

from dataclasses import dataclass, field
from typing import Literal

from ....protocol.telemetry import STEP_PHASES
from ....protocol.text import duration
from .view import Counts, RankView, ranks_in_words

EXIT_LIMIT_S = 30.0
"""After other ranks have finished, a rank may live on this long without progress."""

ALONE_DATA_S = 30.0
"""Data loading that holds up no other rank may take this long before it is called a stall."""

MOVING_S = 3.0
"""Progress within this many seconds proves that a rank moves."""

VerdictKind = Literal["missing", "alone", "mismatch", "unclear", "exit"]


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

    @property
    def signature(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What makes this verdict another one than before."""
        return self.kind, self.waiting, self.hung


def judge(views: list[RankView]) -> Verdict | None:
    """Judge a stall from all ranks' views (the rules are this module's docstring); None: there is nothing to say."""
    living = [view for view in views if not view.finished and view.absent != "gone"]
    finished = [view for view in views if view.finished]
    stuck = [view for view in living if view.stuck and view.absent != "silent"]
    ending = finished or any(view.phase == "exit" for view in living)
    if ending and living and (at_exit := _hang_at_exit(living, finished)) is not None:
        return at_exit
    # A rank that finished cannot enter anything any more; while its peers still move that is an ordinary end.
    if not stuck or ending:
        return None
    inside = [view for view in stuck if view.inside and not view.absent]
    present = [view for view in views if not view.finished]
    if inside:
        return _some_inside(inside, present)
    return _nobody_inside(stuck, present)


def _hang_at_exit(living: list[RankView], finished: list[RankView]) -> Verdict | None:
    still = [view for view in living if view.age > _exit_limit(view) and view.absent != "silent"]
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


def _exit_limit(view: RankView) -> float:
    return max(EXIT_LIMIT_S, view.limit) if view.phase in ("eval", "checkpoint", "init") else EXIT_LIMIT_S


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
            reason = f"{ranks_in_words(_ranks(waiting))} in {name}, which {ranks_in_words(_ranks(entered))} entered too"
            return _unclear(present, age, reason)
        return _missing(waiting, late, name, age)
    if any(view.age <= MOVING_S for view in present):
        return None
    if len({view.inside for view in present}) > 1 and len({counts.place(view) for view in present}) == 1:
        calls = "; ".join(
            f"{ranks_in_words([view.rank for view in present if view.inside == call])}: {call}"
            for call in sorted({view.inside for view in present})
        )
        return Verdict(
            kind="mismatch",
            waiting=_ranks(present),
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
    return _unclear(present, age, reason)


def _nobody_inside(stuck: list[RankView], present: list[RankView]) -> Verdict | None:
    age = max(view.age for view in stuck)
    if len(present) == 1:
        return _alone(stuck, age)
    unable = [view for view in present if view.absent in ("stopped", "gone")]
    if unable:
        return _missing([view for view in stuck if not view.absent], unable, "", age)
    still = [view for view in present if view.absent or view.age > MOVING_S]
    counts = Counts(present)
    lowest = min(counts.place(view) for view in present)
    ahead = [view for view in present if counts.place(view) > lowest]
    if counts.comparable and ahead:
        behind = [view for view in present if counts.place(view) == lowest]
        late = [view for view in behind if view.absent or view.stuck]
        if not late or len(late) < len(behind) or any(view.age <= MOVING_S and not view.absent for view in ahead):
            # Those behind still move or may take their time, or those ahead do not wait at all.
            return _alone(late, age) if late and len(still) == len(late) else None
        top = max(ahead, key=counts.place)
        return _missing(ahead, late, f"{top.last_collective or 'collective'} #{top.collectives}", age)
    silent = [view for view in present if view.absent]
    if silent:
        return _missing([view for view in stuck if not view.absent], silent, "", age)
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
        return _missing(others, early, "", age, sure=False)
    return _unclear(present, age, "no rank is seen to wait for another one")


def _missing(
    waiting: list[RankView], late: list[RankView], name: str, age: float, *, sure: bool = True
) -> Verdict | None:
    if not waiting:
        return _alone(late, age)
    who, others = ranks_in_words(_ranks(late)), ranks_in_words(_ranks(waiting))
    waits = f"{others} {'waits' if len(waiting) == 1 else 'wait'} {duration(age)}"
    places = sorted({view.where() for view in late})
    where = places[0] if len(places) == 1 else "; ".join(f"rank {view.rank}: {view.where()}" for view in late[:4])
    # A rank that is stopped or gone may have entered the collective; it holds the others up all the same.
    if name and not all(view.absent in ("stopped", "gone") for view in late):
        fault = f"{who} {'has' if len(late) == 1 else 'have'} not entered {name}"
    else:
        fault = f"{who}: {where}"
    return Verdict(
        kind="missing",
        waiting=_ranks(waiting),
        hung=_ranks(late),
        sure=sure and not any(view.absent == "silent" for view in late),
        title=f"{fault}; {waits}",
        text=(
            f"{waits}{f' in {name}' if name else ''}, held up by {who}: {where}. "
            f"The stacks of {who} say at which line. A wait like this ends only if {who} goes on."
        ),
        age=age,
        collective=name,
        where={view.rank: view.where() for view in (*late, *waiting)},
    )


def _has_entered(view: RankView, top: RankView, counts: Counts) -> bool:
    """Tell whether a rank's last word was that it had entered the collective that ``top`` waits in."""
    if view.absent in ("stopped", "gone"):
        return False
    if view.absent == "silent" and view.inside:
        return True
    return counts.comparable and counts.place(view) >= counts.place(top)


def _alone(stuck: list[RankView], age: float) -> Verdict | None:
    # A shard that is fetched or a disk that is slow holds up nobody else: data loading may take longer then.
    stuck = [view for view in stuck if view.phase != "data" or view.age > ALONE_DATA_S or view.absent]
    if not stuck:
        return None
    worst = max(stuck, key=lambda view: view.age)
    names = ranks_in_words(_ranks(stuck))
    return Verdict(
        kind="alone",
        waiting=(),
        hung=_ranks(stuck),
        sure=True,
        title=f"{names} made no progress for {duration(age)}, {worst.where()}",
        text=(
            f"{names} made no progress for {duration(age)}, {worst.where()} of step {worst.step}; that phase usually "
            f"allows {duration(worst.limit)} at most. The stacks say at which line."
        ),
        age=age,
        where={view.rank: view.where() for view in stuck},
    )


def _unclear(present: list[RankView], age: float, reason: str) -> Verdict:
    return Verdict(
        kind="unclear",
        waiting=tuple(view.rank for view in present if view.inside),
        hung=(),
        sure=False,
        title=f"no progress for {duration(age)}, cannot tell which rank: {reason}",
        text=f"{ranks_in_words(_ranks(present))} made no progress for {duration(age)}. Cannot tell who is to blame: "
        f"{reason}. Compare the stacks of all ranks.",
        age=age,
        where={view.rank: view.where() for view in present},
    )


def _place(view: RankView) -> tuple[int, int, int]:
    """Where a rank is in the order of an ordinary step."""
    return view.step, view.micro_step, STEP_PHASES.index(view.phase)


def _ranks(views: list[RankView]) -> tuple[int, ...]:
    return tuple(sorted(view.rank for view in views))
