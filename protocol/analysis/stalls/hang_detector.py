"""Finds hangs: a verdict of the tracker that persists, stopped ranks, unreachable ranks.

A verdict is raised if it is the same at two consecutive checks. While it lasts, its text is updated every 15 s and once
the ranks have been inspected; when it ends, the alert is resolved. A rank stopped by a signal raises a separate alert
at once: ranks that wait for it are evidence of that alert, not another hang.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ...messages.control import RankState
from ..findings import Finding
from ..findings.alert_store import RANKS_LISTED
from ..findings.finding import Condition, Resolution, ResolvedWhy, added, resolved
from .evidence import Evidence
from .verdicts import Verdict

REFRESH_S = 15.0


@dataclass(frozen=True, slots=True)
class Since:
    """Facts of a hang that an earlier hub recorded."""

    since: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class HangFacts(Since):
    """A persisting verdict."""

    verdict: Verdict
    found: Mapping[int, Evidence]
    """Evidence from the inspection of the ranks, by rank."""
    launcher: str
    """State of the run's launcher, one word."""


class StoppedFacts(msgspec.Struct, frozen=True):
    """A rank that is stopped."""

    pid: int
    traced: bool
    """Whether a debugger stopped it."""


class UnreachableFacts(msgspec.Struct, frozen=True):
    """Ranks that are unreachable."""

    state: str
    """State of the latest rank; empty: only earlier ones are left."""


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
        """Compare the current verdict with the raised one; return new findings.

        Args:
            run_over: whether the run has ended, or is about to.
        """
        self._found = found or {}
        self._launcher = launcher
        known = self._stopped | self._held
        why: ResolvedWhy = "run_ended" if run_over else "resumed"
        if verdict is not None and verdict.hung and set(verdict.hung) <= known.keys():
            self._seen = None
            waited_for = [added(known[rank], WaitingRanks(verdict.waiting)) for rank in verdict.hung]
            return self._end(now, why) + waited_for
        if verdict is None:
            self._seen = None
            return self._end(now, why)
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
        if condition is None:
            self._held.pop(rank, None)
        else:
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
