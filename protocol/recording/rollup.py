"""Pooled rows of ``rollups``, from which graphs of long windows are drawn without reading every step.

A row pools 16, 128, 1,024 or 8,192 consecutive steps of one rank. Peaks are pooled by maximum, with the time of the
highest, so a spike of one step is neither averaged away nor moved. Times are pooled by sum, with the longest step
beside it, and losses by mean.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from ..messages.telemetry import STEP_PHASES
from .schema import PHASE_COLUMNS, ROLLUP_COLUMNS, ROLLUP_SIZES, STEP_COLUMNS

Row = tuple[Any, ...]


_HOST_AT = [len(STEP_COLUMNS) + position * len(PHASE_COLUMNS) for position in range(len(STEP_PHASES))]
_AT = {name: position for position, name in enumerate(ROLLUP_COLUMNS)}
_FIRST_SUM = _AT["resident_peak"] + 1
_T, _PEAK_T, _LOSS, _COUNT = _AT["t"], _AT["peak_t"], _AT["loss"], _AT["count"]
_ALLOCATED, _RESERVED, _RESIDENT = _AT["allocated_peak"], _AT["reserved_peak"], _AT["resident_peak"]


def _total(values: Sequence[Any]) -> Any:
    try:
        return sum(values)
    except TypeError:  # some are None
        pass
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[Any], counts: Sequence[int]) -> float | None:
    known = [(value, count) for value, count in zip(values, counts, strict=True) if value is not None]
    weight = sum(count for _, count in known)
    return sum(value * count for value, count in known) / weight if weight else None


def pool_steps(rows: Sequence[Row]) -> Row:
    """Pool rows of ``steps`` of one rank, in order of ``seq``, into a level 0 row of ``rollups``."""
    columns = list(zip(*rows, strict=True))
    allocated, reserved, resident = columns[11], columns[12], columns[13]
    losses = [loss for loss in columns[7] if loss is not None]
    # On the CPU glibc keeps no high-water mark, so the resident set's peak is used there.
    highest = resident if resident[0] is not None and None not in resident else allocated
    return (
        *(0, rows[0][2], rows[-1][0], rows[0][0], rows[-1][1], columns[1][highest.index(max(highest))], len(rows)),
        *(min(columns[3]), max(columns[3]), sum(columns[5]), max(columns[5]), _total(columns[6])),
        *(sum(losses) / len(losses) if losses else None, max(allocated), max(reserved)),
        max((value for value in resident if value is not None), default=None),
        *(_total(columns[at]) for at in _HOST_AT),
        *(_total(columns[at + 1]) for at in _HOST_AT),
    )


def pool_rollups(level: int, rows: Sequence[Row]) -> Row:
    """Pool rows of ``rollups`` of one rank, in order, into a row of ``level``."""
    columns = list(zip(*rows, strict=True))
    resident = columns[_RESIDENT]
    highest = resident if None not in resident else columns[_ALLOCATED]
    return (
        *(level, rows[0][1], rows[-1][2], rows[0][3], rows[-1][_T], columns[_PEAK_T][highest.index(max(highest))]),
        *(sum(columns[_COUNT]), min(columns[7]), max(columns[8]), sum(columns[9]), max(columns[10])),
        *(_total(columns[11]), _mean(columns[_LOSS], columns[_COUNT])),
        *(max(columns[_ALLOCATED]), max(columns[_RESERVED])),
        max((value for value in resident if value is not None), default=None),
        *(_total(columns[at]) for at in range(_FIRST_SUM, len(ROLLUP_COLUMNS))),
    )


class Rollups:
    """Collects the rows of each rank until they fill a pooled one, and calls ``emit`` with it."""

    def __init__(self, emit: Callable[[Row], None]) -> None:
        self._emit = emit
        self._waiting: dict[int, list[list[Row]]] = {}

    def add(self, row: Row) -> None:
        """Add one row of ``steps``."""
        waiting = self._waiting.get(row[2])
        if waiting is None:
            waiting = self._waiting[row[2]] = [[] for _ in ROLLUP_SIZES]
        steps = waiting[0]
        steps.append(row)
        if len(steps) == ROLLUP_SIZES[0]:
            pooled = pool_steps(steps)
            steps.clear()
            self._pass_up(waiting, pooled)

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the rows that an earlier writer of this file had not pooled when it ended."""
        newest = "SELECT coalesce(max(last_seq), 0) FROM rollups WHERE level = ? AND rank = ?"
        waiting_rows = "SELECT * FROM rollups WHERE level = ? AND rank = ? AND last_seq > ? ORDER BY last_seq"
        for (rank,) in connection.execute("SELECT DISTINCT rank FROM steps").fetchall():
            waiting = self._waiting[rank] = [[] for _ in ROLLUP_SIZES]
            pooled_to = [connection.execute(newest, (level, rank)).fetchone()[0] for level in range(len(ROLLUP_SIZES))]
            for level in range(1, len(ROLLUP_SIZES)):
                waiting[level] = connection.execute(waiting_rows, (level - 1, rank, pooled_to[level])).fetchall()
            steps = "SELECT * FROM steps WHERE rank = ? AND seq > ? ORDER BY seq"
            for row in connection.execute(steps, (rank, pooled_to[0])).fetchall():
                self.add(row)

    def flush(self) -> None:
        """Pool the waiting rows now, into rows of fewer steps."""
        for waiting in self._waiting.values():
            if waiting[0]:
                pooled = pool_steps(waiting[0])
                self._emit(pooled)
                waiting[1].append(pooled)
            for level in range(1, len(ROLLUP_SIZES)):
                if waiting[level]:
                    pooled = pool_rollups(level, waiting[level])
                    self._emit(pooled)
                    if level + 1 < len(ROLLUP_SIZES):
                        waiting[level + 1].append(pooled)
        self._waiting.clear()

    def _pass_up(self, waiting: list[list[Row]], pooled: Row) -> None:
        self._emit(pooled)
        for level in range(1, len(ROLLUP_SIZES)):
            group = waiting[level]
            group.append(pooled)
            if len(group) < ROLLUP_SIZES[level] // ROLLUP_SIZES[level - 1]:
                return
            pooled = pool_rollups(level, group)
            group.clear()
            self._emit(pooled)
