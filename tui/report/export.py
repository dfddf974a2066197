"""Exports a report as a table for other programs: one row per rank and phase, as CSV or Parquet."""

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.host.private_files import write_private
from ...protocol.sweep.rows import RankRow, Row
from .load import CsvData, Data, SweepData

_RANK = (
    "rank", "steps", "step_ms", "step_ms_low", "step_ms_high", "tokens_per_second", "reserved_peak_bytes",
    "nvml_bytes", "device", "loss",
)  # fmt: skip
_PHASE = ("allocated_peak_bytes", "reserved_peak_bytes", "resident_peak_bytes", "host_ms", "device_ms")

Record = dict[str, Any]


def records(found: Sequence[Data]) -> list[Record]:
    """Return one record per rank and phase; of a failed run one with its verdict; of a CSV file its own.

    Raises:
        UsageError: a run has no measured steps.
    """
    return [record for data in found for record in _of(data)]


def _of(data: Data) -> Iterator[Record]:
    if isinstance(data, SweepData):
        for row in data.results.answered().values():
            yield from _of_row(data.name, row)
    elif isinstance(data, CsvData):
        for one in data.measurements:
            sizes = {f"{figure}_bytes": size for figure, size in one.figures.items()}
            yield {
                "source": data.name,
                data.mapping.length: one.length,
                "rank": one.rank,
                "iteration": one.iteration,
            } | sizes
    else:
        measured = [rank for rank in data.ranks if rank.steps]
        if not measured:
            raise UsageError(f"{data.name}: no measured steps to write; --warm-up excludes the first ones of a run")
        for rank in measured:
            yield from _of_rank({"source": data.name}, rank)


def _of_row(name: str, row: Row) -> Iterator[Record]:
    base: Record = {"source": name, **row.settings, "repeat": row.repeat, "verdict": row.verdict, "run": row.run}
    base |= {"seconds": row.seconds}
    if row.predicted is not None:
        base |= {"predicted_peak_bytes": row.predicted.peak_bytes, "predicted_phase": row.predicted.phase}
    measured = [rank for rank in row.ranks if rank.steps]
    if not measured:
        yield {
            **base,
            "failed_in": row.phase,
            "failed_rank": row.rank,
            "asked_bytes": row.asked_bytes,
            "text": row.text,
        }
    for rank in measured:
        yield from _of_rank(base, rank)


def _of_rank(base: Record, rank: RankRow) -> Iterator[Record]:
    own = {name if name != "reserved_peak_bytes" else "rank_reserved_peak_bytes": getattr(rank, name) for name in _RANK}
    for phase, figures in rank.phases.items():
        yield {**base, **own, "phase": phase, **{name: getattr(figures, name) for name in _PHASE}}


def to_csv(rows: Sequence[Record]) -> str:
    """Return the records as CSV; missing columns of a record are empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_parquet(rows: Sequence[Record]) -> bytes:
    """Return the records as Parquet.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError("--parquet needs pyarrow; run: pip install pyarrow, or write --csv") from None
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = arrow.table({name: _column([row.get(name) for row in rows]) for name in columns})
    buffer = arrow.BufferOutputStream()
    parquet.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


def _column(values: list[Any]) -> list[Any]:
    """Return a column with one type: an axis may mix numbers and words."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        return [None if value is None else str(value) for value in values]
    return values


def check_outputs(outputs: Mapping[str, str], sources: Sequence[Path]) -> None:
    """Check that files can be written, before writing any.

    Args:
        outputs: paths of the files by option.
        sources: the report's sources, which must not be overwritten.

    Raises:
        UsageError: a path is empty, a folder, one of the sources or given twice, or its folder cannot be written.
    """
    known = {os.path.realpath(path) for path in sources}
    for option, name in outputs.items():
        path, folder = os.path.realpath(name), os.path.dirname(os.path.realpath(name))
        if not name:
            raise UsageError(f"{option}: needs a file's name")
        if os.path.isdir(path):
            raise UsageError(f"{option}: {name} is a folder: name a file")
        if not os.path.isdir(folder):
            raise UsageError(f"{option}: {name} cannot be written: no such folder: {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{option}: {name} cannot be written: no permission to write in {folder}")
        if path in known:
            raise UsageError(f"{option}: {name} would replace a file that is read or written too: name another")
        known.add(path)


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_private(path, data)
        path.chmod(0o644)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
