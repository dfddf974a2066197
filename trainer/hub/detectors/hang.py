"""Hangs as alerts: the tracker's verdict, once it stands; ranks that are stopped; ranks nobody hears of.

A verdict is raised when it was the same at two looks in a row. While it stands its text is brought up to date every
15 s, and as soon as the ranks have been looked at; when it ends the alert says so. A rank stopped by a signal has an
alert of its own at once: what waits for it is that alert's evidence, not another hang.
"""

from collections.abc import Mapping
from typing import Any

from ....protocol.control import Alert, RankState
from ....protocol.text import duration
from .book import RANKS_LISTED, AlertBook, Key
from .evidence import Evidence
from .verdicts import Verdict
from .view import ranks_in_words

REFRESH_S = 15.0
_UNREACHABLE: Key = ("note", None, "", "unreachable")


class HangDetector:
    """Raises, renews and resolves the alerts of stalls (rules: this module's docstring)."""

    def __init__(self, book: AlertBook) -> None:
        self._book = book
        self._seen: Verdict | None = None
        self._raised: Key | None = None
        self._signature: object = None
        self._raised_at = 0.0
        self._since = 0.0
        self._stopped: dict[int, Key] = {}
        self._held: dict[int, Key] = {}
        """Ranks that are held at an out-of-memory error, with its alert: what waits for one is no hang."""
        self._unreachable: set[int] = set()
        self._found: Mapping[int, Evidence] = {}
        self._launcher = ""
        self._looked = False
        """The alert as it was sent last has what a look at the ranks found."""

    def tick(
        self,
        now: float,
        verdict: Verdict | None,
        run_over: bool = False,
        found: Mapping[int, Evidence] | None = None,
        launcher: str = "",
    ) -> list[Alert]:
        """Compare the present verdict with what was raised; return the alerts to send.

        Args:
            now: seconds since the epoch.
            verdict: the judge's.
            run_over: the run has ended, or is about to.
            found: what a look at the ranks found, by rank.
            launcher: how the run's launcher is, in a word.
        """
        self._found = found or {}
        self._launcher = launcher
        known = self._stopped | self._held
        if verdict is not None and verdict.hung and set(verdict.hung) <= known.keys():
            alerts = self._end(now, run_over)
            self._seen = None
            for rank in verdict.hung:
                waiting = list(verdict.waiting[:RANKS_LISTED])
                alerts += self._book.annotate(now, known[rank], {"waiting": waiting})
            return alerts
        if verdict is None:
            self._seen = None
            return self._end(now, run_over)
        stands = self._seen is not None and self._seen.signature == verdict.signature
        self._seen = verdict
        if not stands:
            return []
        if self._signature != verdict.signature:
            old = self._end(now, run_over, "The evidence now says something else: see the next alert.")
            return old + self._raise(now, verdict)
        looked = bool(self._found) and not self._looked
        return self._raise(now, verdict) if looked or now - self._raised_at >= REFRESH_S else []

    def held(self, rank: int, key: Key | None) -> None:
        """Note that a rank is held at the out-of-memory error of that alert; None: not any more."""
        if key is None:
            self._held.pop(rank, None)
        else:
            self._held[rank] = key

    def state(self, t: float, state: RankState) -> list[Alert]:
        """Take in a rank's new state: stopped and unreachable ones are alerts, until they are not."""
        rank = state.rank
        alerts: list[Alert] = []
        if state.state == "stopped":
            self._stopped[rank] = ("hang", rank, "", "stopped")
            alerts += self._book.raise_alert(
                t,
                "hang",
                "error",
                f"rank {rank} is {state.text.split(';')[0]}",
                rule="stopped",
                rank=rank,
                text=(
                    f"Its process exists and does not run; the other ranks will wait for it. 'kill -CONT {state.pid}' "
                    "lets it go on, a kill from here ends it."
                ),
                evidence={"pid": state.pid, "process_state": "T"},
            )
        elif rank in self._stopped:
            text = "Its process is gone." if state.state == "gone" else "It runs again."
            alerts += self._book.resolve(t, self._stopped.pop(rank), text)
        if state.state == "unreachable":
            self._unreachable.add(rank)
            alerts += self._tell_unreachable(t, state.text)
        elif rank in self._unreachable:
            self._unreachable.discard(rank)
            if self._unreachable:
                alerts += self._tell_unreachable(t, "")
            else:
                alerts += self._book.resolve(t, _UNREACHABLE, "Heard of again, or ended.")
        return alerts

    def restore(self, alert: Alert) -> None:
        """Take in a standing alert of the recording, so that it can end."""
        if alert.resolved is not None:
            return
        rule = str(alert.evidence.get("rule", ""))
        if rule == "stopped" and alert.rank is not None:
            self._stopped[alert.rank] = ("hang", alert.rank, "", rule)
        elif rule == "unreachable":
            self._unreachable.update(alert.ranks)
        elif alert.kind == "hang":
            self._raised = ("hang", alert.rank, alert.phase, rule)
            self._since = float(alert.evidence.get("since", alert.time))
            self._signature = None

    def _raise(self, now: float, verdict: Verdict) -> list[Alert]:
        rank = verdict.hung[0] if len(verdict.hung) == 1 else None
        key: Key = ("hang", rank, "", verdict.kind)
        self._raised_at = now
        if self._raised != key:
            self._since = now - verdict.age
        renewed = self._raised == key
        self._looked = bool(self._found)
        self._raised, self._signature = key, verdict.signature
        return self._book.raise_alert(
            now,
            "hang",
            "error" if verdict.sure else "warning",
            verdict.title,
            rule=verdict.kind,
            rank=rank,
            ranks=list((verdict.hung or verdict.waiting)[:RANKS_LISTED]),
            text=verdict.text,
            evidence=_evidence(verdict, self._since, self._found)
            | ({"launcher": self._launcher} if self._launcher else {}),
            repeat=not renewed,
        )

    def _end(self, now: float, run_over: bool, text: str = "") -> list[Alert]:
        key, self._raised, self._signature = self._raised, None, None
        if key is None:
            return []
        lasted = duration(max(0.0, now - self._since))
        text = text or (f"It ended with the run, after {lasted}." if run_over else f"It resolved after {lasted}.")
        return self._book.resolve(now, key, text)

    def _tell_unreachable(self, t: float, why: str) -> list[Alert]:
        ranks = sorted(self._unreachable)
        return self._book.raise_alert(
            t,
            "note",
            "warning",
            f"{ranks_in_words(ranks)} unreachable{f': {why}' if why else ''}",
            rule="unreachable",
            ranks=ranks,
            text=(
                "Nothing is heard of the probe there. That alone says nothing about the training: native code may hold "
                "Python's lock, or the way to that host may be cut."
            ),
            evidence={"ranks": ranks[:RANKS_LISTED]},
            repeat=False,
        )


def _evidence(verdict: Verdict, since: float, found: Mapping[int, Evidence]) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        "sure": verdict.sure,
        "since": since,
        "age_s": round(verdict.age, 1),
        "collective": verdict.collective,
        "hung": list(verdict.hung[:RANKS_LISTED]),
        "waiting": list(verdict.waiting[:RANKS_LISTED]),
        "where": {str(rank): words for rank, words in list(verdict.where.items())[:RANKS_LISTED]},
    }
    if verdict.differs:
        evidence["differs"] = list(verdict.differs[:RANKS_LISTED])
    first = [rank for rank in (*verdict.hung, *verdict.differs, *verdict.waiting) if rank in found]
    listed = list(dict.fromkeys([*first, *sorted(found)]))[:RANKS_LISTED]
    if listed:
        evidence["ranks"] = {str(rank): found[rank].plain() for rank in listed}
        evidence["groups"] = grouped(found)
    return evidence


def grouped(found: Mapping[int, Evidence]) -> list[str]:
    """Say where all ranks are, those with the same stack in one line, the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(found):
        groups.setdefault(found[rank].place.text or "no stack", []).append(rank)
    return [f"{ranks_in_words(ranks)}: {text}" for text, ranks in sorted(groups.items(), key=lambda one: -len(one[1]))]
