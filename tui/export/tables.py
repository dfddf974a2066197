"""Writes a series of a recording as a table: Parquet, Arrow or CSV, a part at a time, so that memory stays small."""

import csv
import os
import tempfile
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.recording.reader import Reader, without_collections
from ...protocol.recording.series import SERIES, Part

_LARGEST = 1 << 63
_CODES = {"int64": "q", "double": "d", "int8": "b"}  # of the module array, by Arrow's type
_ROWS = 1_000  # of the recording's table, read at once: their values fit into the processor's cache
_GROUP = 100_000  # rows of a Parquet row group


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Give the path of a temporary file beside ``path``, which replaces it if the block ends without an error.

    Raises ``UsageError`` if it cannot be written.
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


def check_outputs(outputs: Mapping[str, str], sources: Sequence[Path]) -> None:
    """Check that files (paths by option) can be written, and replace no source of the report, before writing any.

    Raises ``UsageError`` if a path is empty, a folder, a source or given twice, or its folder cannot be written.
    """
    known = {os.path.realpath(path) for path in sources}
    for option, name in outputs.items():
        path, folder = os.path.realpath(name), os.path.dirname(os.path.realpath(name))
        problems = {
            "needs a file's name": not name,
            f"{name} is a folder: name a file": os.path.isdir(path),
            f"{name} cannot be written: no such folder: {folder}": not os.path.isdir(folder),
            f"{name} cannot be written: no permission to write in {folder}": not os.access(folder, os.W_OK | os.X_OK),
            f"{name} would replace a file that is read or written too: name another": path in known,
        }
        if problem := next((text for text, found in problems.items() if found), ""):
            raise UsageError(f"{option}: {problem}")
        known.add(path)


def parts(reader: Reader, series: str) -> Iterator[Part]:
    """Yield a whole series of a recording in parts; raise ``RecordingError`` if it cannot be read."""
    after = 0
    while (part := reader.part(series, after, _ROWS)) is not None:
        yield part
        after = part.last_seq


def write_table(reader: Reader, series: str, kind: str, path: Path) -> int:
    """Write a series as ``parquet``, ``arrow`` (an IPC file) or ``csv``; return the number of rows.

    Raises ``UsageError`` if pyarrow is not installed or the file cannot be written, ``RecordingError`` if the recording
    cannot be read.
    """
    begin = _csv if kind == "csv" else _arrow(kind)
    rows = 0
    with without_collections(), replacing(path) as temporary, closing(begin(temporary, series)) as writer:
        next(writer)
        for part in parts(reader, series):
            writer.send(part.columns)
            rows += len(part.columns[0])
    return rows


Writer = Generator[None, list[list[Any]], None]  # writes the columns that it is sent; closing it completes the file


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
            texts = [name for name, kind in columns.items() if kind is str]
            opened = parquet.ParquetWriter(path, schema, write_statistics=bounded, use_dictionary=texts)
        else:
            opened = arrow.ipc.new_file(str(path), schema)
        waiting: list[Any] = []
        with opened as out:
            try:
                while True:
                    values = yield
                    arrays = [_array(arrow, one, kind) for one, kind in zip(values, schema.types, strict=True)]
                    waiting.append(arrow.Table.from_arrays(arrays, schema=schema))
                    if sum(map(len, waiting)) >= _GROUP:
                        out.write_table(arrow.concat_tables(waiting))
                        waiting.clear()
            finally:
                if waiting:
                    out.write_table(arrow.concat_tables(waiting))

    return write


def _array(arrow: Any, values: list[Any], kind: Any) -> Any:
    """Return a column of Arrow's: numbers from their bytes, as ``arrow.array`` would first import pandas."""
    code = _CODES.get(str(kind))
    if code is None:
        return arrow.array(values, kind)
    try:
        return _numbers(arrow, values, kind, code)
    except OverflowError:  # an integer above 64 bits, which no writer writes
        fits = [None if value is not None and not -_LARGEST <= value < _LARGEST else value for value in values]
        return _numbers(arrow, fits, kind, code)


def _numbers(arrow: Any, values: list[Any], kind: Any, code: str) -> Any:
    if values and values[0] is None and {*map(type, values)} == {NoneType}:
        return arrow.nulls(len(values), kind)
    present = None
    try:
        data = array(code, values)
    except TypeError:  # None among them
        data = array(code, [0 if value is None else value for value in values])
        bits = "".join(["0" if value is None else "1" for value in reversed(values)])
        present = arrow.py_buffer(int(bits, 2).to_bytes(len(values) // 8 + 1, "little"))
    return arrow.Array.from_buffers(kind, len(values), [present, arrow.py_buffer(data)])
