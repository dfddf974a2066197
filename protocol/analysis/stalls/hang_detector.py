"""Finds hangs: a verdict of the tracker that persists, stopped ranks, unreachable ranks.

A verdict is raised if it is the same at two consecutive checks. While it lasts, its text is updated every 15 s and once
the ranks have been inspected; when it ends, the alert is resolved. A rank stopped by a signal raises a separate alert
at once: ranks that wait for it are evidence of that alert, not another hang.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ...messages.control import RankState
from ..findings.alerts import RANKS_LISTED
from ..findings.finding import Condition, Finding, Resolution, ResolvedWhy, added, resolved
from .collectives import Difference, RankView
from .evidence import NOWHERE, Evidence
from .judge import Left, Verdict

REFRESH_S = 15.0


@dataclass(frozen=True, slots=True)
class Since:
    """Facts of a hang that an earlier hub recorded."""

    since: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class HangFacts(Since):
    """A persisting verdict."""

    verdict: Verdict
    found: Mapping[int, Evidence]  # evidence from the inspection of the ranks, by rank
    launcher: str


class StoppedFacts(msgspec.Struct, frozen=True):
    """A rank that is stopped."""

    pid: int
    traced: bool


class UnreachableFacts(msgspec.Struct, frozen=True):
    """Ranks that are unreachable."""

    state: str  # state of the latest rank; empty: only earlier ones are left


class WaitingRanks(msgspec.Struct, frozen=True):
    """Added later: the ranks that wait for a stopped or held rank."""

    waiting: tuple[int, ...]


class HangDetector:
    """Finds, renews and resolves stalls (rules: this module's docstring)."""

    def __init__(self) -> None:
        self._seen: Verdict | None = None
        self._raised: Condition | None = None
        self._signature: object = None
        self._raised_at = 0.0
        self._since = 0.0
        self._stopped: dict[int, Condition] = {}
        self._held: dict[int, Condition] = {}
        """Ranks held at an out-of-memory error, with its finding: waiting for them is not a hang."""
        self._unreachable: set[int] = set()
        self._found: Mapping[int, Evidence] = {}
        self._launcher = ""
        self._located: set[int] | None = None
        """The hung ranks whose stacks the finding returned last includes; None: the ranks had not been inspected."""

    def tick(
        self,
        now: float,
        verdict: Verdict | None,
        run_over: bool = False,
        found: Mapping[int, Evidence] | None = None,
        launcher: str = "",
    ) -> list[Finding]:
        """Compare the current verdict with the raised one; return new findings."""
        self._found = found or {}
        self._launcher = launcher
        known = self._stopped | self._held
        why: ResolvedWhy = "run_ended" if run_over else "resumed"
        if verdict is None or (verdict.hung and set(verdict.hung) <= known.keys()):
            self._seen = None
            hung, waiting = (verdict.hung, verdict.waiting) if verdict is not None else ((), ())
            return self._end(now, why) + [added(known[rank], WaitingRanks(waiting)) for rank in hung]
        stands = self._seen is not None and self._seen.signature == verdict.signature
        self._seen = verdict
        if not stands:
            return []
        if self._signature != verdict.signature:
            return [*self._end(now, "superseded"), self._raise(now, verdict)]
        located = self._with_stacks(verdict)
        more = located is not None and (self._located is None or bool(located - self._located))
        return [self._raise(now, verdict)] if more or now - self._raised_at >= REFRESH_S else []

    def held(self, rank: int, condition: Condition | None) -> None:
        """Record that a rank is held at that out-of-memory error; None: it was released."""
        self._held.pop(rank, None)
        if condition is not None:
            self._held[rank] = condition

    def state(self, state: RankState, traced: bool = False) -> list[Finding]:
        """Process a rank's new state; stopped and unreachable ranks are findings."""
        rank = state.rank
        findings: list[Finding] = []
        if state.state == "stopped":
            facts = StoppedFacts(state.pid, traced)
            findings.append(Finding("stopped", facts, severity="error", ranks=(rank,), rank=rank))
            self._stopped[rank] = findings[0].condition
        elif rank in self._stopped:
            why: ResolvedWhy = "rank_ended" if state.state == "gone" else "resumed"
            findings.append(resolved(self._stopped.pop(rank), Resolution(why)))
        if state.state == "unreachable":
            self._unreachable.add(rank)
            findings.append(self._finding(state.text))
        elif rank in self._unreachable:
            self._unreachable.discard(rank)
            findings.append(
                self._finding("") if self._unreachable else resolved(Condition("unreachable"), Resolution("resumed"))
            )
        return findings

    def restore(self, finding: Finding) -> None:
        """Restore a finding from the recording, so that it can end."""
        if finding.state == "resolved":
            return
        if finding.kind == "stopped" and finding.rank is not None:
            self._stopped[finding.rank] = finding.condition
        elif finding.kind == "unreachable":
            self._unreachable.update(finding.ranks)
        elif finding.kind == "hang":
            self._raised, self._since, self._signature = finding.condition, finding.facts.since, None

    def _raise(self, now: float, verdict: Verdict) -> Finding:
        rank = verdict.hung[0] if len(verdict.hung) == 1 else None
        condition = Condition("hang", rank, key=verdict.kind)
        self._raised_at = now
        renewed = self._raised == condition
        if not renewed:
            self._since = now - verdict.age
        self._located = self._with_stacks(verdict)
        self._raised, self._signature = condition, verdict.signature
        return Finding(
            "hang",
            HangFacts(self._since, verdict, self._found, self._launcher),
            "updated" if renewed else "raised",
            "error" if verdict.sure else "warning",
            (verdict.hung or verdict.waiting)[:RANKS_LISTED],
            verdict.kind,
            rank=rank,
        )

    def _with_stacks(self, verdict: Verdict) -> set[int] | None:
        if not self._found:
            return None
        return {rank for rank in verdict.hung if rank in self._found and self._found[rank].frames}

    def _end(self, now: float, why: ResolvedWhy) -> list[Finding]:
        condition, self._raised, self._signature = self._raised, None, None
        return [resolved(condition, Resolution(why, max(0.0, now - self._since)))] if condition is not None else []

    def _finding(self, state: str) -> Finding:
        return Finding("unreachable", UnreachableFacts(state), ranks=tuple(sorted(self._unreachable)))


CauseKind = Literal["not_on_all_ranks", "unequal_gathers", "left_loop", "sizes", "branch"]
GATHERED = "GatheredParameters"


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rank is in the script."""

    rank: int
    line: str  # `train.py:41`; empty: unknown
    call: str
    """What the script called there, ``save_checkpoint`` or ``step()``, or the collective that it waits for; empty:
    unknown."""
    step: int  # the step that it is in, or its last finished one
    in_step: bool
    elements: int = 0  # elements of its tensor, for `sizes`; 0: unknown
    gathers: int = 0
    ended: bool = False


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
    left = {view.rank for view in views if any(_has_left(view, other) for other in views)}
    gathers = [spot.gathers for spot in spots.values()]
    # A loop around the gather itself is not the training's.
    if len(set(gathers)) > 1 and any(spot.call == GATHERED for rank, spot in spots.items() if rank not in left):
        return _cause("unequal_gathers", spots, [rank for rank, one in spots.items() if one.gathers == max(gathers)])
    if left:
        spots |= {rank: replace(spots[rank], step=verdict.views[rank].step - 1, in_step=False) for rank in left}
        return _cause("left_loop", spots, left)
    if single := _apart(views):
        return _cause("not_on_all_ranks", spots, single)
    if isinstance(verdict.facts, Difference) and verdict.facts.shapes:
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
    place = found.place if found is not None else NOWHERE
    call = place.call
    if found is not None and not place.for_all:
        unfinished = (each.name for each in found.calls.recent if each.done is False)
        waits_in = "" if step[1] else view.inside or next(unfinished, "")
        call = waits_in or (f"{call}()" if call else "")
    facts = verdict.facts if verdict is not None else None
    calls = facts.calls if isinstance(facts, Difference) else {}
    elements = calls[view.rank].size if view.rank in calls else 0
    gathers = found.gathers if found is not None else 0
    return Spot(view.rank, place.line, call, view.step if step[1] else view.step - 1, step[1], elements, gathers)


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
