"""The out-of-memory errors of a run: what the rank measured, what the hub made of it, and whether the rank still waits.

A plain fold, live or replayed. Where no hub has judged an error (an older recording, a hub that was gone), the same
rules are applied here to the rank's own numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...protocol.oom import Mend, OomReport, OomVerdict, RankMoment
from ...protocol.oomreport.mends import mends
from ...protocol.oomreport.verdict import Around, explain
from ...protocol.telemetry import Oom
from ...protocol.text import duration, gib

if TYPE_CHECKING:
    from .run import RunModel

CaseKey = tuple[int, float]
"""Rank, and when it was, by that rank's clock: what tells errors apart."""

MOST_CASES = 64
"""A script may catch its errors and go on for hours; the oldest are forgotten first."""


@dataclass(frozen=True)
class OomCase:
    """One error; with a report as soon as there is one."""

    oom: Oom
    report: OomReport | None = None

    @property
    def key(self) -> CaseKey:
        """What it is found by."""
        return self.oom.rank, self.oom.time

    @cached_property
    def verdict(self) -> OomVerdict:
        """Why there was no memory."""
        return self.report.verdict if self.report is not None else explain(self.oom, Around())

    @cached_property
    def mends(self) -> list[Mend]:
        """What to try, in this order."""
        return self.report.mends if self.report is not None else mends(self.oom, self.verdict, Around())

    @property
    def ranks(self) -> list[RankMoment]:
        """All ranks at that moment; empty where nobody kept them."""
        return self.report.ranks if self.report is not None else []


class OomBook:
    """The errors of a run, oldest first."""

    def __init__(self) -> None:
        self._cases: dict[CaseKey, OomCase] = {}
        self.version = 0
        """Moves with every change."""

    def __len__(self) -> int:
        return len(self._cases)

    def __iter__(self) -> Iterator[OomCase]:
        return iter(self._cases.values())

    def put(self, oom: Oom) -> None:
        """Add an error; one that is known is left as it is."""
        key = oom.rank, oom.time
        if key not in self._cases:
            self._add(OomCase(oom))

    def report(self, report: OomReport) -> None:
        """Add what the hub made of an error, or a later word on it."""
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


def held_since(model: "RunModel", case: OomCase) -> float:
    """Tell since when the rank waits at this very error, seconds since the epoch; 0: it does not."""
    rank = model.ranks.get(case.oom.rank)
    latest = model.ooms.of_rank(case.oom.rank)
    if rank is None or not case.oom.held or latest is None or latest.key != case.key:
        return 0.0
    if not rank.alive:
        return 0.0
    if rank.beat is not None and rank.beat.time > case.oom.time:
        return rank.beat.held_since
    if rank.state == "held":
        return rank.state_since or case.oom.time
    return 0.0


def held_cases(model: "RunModel") -> list[OomCase]:
    """List the errors at which a rank waits now."""
    return [case for case in model.ooms.ordered() if held_since(model, case)]


def first_to_show(model: "RunModel", rank: int | None = None) -> OomCase | None:
    """Choose the error a person most likely means: of that rank, else one that is held, else the first of the latest.

    When one rank fails, others often follow within moments: the first of them is the one to look at.
    """
    if rank is not None and (found := model.ooms.of_rank(rank)) is not None:
        return found
    if held := held_cases(model):
        return held[0]
    cases = model.ooms.ordered()
    if not cases:
        return None
    last = cases[-1].oom.time
    return next(case for case in cases if case.oom.time >= last - _TOGETHER_S)


_TOGETHER_S = 120.0
"""Errors of several ranks within this belong together."""


class HeldWatch:
    """Tells of each error at which a rank has begun to wait, once."""

    def __init__(self) -> None:
        self._told: set[CaseKey] = set()

    def fresh(self, model: "RunModel") -> OomCase | None:
        """Give an error at which a rank waits and that was not told of yet; others that wait too count as told."""
        cases = [case for case in held_cases(model) if case.key not in self._told]
        self._told.update(case.key for case in cases)
        return cases[0] if cases else None


def hold_words(model: "RunModel", case: OomCase) -> list[str]:
    """Say what being held means here: until when, and what becomes of the other ranks."""
    since, oom = held_since(model, case), case.oom
    if not since:
        return []
    lines = [f"rank {oom.rank} waits in the failing frame, for {duration(max(1, int(model.now - since)))} now"]
    if oom.hold_seconds:
        left = since + oom.hold_seconds - model.now
        lines[0] += f"; it lets go by itself in {duration(max(0.0, left))} (--hold-timeout)"
    if oom.others:
        lines.append(oom.others)
    if oom.peer_timeout_s:
        left = oom.time + oom.peer_timeout_s - model.now
        lines.append(
            f"their process group gives up {duration(oom.peer_timeout_s)} after it began to wait, "
            + (f"in about {duration(left)}" if left > 0 else "and that time is over: they may be gone")
        )
    elif not oom.others and model.world_size > 1:
        lines.append("the other ranks wait in their next collective until their process group's timeout ends them")
    return lines


def numbers(oom: Oom) -> list[tuple[str, int, str]]:
    """List the figures of that moment: what each is, bytes, and a remark."""
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
