"""Counts of encoded records: refused, dropped, cut, without labels."""

import re
from collections import Counter
from typing import Any

import msgspec

from ....protocol.errors import ConfigError

SHOWN = 20
"""Records listed of each kind; all are counted."""


class Listed(msgspec.Struct):
    """Records of one kind: all are counted, the first are listed."""

    count: int = 0
    first: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])
    """Place and reason of the first records."""

    def add(self, place: str, reason: str) -> None:
        """Count a record."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append((place, reason))

    def merge(self, other: "Listed") -> None:
        """Add the records of a later part of the data."""
        self.count += other.count
        self.first = (self.first + other.first)[:SHOWN]


class Report(msgspec.Struct):
    """Counts over all records."""

    read: int = 0
    refused: Listed = msgspec.field(default_factory=Listed)
    reasons: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Number of refused records by reason, without the numbers in it."""
    dropped: Listed = msgspec.field(default_factory=Listed)
    """Records longer than the sequence length, with ``truncation: drop``."""
    cut: Listed = msgspec.field(default_factory=Listed)
    split: Listed = msgspec.field(default_factory=Listed)
    unlabelled: Listed = msgspec.field(default_factory=Listed)
    """Records without a token that carries loss: it was cut away, or there is none."""
    unended: Listed = msgspec.field(default_factory=Listed)
    """Records with a turn that is learned without its end."""
    reasoning_lost: Listed = msgspec.field(default_factory=Listed)
    merged: Listed = msgspec.field(default_factory=Listed)
    """Records with a turn whose first token includes the end of its header."""

    def refuse(self, place: str, reason: str) -> None:
        """Count a refused record."""
        self.refused.add(place, reason)
        general = re.sub("[0-9]+", "N", reason)
        self.reasons[general] = self.reasons.get(general, 0) + 1

    def merge(self, other: "Report") -> None:
        """Add the report of a later part of the data."""
        self.read += other.read
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        for name in ("refused", "dropped", "cut", "split", "unlabelled", "unended", "reasoning_lost", "merged"):
            mine: Any = getattr(self, name)
            mine.merge(getattr(other, name))

    def exceeds(self, most_refused: float) -> bool:
        """Return whether a larger share of the records than this was refused."""
        return self.refused.count > most_refused * self.read

    def check(self, most_refused: float) -> None:
        """Refuse a data set with too many refused records.

        Raises:
            ConfigError: a larger share than ``most_refused`` of the records was refused.
        """
        if self.exceeds(most_refused):
            shown = "; ".join(f"{place}: {reason}" for place, reason in self.refused.first[:3])
            raise ConfigError(
                f"data: {self.refused.count:,} of {self.read:,} records are refused, more than data.max_refused "
                f"({most_refused:g} of them) allows: {shown}{'; ...' if self.refused.count > 3 else ''}; "
                "'ftmon data check' lists more"
            )

    def notes(self) -> list[str]:
        """Return notes for the user before training, a line each."""
        found: list[str] = []
        for listed, what in (
            (self.refused, "refused"),
            (self.dropped, "longer than training.sequence_length and dropped"),
            (self.cut, "cut to training.sequence_length"),
            (self.unlabelled, "without a token to learn, and left out"),
        ):
            if listed.count:
                place, reason = listed.first[0]
                found.append(f"note: {listed.count:,} of {self.read:,} records {what}, the first {place}: {reason}")
        return found
