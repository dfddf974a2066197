"""A finding: a detector's conclusion, as figures. The words of its ``Kind`` turn it into sentences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from ...messages.control import Alert, AlertKind, Severity
from ...text import duration
from ..words import Added, Words

State = Literal["raised", "updated", "explained", "added", "resolved"]
"""``updated``: new figures of an unresolved finding. ``explained``: its explanation became known, resolved or not.
``added``: the facts are an addition to those with which it was raised."""


ResolvedWhy = Literal["calm", "rank_ended", "restarted", "caught", "resumed", "run_ended", "superseded"]


class Condition(NamedTuple):
    """Identity of a condition: all its findings belong to one alert."""

    kind: str  # name of its `Kind`
    rank: int | None = None
    phase: str = ""
    key: str = ""


class Resolution(msgspec.Struct, frozen=True):
    """How a finding was resolved; replaces its facts."""

    why: ResolvedWhy
    number: float = 0  # a step, a number of steps, or seconds; see `Kind.resolved`


class Finding(msgspec.Struct, frozen=True):
    """One conclusion of one detector at one moment."""

    kind: str  # name of its `Kind`
    facts: Any  # the figures that support it: a struct of its detector
    state: State = "raised"
    severity: Severity = "warning"
    ranks: tuple[int, ...] = ()  # the ranks concerned; empty: the whole run, or a host
    key: str = ""  # distinguishes findings of one kind: a host and a path, a device, a function. Empty: only one
    step: int | None = None
    rank: int | None = None  # the rank concerned, if each rank has its own finding
    phase: str = ""

    @property
    def condition(self) -> Condition:
        return Condition(self.kind, self.rank, self.phase, self.key)

    def over(self) -> "Finding":
        """Return it as resolved; its words have the text of the resolution."""
        return msgspec.structs.replace(self, state="resolved")


def added(condition: Condition, facts: Any) -> Finding:
    """Return a finding that adds facts to a condition."""
    return Finding(condition.kind, facts, "added", rank=condition.rank, phase=condition.phase, key=condition.key)


def resolved(condition: Condition, resolution: Resolution) -> Finding:
    """Return a finding that resolves a condition."""
    kind, rank, phase, key = condition
    return Finding(kind, resolution, "resolved", ranks=() if rank is None else (rank,), rank=rank, phase=phase, key=key)


class Shown(NamedTuple):
    """How a key of the evidence is shown."""

    words: str  # empty: the key is not shown, because the alert itself has it or because it is an identifier
    unit: str = ""
    """``bytes``, ``bytes/s``, ``us``, ``ms``, ``s``, ``share`` (0..1), ``times``, ``moment`` (seconds since the epoch),
    ``rank`` (the figure is a rank), ``shape`` (sizes of a tensor), or the text that follows the figure."""
    by: str = ""  # of a mapping: the word before its keys, such as `rank`; empty: they are names, or keys of this table


HIDDEN = Shown("")


def plain(finding: Finding) -> dict[str, Any]:
    """Return a finding's facts as plain values."""
    return msgspec.to_builtins(finding.facts)


def only(*names: str) -> Callable[[Finding], dict[str, Any]]:
    """Return an ``evidence`` for a kind whose evidence is some fields of its facts."""
    return lambda finding: {name: msgspec.to_builtins(getattr(finding.facts, name)) for name in names}


@dataclass(frozen=True)
class Kind:
    """One kind of finding: all that turns it into an alert, and a recorded alert back into it.

    Each record stands beside its detector; docs/detectors.md shows how to add one.
    """

    name: str  # stable: an alert of kind `health` has it as `evidence["finding"]`
    facts: type | tuple[type, ...]  # the struct of its figures
    words: Callable[[Any, Finding], Words]
    alert: AlertKind = "health"  # kind of its alerts
    rule: str = ""  # `evidence["rule"]` of its alerts; empty: its name, or its key (see `rule_of`)
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
    counted: bool = False  # whether the alert's count is incremented each time it is raised
    lasting: bool = False  # whether it remains valid however long ago it was last reported

    def rule_of(self, key: str) -> str:
        """Return the rule of an alert: with a finding's key, ``port 29500``; a hang's rule is its key."""
        if self.alert == "health":
            return f"{self.name}:{key}" if key else self.name
        return " ".join(filter(None, (self.rule, key)))

    def evidence_of(self, finding: Finding) -> dict[str, Any]:
        """Return the evidence of an alert as plain values; ``remedy`` is in it if there is one."""
        remedy = self.words(finding.facts, finding).remedy
        if self.alert != "health":
            return {"remedy": remedy, **self.evidence(finding)} if remedy else self.evidence(finding)
        return {"finding": self.name, "remedy": remedy, **self.evidence(finding)}

    def resolution_of(self, finding: Finding) -> str:
        """Return the sentence of a resolved finding."""
        if isinstance(finding.facts, Resolution):
            return self.resolved[finding.facts.why].format(finding.facts.number, duration(finding.facts.number))
        return self.words(finding.facts, finding).resolved

    def facts_of(self, alert: Alert) -> Any:
        """Return the facts of a recorded alert; None if not needed, or if another version recorded other figures."""
        try:
            return self.restore(alert) if self.restore is not None else None
        except msgspec.ValidationError:
            return None


def from_evidence(facts: type) -> Callable[[Alert], Any]:
    """Return a ``restore`` for a kind whose evidence is its facts."""
    return lambda alert: msgspec.convert(alert.evidence, facts)


Handler = Callable[[Any], Sequence[Finding] | None]  # processes one message; returns the findings, if any


class Detector:
    """Finds conditions in the messages of a run. Pure: times come with messages and ticks. One instance a run."""

    kinds: ClassVar[tuple[Kind, ...]] = ()  # the kinds of its findings
    replays: ClassVar[tuple[type, ...]] = ()
    """Types of messages that it also receives from the recording after a restart of the hub, to rebuild its state."""

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method for each type of message that it processes."""
        return {}

    def tick(self, now: float) -> Sequence[Finding]:
        """Process elapsed time, twice a second; ``now`` is in seconds since the epoch."""
        del now
        return ()

    def rank_ended(self, rank: int) -> Sequence[Finding]:
        """Process the end of a rank's process."""
        del rank
        return ()
