"""All kinds of findings, and the detectors that need nothing of another one: a new detector is one entry here."""

from collections.abc import Callable
from typing import Any

from . import hub_facts
from .deaths import words as deaths
from .findings import Finding
from .findings.detector import Detector
from .findings.kind import HIDDEN, Kind, Shown
from .health import hub as telemetry
from .health.disks import Disks
from .health.gpus import Gpus
from .health.monitor import HealthMonitor
from .memory import words as memory
from .oom import words as oom
from .stalls import straggler_detector, words
from .text.words import Added, Words

DETECTORS: list[type[Detector]] = [HealthMonitor, Gpus, Disks]
"""Created once a run, in this order."""

KINDS: dict[str, Kind] = {}
"""By name."""

_ADDED: dict[type, Callable[[Any], Added]] = {}
_SHOWN: dict[str, Shown] = dict.fromkeys(("rule", "finding", "kind"), HIDDEN) | {"remedy": Shown("try")}
_TEXT_INSTEAD = {"waiting": Shown("waiting time is")}
"""Keys that have a text in some kinds of finding."""
_SUFFIXES = {"_per_s": "bytes/s", "_bytes": "bytes", "_us": "us", "_ms": "ms", "_seconds": "s", "_s": "s"}


def register(*kinds: Kind) -> None:
    """Add kinds of findings.

    Raises:
        ValueError: a kind of this name exists, or another kind shows a key of its evidence differently.
    """
    for kind in kinds:
        if kind.name in KINDS:
            raise ValueError(f"the kind {kind.name!r} exists")
        for key, how in kind.shown.items():
            if _SHOWN.setdefault(key, how) != how:
                raise ValueError(f"{kind.name}: evidence {key!r} is shown as {_SHOWN[key]} elsewhere")
        KINDS[kind.name] = kind
        _ADDED.update(kind.added)


register(*memory.KINDS, *words.KINDS, *straggler_detector.KINDS, *oom.KINDS, *deaths.KINDS)
register(*telemetry.KINDS, *hub_facts.KINDS)
for _detector in DETECTORS:
    register(*_detector.kinds)


def words_of(finding: Finding) -> Words:
    """Return the text of a finding."""
    return KINDS[finding.kind].words(finding)


def added_of(finding: Finding) -> Added:
    """Return the text of an addition to a finding."""
    return _ADDED[type(finding.facts)](finding.facts)


def resolution_of(finding: Finding) -> str:
    """Return the text of a finding's resolution."""
    return KINDS[finding.kind].resolution_of(finding)


def evidence_of(finding: Finding) -> dict[str, Any]:
    """Return a finding's figures as plain values."""
    return KINDS[finding.kind].evidence_of(finding)


def limits_as_markdown() -> list[str]:
    """Return the lines of the table of thresholds in docs/detectors.md."""
    rows = [f"| `{kind.name}` | {what} | {limit} |" for kind in KINDS.values() for what, limit in kind.limits.items()]
    return ["| finding | threshold | value |", "| --- | --- | --- |", *rows]


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
