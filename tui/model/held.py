"""Ranks held at an out-of-memory error: which ones, since when, and which error to show first."""

from ...protocol.text import duration
from .oom import CaseKey, OomCase
from .run import RunModel


def held_since(model: RunModel, case: OomCase) -> float:
    """Return when the rank began to wait at this error, seconds since the epoch; 0 if it does not."""
    rank = model.ranks.get(case.oom.rank)
    latest = model.ooms.of_rank(case.oom.rank)
    if rank is None or not case.oom.held or latest is None or latest.key != case.key:
        return 0.0
    if not rank.alive:
        return 0.0
    if rank.beat is not None and rank.beat.time > case.oom.time:
        return rank.beat.held_since
    if rank.state == "held":
        return rank.state_since or case.oom.time
    return 0.0


def held_cases(model: RunModel) -> list[OomCase]:
    """List the errors at which a rank waits now."""
    return [case for case in model.ooms.ordered() if held_since(model, case)]


def first_to_show(model: RunModel, rank: int | None = None) -> OomCase | None:
    """Return the error to show first: that rank's, else that of a held rank, else the first of the latest group.

    When one rank fails, others often follow within seconds; the first one is the most informative.
    """
    if rank is not None and (found := model.ooms.of_rank(rank)) is not None:
        return found
    if held := held_cases(model):
        return held[0]
    cases = model.ooms.ordered()
    if not cases:
        return None
    last = cases[-1].oom.time
    return next(case for case in cases if case.oom.time >= last - _TOGETHER_S)


_TOGETHER_S = 120.0
"""Errors of several ranks within this many seconds form a group."""


class HeldWatch:
    """Reports each error at which a rank has begun to wait, once."""

    def __init__(self) -> None:
        self._reported: set[CaseKey] = set()

    def fresh(self, model: RunModel) -> OomCase | None:
        """Return an unreported error at which a rank waits; all others then count as reported."""
        cases = [case for case in held_cases(model) if case.key not in self._reported]
        self._reported.update(case.key for case in cases)
        return cases[0] if cases else None


def hold_words(model: RunModel, case: OomCase) -> list[str]:
    """Return text about the hold: until when it lasts, and the state of the other ranks."""
    since, oom = held_since(model, case), case.oom
    if not since:
        return []
    lines = [f"rank {oom.rank} waits in the failing frame, for {duration(max(1, int(model.now - since)))} now"]
    if oom.hold_seconds:
        left = since + oom.hold_seconds - model.now
        lines[0] += f"; it is released by itself in {duration(max(0.0, left))} (--hold-timeout)"
    if oom.others:
        lines.append(oom.others)
    if oom.peer_timeout_s:
        left = oom.time + oom.peer_timeout_s - model.now
        timeout = duration(oom.peer_timeout_s)
        lines.append(
            f"their process group gives up {timeout} after it began to wait, in about {duration(left)}"
            if left > 0
            else f"their process group's timeout ({timeout}) has passed; they may have ended"
        )
    elif not oom.others and model.world_size > 1:
        lines.append("the other ranks wait in their next collective until their process group's timeout ends them")
    return lines
