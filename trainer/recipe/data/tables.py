"""Reads whole files: comma- or tab-separated values, and JSON lists. Imports nothing of the training packages.

A file that cannot be read so raises ``ValueError``.
"""

import csv
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .decode import BOM, parse, utf8
from .messages import RefusedError


class Source:
    """Records of one file or data set, with their places."""

    weight = 1.0
    """Number of uses of each record in an epoch."""
    blank: Sequence[str] = ()
    """Places of blank lines."""

    def __init__(self, rows: Any, name: str, digest: str, places: Sequence[object] = ()) -> None:
        self._rows = rows
        """Sequence of records; a ``RefusedError`` in it stands for one."""
        self._name = name
        self.digest = digest
        """Hash of the content."""
        self._places = places

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if it is not one."""
        record = self._rows[index]
        if isinstance(record, RefusedError):
            raise record
        return record

    def place(self, index: int) -> str:
        """Return the place of a record: ``train.csv:12``."""
        return f"{self._name}:{self._places[index]}"


def delimited(path: Path, most: int | None = None) -> Source:
    """Read a CSV or TSV file with a header, and at most ``most`` rows; a row that is not text is refused when used."""
    csv.field_size_limit(1 << 30)
    records: list[Any] = []
    lines: list[int] = []
    content = path.read_bytes()
    # Invalid bytes become lone surrogates, so that the other rows can be used.
    text = content.removeprefix(BOM).decode(errors="surrogateescape")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",")
    try:
        header = next(reader, None)
        if not header:
            raise ValueError("has no header line")
        if problem := _problem(header):
            raise ValueError(f"line 1 {problem}")
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"its header names {json.dumps(twice)} twice")
        start = reader.line_num + 1
        for row in reader:
            if row:
                lines.append(start)
                problem = _problem(row)
                if len(row) != len(header):
                    problem = problem or f"has {len(row)} fields, and the header {len(header)}"
                records.append(RefusedError(problem) if problem else dict(zip(header, row, strict=True)))
            start = reader.line_num + 1
            if len(records) == most:
                break
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    return Source(records, path.name, hashlib.blake2b(content).hexdigest(), lines)


def _problem(row: list[str]) -> str:
    """Return the reason why a row is not text; empty if it is."""
    try:
        utf8("".join(row).encode(errors="surrogateescape"))
    except ValueError as error:
        return str(error)
    return ""


def is_json_list(path: Path) -> bool:
    """Return whether a JSON file is one list; otherwise it has one record per line."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BOM).lstrip()[:1] == b"["


def json_list(path: Path) -> Source:
    """Read a JSON file that is one list of records."""
    content = path.read_bytes()
    records = parse(utf8(content.removeprefix(BOM)))
    if not records:
        raise ValueError("holds no records")
    numbers = [f"record {number}" for number in range(1, len(records) + 1)]
    return Source(records, path.name, hashlib.blake2b(content).hexdigest(), numbers)
