"""Files that are read whole: comma- or tab-separated values, and JSON lists."""

import csv
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from .messages import RefusedError


class Listed:
    """Records in memory, with the place of each."""

    blank = 0

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
        """Return where a record stands."""
        return self._places[index]


def delimited(path: Path, weight: float, most: int = sys.maxsize) -> Listed:
    """Read a CSV or TSV file with a header.

    Raises:
        ValueError: it has no header, or is not text.
    """
    csv.field_size_limit(1 << 30)
    records: list[Any] = []
    places: list[str] = []
    content = path.read_bytes()
    reader = csv.reader(
        io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter="\t" if path.suffix == ".tsv" else ","
    )
    try:
        header = next(reader, None)
        if not header:
            raise ValueError("has no header line")
        twice = next((name for number, name in enumerate(header) if name in header[:number]), None)
        if twice is not None:
            raise ValueError(f"its header names {json.dumps(twice)} twice")
        start = reader.line_num + 1
        for row in reader:
            if row:
                places.append(f"{path.name}:{start}")
                fits = len(row) == len(header)
                records.append(
                    dict(zip(header, row, strict=True))
                    if fits
                    else RefusedError(f"has {len(row)} fields, and the header {len(header)}")
                )
            start = reader.line_num + 1
            if len(records) >= most:
                break
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    if most == 1 and not records:
        raise ValueError("has a header and no rows")
    return Listed(records, places, weight, hashlib.blake2b(content).hexdigest())


def is_json_list(path: Path) -> bool:
    """Tell whether a JSON file is one list; else it has a record a line."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def json_list(path: Path, weight: float) -> Listed:
    """Read a JSON file that is one list of records.

    Raises:
        ValueError: it is not JSON.
    """
    content = path.read_bytes()
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is not JSON: {error.msg}") from None
    places = [f"{path.name}:record {number}" for number in range(1, len(records) + 1)]
    return Listed(records, places, weight, hashlib.blake2b(content).hexdigest())
