"""Finds what the script did wrong, for verdicts on ranks that wait for each other: facts for a sentence, no text."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .rank_view import RankView
from .verdicts import DifferentCalls, Left, Verdict

CauseKind = Literal["not_on_all_ranks", "unequal_gathers", "left_loop", "sizes", "branch"]
GATHERED = "GatheredParameters"


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rank is in the script."""

    rank: int
    line: str
    """``train.py:41``; empty: unknown."""
    call: str
    """What the script called there, ``save_checkpoint`` or ``step()``, or the collective that it waits for; empty:
    unknown."""
    step: int
    """The step that it is in, or its last finished one."""
    in_step: bool
    elements: int = 0
    """Elements of its tensor, for ``sizes``; 0: unknown."""
    gathers: int = 0
    """Number of times that it has entered ``GatheredParameters``."""
    ended: bool = False
    """Whether its script has ended."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What the script did: ``apart`` are the ranks that did something else than ``others``.

    ``not_on_all_ranks``: a call that every rank has to make. ``unequal_gathers``: ``GatheredParameters``, on some ranks
    more often. ``left_loop``: ``apart`` have left the training loop, or their script has ended. ``sizes``: one
    collective with tensors of different sizes. ``branch``: none of these.
    """

    kind: CauseKind
    apart: tuple[Spot, ...]
    others: tuple[Spot, ...]


def cause_of(verdict: Verdict) -> Cause | None:
    """Return what the script did wrong; None if the verdict is of another kind or no rank's line is known."""
    if verdict.kind not in ("mismatch", "deadlock", "left"):
        return None
    views = [view for view in verdict.views.values() if view.rank in verdict.waiting]
    if isinstance(verdict.facts, Left):
        return _after_the_end(verdict.facts, views)
    spots = {view.rank: _spot(view, verdict) for view in views}
    if len(views) < 2 or not all(spot.line for spot in spots.values()):
        return None
    sizes = isinstance(verdict.facts, DifferentCalls) and len({c.name for c in verdict.facts.calls.values()}) == 1
    left = {view.rank for view in views if any(_has_left(view, other) for other in views)}
    gathers = [spot.gathers for spot in spots.values()]
    single = _apart(views)
    # A loop around the gather itself is not the training's.
    if len(set(gathers)) > 1 and any(spot.call == GATHERED for rank, spot in spots.items() if rank not in left):
        return _cause("unequal_gathers", spots, [rank for rank, one in spots.items() if one.gathers == max(gathers)])
    if left:
        spots |= {rank: replace(spots[rank], step=verdict.views[rank].step - 1, in_step=False) for rank in left}
        return _cause("left_loop", spots, left)
    if single:
        return _cause("not_on_all_ranks", spots, single)
    if sizes:
        return _cause("sizes", spots, verdict.differs)
    return _cause("branch", spots, [view.rank for view in views if not view.place_in_step[1]] or verdict.differs)


def _cause(kind: CauseKind, spots: dict[int, Spot], apart: Iterable[int]) -> Cause:
    named = set(apart)
    first = tuple(spot for rank, spot in spots.items() if rank in named)
    return Cause(kind, first, tuple(spot for rank, spot in spots.items() if rank not in named))


def _after_the_end(facts: Left, views: list[RankView]) -> Cause | None:
    others = tuple(_spot(view) for view in views)
    ended = tuple(Spot(rank, "", "", step, False, ended=True) for rank, step in facts.steps.items())
    found = [view.evidence.place.for_all for view in views if view.evidence is not None]
    if found and all(found) and not any(spot.in_step for spot in others):
        return Cause("not_on_all_ranks", others, ended)
    return Cause("left_loop", ended, others)


def _spot(view: RankView, verdict: Verdict | None = None) -> Spot:
    found, step = view.evidence, view.place_in_step
    place = found.place if found is not None else None
    call = place.call if place is not None else ""
    if place is not None and not place.for_all:
        unfinished = [each.name for each in found.calls.recent if each.done is False] if found is not None else []
        waits_in = "" if step[1] else view.inside or next(iter(unfinished), "")
        call = waits_in or (f"{call}()" if call else "")
    facts = verdict.facts if verdict is not None else None
    calls = facts.calls if isinstance(facts, DifferentCalls) else {}
    return Spot(
        rank=view.rank,
        line=place.line if place is not None else "",
        call=call,
        step=view.step if step[1] else view.step - 1,
        in_step=step[1],
        elements=calls[view.rank].size if view.rank in calls else 0,
        gathers=found.gathers if found is not None else 0,
    )


def _apart(views: list[RankView]) -> list[int]:
    """Return the ranks in a call that all ranks have to make, if others are elsewhere."""
    inside = [view for view in views if view.evidence is not None and view.evidence.place.for_all]
    calls = {view.evidence.place.call for view in inside if view.evidence is not None}
    return [view.rank for view in inside] if len(inside) < len(views) or len(calls) > 1 else []


def _has_left(view: RankView, other: RankView) -> bool:
    """Return whether ``view`` is behind the training loop that ``other`` is in.

    Both stacks are followed from the outermost line of the script to the first line in which they differ. There
    ``other`` is in a loop and ``view`` behind it; or ``other`` is in a step, in a call with a loop inside, such as
    ``train_epoch()`` or the Trainer's ``train()``, and ``view`` at a later line.
    """
    mine, theirs = view.evidence, other.evidence
    if mine is None or theirs is None:
        return False
    own = [frame for frame in reversed(mine.frames) if frame.key in mine.loops]
    their = [frame for frame in reversed(theirs.frames) if frame.key in theirs.loops]
    for depth, (a, b) in enumerate(zip(own, their, strict=False)):
        if (a.file, a.function) != (b.file, b.function):
            return False
        if a.line == b.line:
            continue
        around, within = mine.loops[a.key], theirs.loops[b.key]
        if any(a.line > loop[1] and loop not in around for loop in within):
            return True
        inside = any(theirs.loops[frame.key] for frame in their[depth + 1 :]) or theirs.place.call == "train"
        return a.line > b.line and inside and other.place_in_step[1]
    return False
