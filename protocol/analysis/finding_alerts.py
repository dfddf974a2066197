"""Turns findings into alerts: renders each as text and puts it into the alert store."""

from collections.abc import Iterable

from ..messages.control import Alert
from . import kinds
from .findings import Finding
from .findings.alert_store import AlertStore, Key, key_of
from .findings.finding import Condition
from .kinds import KINDS

ORPHAN_S = 600.0
_WHOLE = ("failure", "died", "oom", "hang", "note", "dropped", "exit")
"""Kinds of alert whose titles are not truncated, because their parts are short."""


class FindingAlerts:
    """Raises, updates and resolves alerts. For kind ``health``, ``evidence["finding"]`` is the finding's kind."""

    def __init__(self, store: AlertStore) -> None:
        self._store = store
        self._orphans: dict[Key, float] = {}
        """Active alerts of an earlier hub that were not raised again, with the time since when."""

    def restore(self, alert: Alert) -> Finding | None:
        """Process an alert of the recording; return its finding, or None if it has none.

        An alert of kind ``health`` that is not raised again is resolved after ``ORPHAN_S``.
        """
        if alert.kind == "health":
            kind = KINDS.get(str(alert.evidence.get("finding")))
            if alert.resolved is None and (kind is None or not kind.lasting):
                self._orphans[key_of(alert)] = 0.0
            else:
                self._orphans.pop(key_of(alert), None)
            return None
        _, rank, phase, rule = key_of(alert)
        kind = next((kind for kind in KINDS.values() if (kind.alert, kind.rule) == (alert.kind, rule)), None)
        key = "" if kind is not None else rule
        if kind is None and alert.kind == "hang":
            kind = KINDS["hang"]
        if kind is None:
            return None
        return Finding(
            kind.name,
            kind.facts_of(alert),
            "raised" if alert.resolved is None else "resolved",
            alert.severity,
            tuple(alert.ranks),
            step=alert.step,
            rank=rank,
            phase=phase,
            key=key,
        )

    def tick(self, now: float) -> list[Alert]:
        """Resolve alerts of an earlier hub that were not raised again."""
        alerts: list[Alert] = []
        for key, since in list(self._orphans.items()):
            if not since:
                self._orphans[key] = now
            elif now - since > ORPHAN_S:
                del self._orphans[key]
                alerts += self._store.resolve(now, key, "Not seen again since the hub was restarted.")
        return alerts

    def put(self, now: float, findings: Iterable[Finding]) -> list[Alert]:
        """Return the alerts to send now for findings; ``now`` is seconds since the epoch."""
        alerts: list[Alert] = []
        for finding in findings:
            key = _key(finding.condition)
            self._orphans.pop(key, None)
            if finding.state == "resolved":
                alerts += self._store.resolve(now, key, kinds.resolution_of(finding))
            elif finding.state == "added":
                alerts += self._store.annotate(now, key, *kinds.added_of(finding))
            else:
                alerts += self._raise(now, key, finding)
        return alerts

    def _raise(self, now: float, key: Key, finding: Finding) -> list[Alert]:
        words, evidence = kinds.words_of(finding), kinds.evidence_of(finding)
        text = " ".join(filter(None, (words.text, words.remedy)))
        kind, rank, phase, rule = key
        title = words.title if kind in _WHOLE else words.title[:240]
        if finding.state == "explained":
            return self._store.update(now, key, title, text, evidence)
        return self._store.raise_alert(
            now,
            kind,
            finding.severity,
            title,
            rule=rule,
            rank=rank,
            ranks=list(finding.ranks),
            step=finding.step,
            phase=phase,
            text=text,
            evidence=evidence,
            repeat=KINDS[finding.kind].counted and finding.state == "raised",
        )


def _key(condition: Condition) -> Key:
    kind = KINDS[condition.kind]
    if kind.alert == "health":
        return "health", None, "", kind.rule_of(condition.key)
    return kind.alert, condition.rank, condition.phase, kind.rule_of(condition.key)
