"""Decides whether a verdict on a stall is sufficient proof to end the run: that no progress is possible.

An alert needs only suspicion. Ending a run needs both: other ranks are blocked in a collective that the named ranks
must enter (or that cannot match), and the named ranks' process trees have been idle for their phase's time limit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .patience import action_patience

_STRUCTURAL = ("mismatch", "deadlock", "ahead", "lock", "left")
"""Verdicts that prove by themselves that the collectives concerned cannot complete."""


class RankFacts(NamedTuple):
    """Facts of one rank."""

    patience: float
    """Time limit of its phase while it computes, seconds."""
    quiet: float | None = None
    """Seconds for which its process tree is known to have been idle; None: unknown."""
    gone: bool = False
    """Whether its process is gone."""
    may_resume: bool = False
    """Whether it waits for an answer from the network, or sleeps for a set time, as until a server's Retry-After."""
    blocked: bool = False
    """Whether it waits in a collective or for its device."""


def unproven(kind: str, sure: bool, waiting: Sequence[int], hung: Sequence[int], ranks: Mapping[int, RankFacts]) -> str:
    """Return what proof is missing to end the run for a verdict that has stood for ``--hang-grace``; empty: none."""
    if kind in _STRUCTURAL:
        return "" if sure else "other threads of the script, or NCCL's own counters, may say otherwise"
    if kind == "unreachable":
        return "the host is cut off"
    if kind == "missing" and not sure:
        return "it is not certain that the others wait for it"
    if kind == "missing":
        return _first(_still(rank, ranks, awaited=bool(waiting)) for rank in hung)
    if kind == "exit":
        return _first(_still(rank, ranks, awaited=True) for rank in (*hung, *waiting))
    if kind == "unclear" and not all(facts.blocked for facts in ranks.values()):
        return "some rank is in no collective"
    return _first(_still(rank, ranks, awaited=False) for rank in (hung or tuple(ranks)))


def _first(reasons: Iterable[str]) -> str:
    return next((reason for reason in reasons if reason), "")


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
