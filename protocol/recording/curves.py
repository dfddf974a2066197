"""Figures of training over a run: by step, pooled for long windows, with evaluations and checkpoints.

``training_steps`` has a row for each step of a rank with figures for which ``steps`` has no columns; the view
``throughput`` joins both. ``curves`` pools 16, 128, 1,024 or 8,192 consecutive steps of a rank per row, as
``rollups`` does for memory and times; single steps are read from ``steps`` and ``training_steps``. Both are derived
from the stream. Rows of ``rollups`` pool peaks by maximum, with the time of the highest, so a spike of one step is
neither averaged away nor moved; times by sum, with the longest step beside it; and losses by mean.
``evaluations`` and ``checkpoints`` have messages of ``events`` in columns.
"""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from math import isfinite
from typing import Any

from msgspec.structs import astuple

from ..host.machine import mfu
from ..messages.telemetry import PAUSES, STEP_PHASES, Step
from .results import MemoryColumn, StepPoint, TrainingPoint
from .rows import with_nan
from .schema import PHASE_COLUMNS, ROLLUP_COLUMNS, ROLLUP_SIZES, STEP_COLUMNS

Row = tuple[Any, ...]
_STEP_POINT = "t, step, 1, host_us, allocated_peak, reserved_peak, resident_peak"
_ROLLUP_POINT = "t, max_step, count, host_us, allocated_peak, reserved_peak, resident_peak"
_MEMORY = "cast(({t} - :t0) / :width AS INTEGER) AS at, max(allocated_peak), max(reserved_peak), max(resident_peak)"
_STEP_MEMORY = _MEMORY.format(t="t")
_ROLLUP_MEMORY = _MEMORY.format(t="peak_t")
_IN_ROLLUPS = "FROM rollups WHERE level = :level AND rank = :rank AND last_seq BETWEEN :first AND :last"
_IN_STEPS = "FROM steps WHERE rank = :rank AND seq BETWEEN :first AND :last"
MEMORY_ROWS = 30_000  # limit on the pooled rows that one memory query reads, if that leaves at least two per column
MEMORY_ROWS_LIMIT = 150_000
STEP_COST = 5  # pooled rows read in the time of one step's row, which is wider


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
        sizes = reversed(list(enumerate(_GROUP_SIZES)))
        level = next((at for at, size in sizes if (self._count(at, rank) + 1) * size > 8 * limit), -1)
        rows: list[Row] = []
        for size, first, last in pieces(self._connection, "rollups", rank, self._first, self._last, level):
            bind = {"level": size, "rank": rank, "first": first, "last": last}
            steps, pooled = f"{_STEP_POINT} {_IN_STEPS}", f"{_ROLLUP_POINT} {_IN_ROLLUPS}"
            query = f"SELECT {steps} ORDER BY seq" if size < 0 else f"SELECT {pooled} ORDER BY last_seq"
            rows += self._connection.execute(query, bind).fetchall()
        group = -(-len(rows) // limit)
        return [_pooling_point(rows[at : at + group]) for at in range(0, len(rows), group)] if rows else []

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


def _pooling_point(rows: Sequence[Row]) -> StepPoint:
    t, step, counts, host_us, allocated, reserved, resident = zip(*rows, strict=True)
    count = sum(counts)
    return StepPoint(
        *(t[-1], step[-1], sum(host_us) / count / 1e3, max(allocated), max(reserved)),
        resident_peak=max(_known(resident), default=None),
        count=count,
    )


StepFigures = tuple[float, int, int, int, int, float, float | None, float | None, float | None, int, int]
"""Figures of one step: ``t``, ``step``, ``training_us``, ``tokens``, ``label_tokens``, ``flops``, ``loss``, ``lr``,
``grad_norm``, ``data_us`` and ``whole_us`` of ``TrainingPoint``; losses, rates and norms may be not finite."""
_CURVE_COLUMNS = 22
_Pooled = tuple[int, int, TrainingPoint]  # first and last stream number, and the point
_GROUP_SIZES = (ROLLUP_SIZES[0], *(size // below for below, size in pairwise(ROLLUP_SIZES)))
"""Steps of a row of level 0, and rows of the level below of each row above."""
ROWS_A_POINT = 4  # maximum number of pooled rows read per point of an answer
_STEPS = """SELECT steps.seq, t, steps.rank, steps.step, 1, coalesce(training_us, host_us), steps.tokens,
        coalesce(label_tokens, 0), coalesce(flops, 0.0), loss, lr, grad_norm, loss_finite, grad_norm_finite,
        CASE WHEN data_device_us IS NOT NULL AND device_us IS NOT NULL THEN data_device_us ELSE data_host_us END,
        CASE WHEN data_device_us IS NOT NULL AND device_us IS NOT NULL THEN
            min(device_us, coalesce(training_us, device_us)) ELSE coalesce(training_us, host_us) END
    FROM steps LEFT JOIN training_steps USING(seq) WHERE steps.rank = :rank AND steps.seq BETWEEN :first AND :last
    ORDER BY steps.seq"""
_CURVES = """SELECT * FROM curves WHERE level = :level AND rank = :rank AND last_seq BETWEEN :first AND :last
    AND first_seq >= :first ORDER BY last_seq"""


def training_row(seq: int, step: Step, training_us: int, peak: float | None) -> Row | None:
    """Return a row of ``training_steps``; None if ``steps`` has all figures of the step.

    ``peak`` is the data-sheet peak of the rank's device, FLOP/s; None: unknown.
    """
    rested = training_us != step.host_us
    if not (step.flops or step.label_tokens or rested):
        return None
    share = mfu(step.flops, training_us / 1e6, peak)
    return (seq, training_us if rested else None, step.label_tokens or None, step.flops or None, share)


def figures_of(step: Step, t: float) -> StepFigures:
    """Return the figures of one step, which the hub received at ``t``."""
    data = None
    training_us = step.host_us
    for record in step.phases:  # this runs for every step of every rank
        name = record.name
        if name == "data":
            data = record
        elif name in PAUSES:
            training_us -= record.host_us
    if training_us < 0:
        training_us = 0
    whole, data_us = training_us, 0
    if data is not None:
        data_us = data.host_us
        if data.device_us is not None and step.device_us is not None:
            whole, data_us = min(step.device_us, whole), data.device_us
        elif data.coarse and data.resident is None:
            whole = data_us = 0  # of a GPU's rank, in a step without device times
    return (
        *(t, step.step, training_us, step.tokens, step.label_tokens, step.flops),
        *(step.loss, step.lr, step.grad_norm, data_us, whole),
    )


def mean_loss(losses: Sequence[tuple[float, int]]) -> float | None:
    """Return the mean of the ranks' losses of one step, weighted by their label tokens if all ranks have some.

    None for no losses.
    """
    if not losses:
        return None
    weights = [tokens for _, tokens in losses] if all(tokens > 0 for _, tokens in losses) else [1] * len(losses)
    return sum(loss * weight for (loss, _), weight in zip(losses, weights, strict=True)) / sum(weights)


def point_of(step: Step, t: float) -> TrainingPoint:
    """Return the point of one step, which the hub received at ``t``."""
    return _point(figures_of(step, t))


def _point(figures: StepFigures) -> TrainingPoint:
    t, step, training_us, tokens, label_tokens, flops, loss, lr, grad_norm, data_us, whole_us = figures
    lost = loss is not None and not isfinite(loss), grad_norm is not None and not isfinite(grad_norm)
    loss, lr, grad_norm = _number(loss), _number(lr), _number(grad_norm)
    return TrainingPoint(
        *(t, step, step, 1, training_us, tokens, label_tokens, flops, loss, loss, loss),
        *(lr, grad_norm, grad_norm, data_us, whole_us, *map(int, lost)),
    )


def _number(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def pool_points(points: Sequence[TrainingPoint]) -> TrainingPoint:
    """Pool points of one rank, in order: counts and times are summed, the rest averaged over steps.

    The mean loss is weighted by label tokens if every point with a loss has some.
    """
    if len(points) == 1:
        return points[0]
    columns = zip(*map(astuple, points), strict=True)
    t, step, first_step, count, training_us, tokens, label_tokens, flops, loss, low_loss, high_loss, *rest = columns
    lr, grad_norm, max_grad_norm, data_us, whole_us, *lost = rest
    by_labels = all(labels > 0 for labels, value in zip(label_tokens, loss, strict=True) if value is not None)
    return TrainingPoint(
        *(t[-1], max(step), min(first_step), sum(count), sum(training_us), sum(tokens), sum(label_tokens), sum(flops)),
        loss=_mean(loss, label_tokens if by_labels else count),
        low_loss=min(_known(low_loss), default=None),
        high_loss=max(_known(high_loss), default=None),
        lr=_mean(lr, count),
        grad_norm=_mean(grad_norm, count),
        max_grad_norm=max(_known(max_grad_norm), default=None),
        data_us=sum(data_us),
        whole_us=sum(whole_us),
        loss_not_finite=sum(lost[0]),
        grad_norm_not_finite=sum(lost[1]),
    )


def _known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[Any], weights: Sequence[int]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum([weight for _, weight in known])
    return sum([value * weight for value, weight in known]) / total if total else None


class _Levels(ABC):
    """Collects the items of each rank until they fill a pooled row of a level, and calls ``emit`` with it."""

    table = ""

    def __init__(self, emit: Callable[[Row], None]) -> None:
        self._emit = emit
        self._waiting: dict[int, list[list[Any]]] = {}
        """Items for the next row, by rank and level: steps at level 0, above it pooled ones of the level below."""

    def _add(self, rank: int, item: Any) -> None:
        waiting = self._waiting.get(rank)
        if waiting is None:
            waiting = self._waiting[rank] = [[] for _ in ROLLUP_SIZES]
        for level, size in enumerate(_GROUP_SIZES):
            group = waiting[level]
            group.append(item)
            if len(group) < size:
                return
            item = self._pool(rank, level, group)
            group.clear()

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the steps and rows that an earlier writer of this file had not pooled when it ended."""
        newest = f"SELECT coalesce(max(last_seq), 0) FROM {self.table} WHERE level = ? AND rank = ?"
        rows = f"SELECT * FROM {self.table} WHERE level = ? AND rank = ? AND last_seq > ? ORDER BY last_seq"
        for (rank,) in connection.execute("SELECT DISTINCT rank FROM steps").fetchall():
            pooled = [connection.execute(newest, (level, rank)).fetchone()[0] for level in range(len(ROLLUP_SIZES))]
            waiting = self._waiting[rank] = [[] for _ in ROLLUP_SIZES]
            for level in range(1, len(ROLLUP_SIZES)):
                found = connection.execute(rows, (level - 1, rank, pooled[level])).fetchall()
                waiting[level] = list(map(self._item_of, found))
            for step in self._steps_after(connection, rank, pooled[0]):
                self._add(rank, step)

    @abstractmethod
    def _pool(self, rank: int, level: int, items: list[Any]) -> Any:
        """Emit the pooled row of a level, and return its item."""

    @abstractmethod
    def _item_of(self, row: Row) -> Any:
        """Return the item of a row of the table."""

    @abstractmethod
    def _steps_after(self, connection: sqlite3.Connection, rank: int, seq: int) -> list[Any]:
        """Return the items of a rank's recorded steps after a stream number."""


class Curves(_Levels):
    """Pools steps into rows of ``curves``. An item has its first and last stream number, and its figures."""

    table = "curves"

    def add(self, seq: int, rank: int, figures: StepFigures) -> None:
        """Add a step of a rank."""
        self._add(rank, (seq, seq, figures))

    def _pool(self, rank: int, level: int, items: list[Any]) -> _Pooled:
        point = pool_points([figures if level else _point(figures) for _, _, figures in items])
        first, last, (t, step, first_step, count, *rest) = items[0][0], items[-1][1], astuple(point)
        self._emit((level, rank, last, first, t, count, first_step, step, *rest))
        return first, last, point

    def _item_of(self, row: Row) -> _Pooled:
        return _from_curve(row)

    def _steps_after(self, connection: sqlite3.Connection, rank: int, seq: int) -> list[Any]:
        rows = connection.execute(_STEPS, {"rank": rank, "first": seq + 1, "last": 1 << 62}).fetchall()
        return [(row[0], row[0], _figures_from(row)) for row in rows]


def _from_curve(row: Row) -> _Pooled:
    _, _, last, first, t, count, first_step, step, *rest = row[:_CURVE_COLUMNS]
    return first, last, TrainingPoint(t, step, first_step, count, *rest)


def _figures_from(row: Row) -> StepFigures:
    _, t, _, step, _, training_us, tokens, labels, flops, loss, lr, grad_norm, *flags, data_us, whole_us = row
    loss, grad_norm = with_nan(loss, flags[0]), with_nan(grad_norm, flags[1])
    return (t, step, training_us, tokens or 0, labels, flops, loss, lr, grad_norm, data_us or 0, whole_us or 0)


def read_points(connection: sqlite3.Connection, rank: int, first: int, last: int, limit: int) -> list[TrainingPoint]:
    """Read a rank's steps between two numbers of the stream, inclusive, as at most ``limit`` points.

    The points are from the finest level with few enough pooled rows, with single steps at the edges of the window.
    """
    bind = {"rank": rank, "first": first, "last": last}
    steps = connection.execute("SELECT count(*) FROM steps WHERE rank = :rank AND seq BETWEEN :first AND :last", bind)
    (total,) = steps.fetchone()
    level = -1
    while level + 1 < len(ROLLUP_SIZES) and total > ROWS_A_POINT * limit:
        level += 1
        count = f"SELECT count(*) {_IN_ROLLUPS.replace('rollups', 'curves')}"
        (found,) = connection.execute(count, {**bind, "level": level}).fetchone()
        if not found:  # a recording of an earlier version has none
            level -= 1
            break
        total = found
    points: list[TrainingPoint] = []
    group = -(-total // limit) if total else 1
    pending = _rows(connection, rank, first, last, level)
    while some := list(islice(pending, group)):
        points.append(pool_points(some))
    if len(points) > limit:  # single steps at the edges were not counted
        size = -(-len(points) // limit)
        points = [pool_points(points[at : at + size]) for at in range(0, len(points), size)]
    return points


def _rows(connection: sqlite3.Connection, rank: int, first: int, last: int, level: int) -> Iterator[TrainingPoint]:
    for size, begin, end in pieces(connection, "curves", rank, first, last, level):
        bind = {"level": size, "rank": rank, "first": begin, "last": end}
        if size < 0:
            yield from (_point(_figures_from(row)) for row in connection.execute(_STEPS, bind))
        else:
            yield from (_from_curve(row)[2] for row in connection.execute(_CURVES, bind))


_HOST_AT = [len(STEP_COLUMNS) + position * len(PHASE_COLUMNS) for position in range(len(STEP_PHASES))]
_AT = {name: position for position, name in enumerate(ROLLUP_COLUMNS)}
_FIRST_SUM = _AT["resident_peak"] + 1
_T, _PEAK_T, _LOSS, _COUNT = _AT["t"], _AT["peak_t"], _AT["loss"], _AT["count"]
_ALLOCATED, _RESERVED, _RESIDENT = _AT["allocated_peak"], _AT["reserved_peak"], _AT["resident_peak"]


def _total(values: Sequence[Any]) -> Any:
    known = _known(values)
    return sum(known) if known else None


def pool_steps(rows: Sequence[Row]) -> Row:
    """Pool rows of ``steps`` of one rank, in order of ``seq``, into a level 0 row of ``rollups``."""
    columns = list(zip(*rows, strict=True))
    allocated, reserved, resident = columns[11], columns[12], columns[13]
    losses = _known(columns[7])
    # On the CPU glibc keeps no high-water mark, so the resident set's peak is used there.
    highest = resident if resident[0] is not None and None not in resident else allocated
    return (
        *(0, rows[0][2], rows[-1][0], rows[0][0], rows[-1][1], columns[1][highest.index(max(highest))], len(rows)),
        *(min(columns[3]), max(columns[3]), sum(columns[5]), max(columns[5]), _total(columns[6])),
        *(sum(losses) / len(losses) if losses else None, max(allocated), max(reserved)),
        max(_known(resident), default=None),
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
        max(_known(resident), default=None),
        *(_total(columns[at]) for at in range(_FIRST_SUM, len(ROLLUP_COLUMNS))),
    )


class Rollups(_Levels):
    """Pools rows of ``steps`` into rows of ``rollups``."""

    table = "rollups"

    def add(self, row: Row) -> None:
        """Add one row of ``steps``."""
        self._add(row[2], row)

    def flush(self) -> None:
        """Pool the waiting rows now, into rows of fewer steps."""
        for rank, waiting in self._waiting.items():
            for level, items in enumerate(waiting):
                if items:
                    pooled = self._pool(rank, level, items)
                    for above in waiting[level + 1 : level + 2]:
                        above.append(pooled)
        self._waiting.clear()

    def _pool(self, rank: int, level: int, items: list[Any]) -> Row:
        pooled = pool_rollups(level, items) if level else pool_steps(items)
        self._emit(pooled)
        return pooled

    def _item_of(self, row: Row) -> Row:
        return row

    def _steps_after(self, connection: sqlite3.Connection, rank: int, seq: int) -> list[Any]:
        query = "SELECT * FROM steps WHERE rank = ? AND seq > ? ORDER BY seq"
        return connection.execute(query, (rank, seq)).fetchall()


_PEAK = "coalesce(resident_peak, allocated_peak)"
"""The figure whose peak is a true high-water mark: the resident set on the CPU, else the allocated memory."""
_HIGHEST_POOLED = f"""SELECT {_PEAK}, first_seq, last_seq FROM rollups
    WHERE level = ? AND rank = ? AND last_seq BETWEEN ? AND ? ORDER BY 1 DESC, last_seq LIMIT 1"""
_HIGHEST_STEP = f"SELECT {_PEAK}, seq FROM steps WHERE rank = ? AND seq BETWEEN ? AND ? ORDER BY 1 DESC, seq LIMIT 1"


def peak_seq(connection: sqlite3.Connection, rank: int, seq: int, since: int = 0) -> int | None:
    """Return the number of the first step, up to ``seq``, with the rank's highest peak; None if there are no steps.

    With ``since`` (the start of a job) only steps numbered from there on count. The pooled rows within the range are
    searched, and the single steps at its edges.
    """
    best: tuple[int, int] | None = None
    parts = list(pieces(connection, "rollups", rank, since, seq, len(ROLLUP_SIZES) - 1))[::-1]
    while parts:
        level, first, last = parts.pop()
        query, bind = (_HIGHEST_STEP, (rank,)) if level < 0 else (_HIGHEST_POOLED, (level, rank))
        row = connection.execute(query, (*bind, first, last)).fetchone()
        if row is None or row[0] is None or (best is not None and row[0] <= best[0]):
            continue
        if level < 0:
            best = row
        else:  # the rows of the level below cover the same steps
            parts.append((level - 1, row[1], row[2]))
    return best[1] if best is not None else None
