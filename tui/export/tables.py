"""Writes a series of a recording as a table: Parquet, Arrow or CSV, a part at a time, so that memory stays small."""

import csv
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.recording.reader import Reader
from ...protocol.recording.series import SERIES, Part

_LARGEST = 1 << 63
_ROWS = 10_000  # of the recording's table, read at once


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Give the path of a temporary file beside ``path``, which replaces it if the block ends without an error.

    Raises:
        UsageError: it cannot be written.
    """
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        os.close(descriptor)
        yield Path(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = ""
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def parts(reader: Reader, series: str) -> Iterator[Part]:
    """Yield a whole series of a recording in parts.

    Raises:
        RecordingError: it cannot be read.
    """
    after = 0
    while (part := reader.part(series, after, _ROWS)) is not None:
        yield part
        after = part.last_seq


def write_table(reader: Reader, series: str, kind: str, path: Path) -> int:
    """Write a series as ``parquet``, ``arrow`` (an IPC file) or ``csv``; return the number of rows.

    Raises:
        UsageError: pyarrow is not installed, or the file cannot be written.
        RecordingError: the recording cannot be read.
    """
    begin = _csv if kind == "csv" else _arrow(kind)
    rows = 0
    with replacing(path) as temporary, closing(begin(temporary, series)) as writer:
        next(writer)
        for part in parts(reader, series):
            writer.send(part.columns)
            rows += len(part.columns[0])
    return rows


Writer = Generator[None, list[list[Any]], None]
"""Writes the columns that it is sent; closing it completes the file."""


def _csv(path: Path, series: str) -> Writer:
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(SERIES[series])
        while True:
            out.writerows(zip(*(yield), strict=True))


def _arrow(kind: str) -> Callable[[Path, str], Writer]:
    try:
        arrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{kind} needs pyarrow; run: pip install pyarrow, or export csv") from None
    types = {int: arrow.int64(), float: arrow.float64(), str: arrow.string(), bool: arrow.int8()}

    def write(path: Path, series: str) -> Writer:
        columns = SERIES[series]
        schema = arrow.schema([(name, types[kind]) for name, kind in columns.items()])
        if kind == "parquet":
            # Parquet's statistics omit NaN, by which DuckDB skips rows with NaN (`loss > 5`, `isnan(loss)`).
            bounded = [name for name, kind in columns.items() if kind is not float]
            opened = parquet.ParquetWriter(path, schema, write_statistics=bounded)
        else:
            opened = arrow.ipc.new_file(str(path), schema)
        with opened as out:
            while True:
                values = yield
                arrays = [_array(arrow, one, kind) for one, kind in zip(values, schema.types, strict=True)]
                out.write_table(arrow.Table.from_arrays(arrays, schema=schema))

    return write


def _array(arrow: Any, values: list[Any], kind: Any) -> Any:
    try:
        return arrow.array(values, kind)
    except (OverflowError, arrow.ArrowInvalid):  # an integer above 64 bits, which no writer writes
        return arrow.array(
            [value if value is not None and -_LARGEST <= value < _LARGEST else None for value in values], kind
        )
