"""Reads whole files: comma- or tab-separated values, and JSON lists."""

import csv
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from .decode import BOM, parse, utf8
from .messages import RefusedError


class Listed:
    """Records in memory, with the place of each."""

    def __init__(self, records: list[Any], places: list[str], weight: float, digest: str) -> None:
        self.weight = weight
        self.digest = digest
        self._records = records
        self._places = places

    def __len__(self) -> int:
        return len(self._records)

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if the row does not fit the header."""
        record = self._records[index]
        if isinstance(record, RefusedError):
            raise record
        return record

    def place(self, index: int) -> str:
        """Return the place of a record."""
        return self._places[index]


def delimited(path: Path, weight: float, most: int = sys.maxsize) -> Listed:
    """Read a CSV or TSV file with a header; a row that is not text is refused when it is read.

    Raises:
        ValueError: it has no header, or a header that is not text.
    """
    csv.field_size_limit(1 << 30)
    records: list[Any] = []
    places: list[str] = []
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
        twice = next((name for number, name in enumerate(header) if name in header[:number]), None)
        if twice is not None:
            raise ValueError(f"its header names {json.dumps(twice)} twice")
        start = reader.line_num + 1
        for row in reader:
            if row:
                places.append(f"{path.name}:{start}")
                problem = _problem(row)
                if len(row) != len(header):
                    problem = problem or f"has {len(row)} fields, and the header {len(header)}"
                records.append(RefusedError(problem) if problem else dict(zip(header, row, strict=True)))
            start = reader.line_num + 1
            if len(records) >= most:
                break
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    if most == 1 and not records:
        raise ValueError("has a header and no rows")
    return Listed(records, places, weight, hashlib.blake2b(content).hexdigest())


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


def json_list(path: Path, weight: float) -> Listed:
    """Read a JSON file that is one list of records.

    Raises:
        ValueError: it is not JSON, or an empty list.
    """
    content = path.read_bytes()
    records = parse(utf8(content.removeprefix(BOM)))
    if not records:
        raise ValueError("holds no records")
    places = [f"{path.name}:record {number}" for number in range(1, len(records) + 1)]
    return Listed(records, places, weight, hashlib.blake2b(content).hexdigest())
