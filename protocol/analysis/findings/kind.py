"""The record of one kind of finding: everything that turns it into an alert, and a recorded alert back into it.

Each record stands beside its detector. ``analysis.kinds`` lists all of them; docs/detectors.md shows how to add one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ...messages.control import Alert, AlertKind
from ...text import duration
from ..text.words import Added, Words
from .finding import Finding, Resolution, ResolvedWhy


class Shown(NamedTuple):
    """How a key of the evidence is shown."""

    words: str
    """Empty: the key is not shown, because the alert itself has it or because it is an identifier."""
    unit: str = ""
    """``bytes``, ``bytes/s``, ``us``, ``ms``, ``s``, ``share`` (0..1), ``times``, ``moment`` (seconds since the epoch),
    ``rank`` (the figure is a rank), ``shape`` (sizes of a tensor), or the text that follows the figure."""
    by: str = ""
    """For a mapping: the word before its keys, such as ``rank``; empty: the keys are names, or keys of this table."""


HIDDEN = Shown("")


def plain(finding: Finding) -> dict[str, Any]:
    """Return a finding's facts as plain values."""
    return msgspec.to_builtins(finding.facts)


@dataclass(frozen=True)
class Kind:
    """One kind of finding."""

    name: str
    """Stable: an alert of kind ``health`` has it as ``evidence["finding"]``."""
    facts: type | tuple[type, ...]
    """The struct of its figures."""
    words: Callable[[Finding], Words]
    alert: AlertKind = "health"
    """Kind of its alerts."""
    rule: str = ""
    """``evidence["rule"]`` of its alerts; empty: its name, or its key (see ``rule_of``)."""
    evidence: Callable[[Finding], dict[str, Any]] = plain
    shown: Mapping[str, Shown] = field(default_factory=dict[str, Shown])
    """Words and units of the keys of its evidence that are not words themselves; they hold for all kinds."""
    resolved: Mapping[ResolvedWhy, str] = field(default_factory=dict[ResolvedWhy, str])
    """Sentence for each ``Resolution`` of its detector: ``{0}`` is its number, ``{1}`` the number as a duration."""
    added: Mapping[type, Callable[[Any], Added]] = field(default_factory=dict[type, Callable[[Any], Added]])
    """Texts of facts that its detector adds later, to a finding of this kind or of another one."""
    limits: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its detector's thresholds, by meaning, for the table of docs/detectors.md."""
    restore: Callable[[Alert], Any] | None = None
    """Makes the facts from a recorded alert; None: its detector needs none to continue."""
    counted: bool = False
    """Whether the alert's count is incremented each time it is raised."""
    lasting: bool = False
    """Whether it remains valid however long ago it was last reported."""

    def rule_of(self, key: str) -> str:
        """Return the rule of an alert: with a finding's key, ``port 29500``; a hang's rule is its key."""
        if self.alert == "health":
            return f"{self.name}:{key}" if key else self.name
        return " ".join(filter(None, (self.rule, key)))

    def evidence_of(self, finding: Finding) -> dict[str, Any]:
        """Return the evidence of an alert as plain values."""
        if self.alert != "health":
            return self.evidence(finding)
        return {"finding": self.name, "remedy": self.words(finding).remedy, **self.evidence(finding)}

    def resolution_of(self, finding: Finding) -> str:
        """Return the sentence of a resolved finding."""
        if isinstance(finding.facts, Resolution):
            return self.resolved[finding.facts.why].format(finding.facts.number, duration(finding.facts.number))
        return self.words(finding).resolved

    def facts_of(self, alert: Alert) -> Any:
        """Return the facts of a recorded alert; None if not needed, or if another version recorded other figures."""
        try:
            return self.restore(alert) if self.restore is not None else None
        except msgspec.ValidationError:
            return None


def from_evidence(facts: type) -> Callable[[Alert], Any]:
    """Return a ``restore`` for a kind whose evidence is its facts."""
    return lambda alert: msgspec.convert(alert.evidence, facts)
