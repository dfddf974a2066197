"""Long windows of a recording: from the finest level with few enough pooled rows, and single steps at the edges."""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from ..messages.telemetry import STEP_PHASES
from .results import MemoryColumn, StepPoint
from .schema import ROLLUP_SIZES

Row = tuple[Any, ...]

_PHASES = ", ".join([f"{phase}_host_us" for phase in STEP_PHASES] + [f"{phase}_device_us" for phase in STEP_PHASES])
_POINT = (
    "t, {step}, {count}, host_us, {longest}, device_us, loss, allocated_peak, reserved_peak, resident_peak, " + _PHASES
)
_STEP_POINT = _POINT.format(step="step", count="1", longest="host_us")
_ROLLUP_POINT = _POINT.format(step="max_step", count="count", longest="max_host_us")

_MEMORY = "cast(({t} - :t0) / :width AS INTEGER) AS at, max(allocated_peak), max(reserved_peak), max(resident_peak)"
_STEP_MEMORY = _MEMORY.format(t="t")
_ROLLUP_MEMORY = _MEMORY.format(t="peak_t")

_IN_ROLLUPS = "FROM rollups WHERE level = :level AND rank = :rank AND last_seq BETWEEN :first AND :last"
_IN_STEPS = "FROM steps WHERE rank = :rank AND seq BETWEEN :first AND :last"

MEMORY_ROWS = 30_000
"""Limit on the pooled rows that one memory query reads, if that leaves at least two per column."""
MEMORY_ROWS_LIMIT = 150_000
STEP_COST = 5
"""Pooled rows read in the time of one step's row, which is wider."""


def pieces(
    connection: sqlite3.Connection, table: str, rank: int, first: int, last: int, level: int
) -> Iterator[tuple[int, int, int]]:
    """Yield level, first and last number of consecutive pieces that cover a range of a rank.

    Pieces are whole rows of ``table`` (``rollups`` or ``curves``) at ``level``, finer ones at the edges, and single
    steps (level -1) where there are no pooled rows.
    """
    if first > last:
        return
    if level < 0:
        yield level, first, last
        return
    query = f"""SELECT min(first_seq), max(last_seq) FROM {table}
        WHERE level = ? AND rank = ? AND last_seq BETWEEN ? AND ? AND first_seq >= ?"""
    begin, end = connection.execute(query, (level, rank, first, last, first)).fetchone()
    if begin is None:
        yield from pieces(connection, table, rank, first, last, level - 1)
        return
    yield from pieces(connection, table, rank, first, begin - 1, level - 1)
    yield level, begin, end
    yield from pieces(connection, table, rank, end + 1, last, level - 1)


class Window:
    """A range of a recording between two stream numbers, inclusive."""

    def __init__(self, connection: sqlite3.Connection, first: int, last: int) -> None:
        self._connection = connection
        self._first = first
        self._last = last

    def _count(self, level: int, rank: int) -> int:
        bind = {"level": level, "rank": rank, "first": self._first, "last": self._last}
        return self._connection.execute(f"SELECT count(*) {_IN_ROLLUPS}", bind).fetchone()[0]

    def points(self, rank: int, limit: int) -> list[StepPoint]:
        """Return a rank's steps as at most ``limit`` points."""
        level = len(ROLLUP_SIZES) - 1
        while level >= 0:
            size = ROLLUP_SIZES[level] // (ROLLUP_SIZES[level - 1] if level else 1)
            if (self._count(level, rank) + 1) * size > 8 * limit:
                break
            level -= 1
        rows: list[Row] = []
        for size, first, last in pieces(self._connection, "rollups", rank, self._first, self._last, level):
            bind = {"level": size, "rank": rank, "first": first, "last": last}
            query = (
                f"SELECT {_STEP_POINT} {_IN_STEPS} ORDER BY seq"
                if size < 0
                else f"SELECT {_ROLLUP_POINT} {_IN_ROLLUPS} ORDER BY last_seq"
            )
            rows += self._connection.execute(query, bind).fetchall()
        group = -(-len(rows) // limit)
        return [_point(rows[at : at + group]) for at in range(0, len(rows), group)] if rows else []

    def memory(
        self, ranks: Sequence[int], t0: float, width: float, columns: int
    ) -> dict[tuple[int, int], MemoryColumn]:
        """Return the memory peaks by rank and column; columns are ``width`` seconds wide, from ``t0`` on."""
        level = self._memory_level(ranks, columns)
        found: dict[tuple[int, int], MemoryColumn] = {}
        for rank in ranks:
            for at, allocated, reserved, resident in self._memory_rows(rank, level, {"t0": t0, "width": width}):
                key = (rank, min(max(at, 0), columns - 1))
                other = found.get(key)
                if other is not None:
                    allocated, reserved = max(allocated, other.allocated_peak), max(reserved, other.reserved_peak)
                    resident = max(resident or 0, other.resident_peak or 0) or None
                found[key] = MemoryColumn(*key, allocated, reserved, resident)
        return found

    def _memory_level(self, ranks: Sequence[int], columns: int) -> int:
        """Return the finest level within the row limit; -1 for single steps."""
        level = len(ROLLUP_SIZES) - 1
        # Ranks step together, so the first three represent all.
        count = max((self._count(level, rank) for rank in ranks[:3]), default=0)
        while level >= 0:
            if level:
                finer = cost = max((self._count(level - 1, rank) for rank in ranks[:3]), default=0)
            else:
                finer = (count + 1) * ROLLUP_SIZES[0]
                cost = finer * STEP_COST
            limit = MEMORY_ROWS if count >= 2 * columns else MEMORY_ROWS_LIMIT
            if cost * len(ranks) > limit:
                return level
            level, count = level - 1, finer
        return -1

    def _memory_rows(self, rank: int, level: int, place: dict[str, float]) -> Iterator[Row]:
        for size, first, last in pieces(self._connection, "rollups", rank, self._first, self._last, level):
            bind = {"level": size, "rank": rank, "first": first, "last": last, **place}
            query = f"{_STEP_MEMORY} {_IN_STEPS}" if size < 0 else f"{_ROLLUP_MEMORY} {_IN_ROLLUPS}"
            yield from self._connection.execute(f"SELECT {query} GROUP BY at", bind)


def _point(rows: Sequence[Row]) -> StepPoint:
    columns = list(zip(*rows, strict=True))
    count = sum(columns[2])
    losses = [(loss, n) for loss, n in zip(columns[6], columns[2], strict=True) if loss is not None]
    phases = len(STEP_PHASES)
    return StepPoint(
        t=columns[0][-1],
        step=columns[1][-1],
        count=count,
        host_ms=sum(columns[3]) / count / 1e3,
        max_host_ms=max(columns[4]) / 1e3,
        device_ms=_mean_ms(columns[5], count),
        loss=sum(loss * n for loss, n in losses) / sum(n for _, n in losses) if losses else None,
        allocated_peak=max(columns[7]),
        reserved_peak=max(columns[8]),
        resident_peak=max((value for value in columns[9] if value is not None), default=None),
        phase_ms=_by_phase(columns[10 : 10 + phases], count),
        phase_device_ms=_by_phase(columns[10 + phases :], count),
    )


def _mean_ms(values: Sequence[int | None], count: int) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / count / 1e3 if known else None


def _by_phase(columns: Sequence[Sequence[int | None]], count: int) -> dict[str, float]:
    means = {name: _mean_ms(column, count) for name, column in zip(STEP_PHASES, columns, strict=True)}
    return {name: mean for name, mean in means.items() if mean is not None}
