"""All kinds of findings, and the detectors that need nothing of another one: a new detector is one entry here.

Findings become alerts with the words of their kinds.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ..messages.control import Alert
from . import hub_facts
from .deaths import words as deaths
from .deaths.stop_waits import StopWaits
from .findings.alerts import AlertStore, Key, key_of
from .findings.finding import HIDDEN, Condition, Detector, Finding, Kind, Shown
from .health import monitor
from .health.host_memory import HostMemory
from .health.machine import Disks, Gpus
from .learning.inputs import Copies, Inputs, Repeats, Resumes, Shifts
from .learning.known import KnownFaults
from .learning.updates import Updates
from .memory import words as memory
from .oom import words as oom
from .stalls import slow_ranks, words
from .words import Added, Words

DETECTORS: list[type[Detector]] = [
    *(monitor.HealthMonitor, Gpus, Disks, HostMemory),
    *(Inputs, Resumes, Copies, Repeats, Shifts, Updates, KnownFaults, StopWaits),
]
"""Created once a run, in this order."""

KINDS: dict[str, Kind] = {}  # by name

_ADDED: dict[type, Callable[[Any], Added]] = {}
_SHOWN: dict[str, Shown] = dict.fromkeys(("rule", "finding", "kind"), HIDDEN) | {"remedy": Shown("try")}
_TEXT_INSTEAD = {"waiting": Shown("waiting time is")}  # keys that have a text in some kinds of finding
ORPHAN_S = 600.0
_WHOLE = ("failure", "died", "oom", "hang", "note", "dropped", "exit")
"""Kinds of alert whose titles are not truncated, because their parts are short."""
_SUFFIXES = {"_per_s": "bytes/s", "_bytes": "bytes", "_us": "us", "_ms": "ms", "_seconds": "s", "_s": "s"}


def register(*kinds: Kind) -> None:
    """Add kinds of findings.

    Raises ``ValueError`` if a kind of this name exists, or another kind shows a key of its evidence differently.
    """
    for kind in kinds:
        if kind.name in KINDS:
            raise ValueError(f"the kind {kind.name!r} exists")
        for key, how in kind.shown.items():
            if _SHOWN.setdefault(key, how) != how:
                raise ValueError(f"{kind.name}: evidence {key!r} is shown as {_SHOWN[key]} elsewhere")
        KINDS[kind.name] = kind
        _ADDED.update(kind.added)


register(*memory.KINDS, *words.KINDS, *slow_ranks.KINDS, *oom.KINDS, *deaths.KINDS)
register(*monitor.KINDS, *hub_facts.KINDS)
for _detector in DETECTORS:
    register(*_detector.kinds)


def words_of(finding: Finding) -> Words:
    """Return the text of a finding."""
    return KINDS[finding.kind].words(finding.facts, finding)


def added_of(finding: Finding) -> Added:
    """Return the text of an addition to a finding."""
    return _ADDED[type(finding.facts)](finding.facts)


def resolution_of(finding: Finding) -> str:
    """Return the text of a finding's resolution."""
    return KINDS[finding.kind].resolution_of(finding)


def evidence_of(finding: Finding) -> dict[str, Any]:
    """Return a finding's figures as plain values."""
    return KINDS[finding.kind].evidence_of(finding)


def shown(key: str, value: object = None) -> Shown:
    """Return how a key of the evidence with this value is shown.

    A key without an entry, or of another version, is shown by its own words and the unit of its suffix.
    """
    if isinstance(value, str) and key in _TEXT_INSTEAD:
        return _TEXT_INSTEAD[key]
    if key in _SHOWN:
        return _SHOWN[key]
    for suffix, unit in _SUFFIXES.items():
        if key.endswith(suffix):
            return Shown(key.removesuffix(suffix).replace("_", " "), unit)
    return Shown(key.replace("_", " "))


class FindingAlerts:
    """Raises, updates and resolves alerts. For kind ``health``, ``evidence["finding"]`` is the finding's kind."""

    def __init__(self, store: AlertStore) -> None:
        self._store = store
        self._orphans: dict[Key, float] = {}  # active alerts of an earlier hub, not raised again, and since when

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
        state = "raised" if alert.resolved is None else "resolved"
        facts, ranks = kind.facts_of(alert), tuple(alert.ranks)
        return Finding(kind.name, facts, state, alert.severity, ranks, key, alert.step, rank, phase)

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
                alerts += self._store.resolve(now, key, resolution_of(finding))
            elif finding.state == "added":
                alerts += self._store.annotate(now, key, *added_of(finding))
            else:
                alerts += self._raise(now, key, finding)
        return alerts

    def _raise(self, now: float, key: Key, finding: Finding) -> list[Alert]:
        words, evidence = words_of(finding), evidence_of(finding)
        text = " ".join(filter(None, (words.text, words.remedy)))
        title = words.title if key[0] in _WHOLE else words.title[:240]
        if finding.state == "explained":
            return self._store.update(now, key, title, text, evidence)
        repeat = KINDS[finding.kind].counted and finding.state == "raised"
        return self._store.raise_alert(
            now, key, finding.severity, title, text, evidence, finding.ranks, finding.step, repeat=repeat
        )


def _key(condition: Condition) -> Key:
    kind = KINDS[condition.kind]
    if kind.alert == "health":
        return "health", None, "", kind.rule_of(condition.key)
    return kind.alert, condition.rank, condition.phase, kind.rule_of(condition.key)
