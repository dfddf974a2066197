"""The out-of-memory errors of a run: the rank's figures, the hub's verdict, and whether the rank is held.

A fold over messages, live or replayed. If no hub has judged an error (an older recording, or no hub at that time), the
same rules are applied here to the rank's figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...protocol.analysis.oom.verdict import OomContext
from ...protocol.analysis.oom.words import explain
from ...protocol.analysis.remedies import remedies
from ...protocol.messages.oom import OomReport, OomVerdict, RankMoment, Remedy
from ...protocol.messages.telemetry import Oom
from ...protocol.text import gib

CaseKey = tuple[int, float]
"""Rank, and time by that rank's clock: identifies an error."""

MOST_CASES = 64
"""Maximum number of errors kept, the oldest are dropped first: a script may catch errors for hours."""


@dataclass(frozen=True)
class OomCase:
    """One error, with its report once received."""

    oom: Oom
    report: OomReport | None = None

    @property
    def key(self) -> CaseKey:
        """Key that identifies the error."""
        return self.oom.rank, self.oom.time

    @cached_property
    def verdict(self) -> OomVerdict:
        """Why the allocation failed."""
        return self.report.verdict if self.report is not None else explain(self.oom, OomContext())

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What to try, in this order."""
        return self.report.remedies if self.report is not None else remedies(self.oom, self.verdict, OomContext())

    @property
    def ranks(self) -> list[RankMoment]:
        """All ranks at that moment; empty if not recorded."""
        return self.report.ranks if self.report is not None else []


class OomCases:
    """The errors of a run, oldest first."""

    def __init__(self) -> None:
        self._cases: dict[CaseKey, OomCase] = {}
        self.version = 0
        """Incremented with every change."""

    def __len__(self) -> int:
        return len(self._cases)

    def __iter__(self) -> Iterator[OomCase]:
        return iter(self._cases.values())

    def put(self, oom: Oom) -> None:
        """Add an error; a known error is not changed."""
        key = oom.rank, oom.time
        if key not in self._cases:
            self._add(OomCase(oom))

    def report(self, report: OomReport) -> None:
        """Add the hub's report on an error, or an update of it."""
        self._add(OomCase(report.oom, report))

    def _add(self, case: OomCase) -> None:
        self._cases[case.key] = case
        while len(self._cases) > MOST_CASES:
            del self._cases[next(iter(self._cases))]
        self.version += 1

    def get(self, key: CaseKey | None) -> OomCase | None:
        """Find a case."""
        return self._cases.get(key) if key is not None else None

    def of_rank(self, rank: int) -> OomCase | None:
        """Find the latest error of a rank."""
        return max((case for case in self if case.oom.rank == rank), key=lambda case: case.oom.time, default=None)

    def ordered(self) -> list[OomCase]:
        """List the errors by time, then by rank."""
        return sorted(self, key=lambda case: (case.oom.time, case.oom.rank))


def numbers(oom: Oom) -> list[tuple[str, int, str]]:
    """List the figures at that moment: name, bytes, and a remark."""
    host = oom.measure != "cuda"
    where = "host" if host else "device"
    total = oom.capacity_bytes or oom.device_total_bytes
    rows: list[tuple[str, int, str]] = [
        ("asked for", oom.requested_bytes, ""),
        (f"free on the {where}", oom.device_free_bytes, f"of {gib(total)}" if total else ""),
    ]
    if oom.limit:
        rows.append(("left by the limit", oom.room_bytes, oom.limit))
    rows.append(("allocated", oom.allocated_bytes, ""))
    rows.append(("held by malloc" if host else "reserved", oom.reserved_bytes, ""))
    if oom.free_blocks:
        rows.append(("reserved but free", oom.reserved_free_bytes, f"in {oom.free_blocks:,} blocks"))
        rows.append(("of it for this request", oom.usable_free_bytes, "its pool and stream"))
        rows.append(("largest block of that", oom.largest_free_bytes, ""))
    if oom.peak_bytes:
        before = f"of the {oom.steps_done:,} steps before" if oom.steps_done else "before"
        rows.append(("highest peak", oom.peak_bytes, before))
    return rows
