"""Turns findings into alerts: renders each as text and puts it into the alert store."""

from collections.abc import Iterable

from ..messages.control import Alert, AlertKind
from . import text
from .findings import Finding, FindingKind
from .findings.alert_store import AlertStore, Key, key_of
from .findings.finding import Matter

ORPHAN_S = 600.0
_STANDING = ("gpu_xid", "checkpoint_failed")
"""Findings that remain valid however long ago they were last reported."""


_OWN: dict[FindingKind, tuple[AlertKind, str]] = {
    "spike": ("spike", "recent"),
    "steady_transient": ("spike", "steady"),
    "state_growth": ("growth", "first-step"),
    "leak": ("leak", "trend"),
    "straggler": ("slow", "own-work"),
    "failure": ("failure", "exception"),
    "ended_early": ("failure", "ended-early"),
    "died": ("died", "process"),
    "launcher_ended": ("died", "launcher"),
    "oom": ("oom", "allocation"),
    "oom_failure": ("oom", "exception"),
    "stopped": ("hang", "stopped"),
    "unreachable": ("note", "unreachable"),
    "telemetry_lost": ("dropped", "lost"),
    "not_recording": ("disk", "recording"),
    "no_step": ("exit", "before_first_step"),
    "messages_refused": ("note", "refused"),
    "not_notified": ("note", "notify"),
    "hub_restarted": ("note", "restarted"),
    "recording_damaged": ("disk", "damaged"),
    "recording_removed": ("disk", "removed"),
    "not_listening": ("note", "listen"),
    "missing_ranks": ("note", "unheard"),
    "unhooked": ("note", "unhooked"),
    "port_taken": ("failure", "port"),
    "job_failed": ("failure", "job"),
    "concurrent_job": ("note", "beside"),
    "leftover_processes": ("note", "leftover"),
    "hang_action": ("note", "on-hang"),
    "unproven_hang": ("note", "on-hang-proof"),
}
"""Kind and rule of the alerts of findings that are not of the kind ``health``. A hang's rule is its verdict; a
finding's key is appended to its rule: ``port 29500``."""
_OF_RULE: dict[tuple[AlertKind, str], FindingKind] = {rule: kind for kind, rule in _OWN.items()}
_COUNTED = ("spike", "failure", "ended_early", "oom", "oom_failure", "hang", "stopped", "telemetry_lost")
"""Findings whose alert's count is incremented each time they are raised."""
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
        if alert.kind == "health" and alert.resolved is None and alert.evidence.get("finding") not in _STANDING:
            self._orphans[key_of(alert)] = 0.0
        elif alert.kind == "health":
            self._orphans.pop(key_of(alert), None)
        kind, rank, phase, rule = key_of(alert)
        own = _OF_RULE.get((kind, rule)) or ("hang" if kind == "hang" else None)
        if own is None:
            return None
        return Finding(
            own,
            text.facts(own, alert),
            "raised" if alert.resolved is None else "resolved",
            alert.severity,
            tuple(alert.ranks),
            step=alert.step,
            rank=rank,
            phase=phase,
            key=rule if own == "hang" else "",
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
            key = _key(finding.matter)
            self._orphans.pop(key, None)
            if finding.state == "resolved":
                alerts += self._store.resolve(now, key, text.over(finding))
                continue
            if finding.state == "added":
                alerts += self._store.annotate(now, key, *text.added(finding))
                continue
            said, evidence = text.words(finding), text.evidence(finding)
            words = " ".join(filter(None, (said.text, said.remedy)))
            kind, rank, phase, rule = key
            title = said.title if kind in _WHOLE else said.title[:240]
            if finding.state == "explained":
                alerts += self._store.update(now, key, title, words, evidence)
                continue
            alerts += self._store.raise_alert(
                now,
                kind,
                finding.severity,
                title,
                rule=rule,
                rank=rank,
                ranks=list(finding.ranks),
                step=finding.step,
                phase=phase,
                text=words,
                evidence=evidence,
                repeat=finding.kind in _COUNTED and finding.state == "raised",
            )
        return alerts


def _key(matter: Matter) -> Key:
    if matter.kind == "hang":
        return "hang", matter.rank, matter.phase, matter.key
    own = _OWN.get(matter.kind)
    if own is not None:
        return own[0], matter.rank, matter.phase, f"{own[1]} {matter.key}" if matter.key else own[1]
    return "health", None, "", f"{matter.kind}:{matter.key}" if matter.key else matter.kind
