"""A finding: a detector's conclusion, as figures. The words of its ``Kind`` turn it into sentences."""

from typing import Any, Literal, NamedTuple

import msgspec

from ...messages.control import Severity

State = Literal["raised", "updated", "explained", "added", "resolved"]
"""``updated``: new figures of an unresolved finding. ``explained``: its explanation became known, resolved or not.
``added``: the facts are an addition to those with which it was raised."""


ResolvedWhy = Literal["calm", "rank_ended", "restarted", "caught", "resumed", "run_ended", "superseded"]


class Condition(NamedTuple):
    """Identity of a condition: all its findings belong to one alert."""

    kind: str
    """Name of its ``Kind``."""
    rank: int | None = None
    phase: str = ""
    key: str = ""


class Resolution(msgspec.Struct, frozen=True):
    """How a finding was resolved; replaces its facts."""

    why: ResolvedWhy
    number: float = 0
    """A step, a number of steps, or seconds; see ``Kind.resolved``."""


class Finding(msgspec.Struct, frozen=True):
    """One conclusion of one detector at one moment."""

    kind: str
    """Name of its ``Kind``."""
    facts: Any
    """The figures that support it: a struct of its detector."""
    state: State = "raised"
    severity: Severity = "warning"
    ranks: tuple[int, ...] = ()
    """The ranks concerned; empty: the whole run, or a host."""
    key: str = ""
    """Distinguishes findings of one kind: a host and a path, a device, a function. Empty: there is only one."""
    step: int | None = None
    rank: int | None = None
    """The rank concerned, if each rank has its own finding."""
    phase: str = ""

    @property
    def condition(self) -> Condition:
        """Identity of its condition."""
        return Condition(self.kind, self.rank, self.phase, self.key)


def added(condition: Condition, facts: Any) -> Finding:
    """Return a finding that adds facts to a condition."""
    return Finding(condition.kind, facts, "added", rank=condition.rank, phase=condition.phase, key=condition.key)


def resolved(condition: Condition, resolution: Resolution) -> Finding:
    """Return a finding that resolves a condition."""
    ranks = () if condition.rank is None else (condition.rank,)
    return Finding(
        condition.kind,
        resolution,
        "resolved",
        ranks=ranks,
        rank=condition.rank,
        phase=condition.phase,
        key=condition.key,
    )
