"""Reads the first record of a file before anything starts, without the training packages."""

from pathlib import Path
from typing import Any

from .decode import BOM, parse, utf8
from .messages import RefusedError
from .tables import delimited, is_json_list, json_list


def first_record(path: Path, text_column: str) -> dict[str, Any]:
    """Return the first record of a file; empty for Parquet.

    Raises:
        ValueError: it is not a record; the text has the reason.
        OSError: the file cannot be read.
    """
    if path.suffix == ".parquet":
        return {}
    if path.suffix in (".csv", ".tsv"):
        rows = delimited(path, 1.0, most=1)
        try:
            return rows.record(0)
        except RefusedError as refusal:
            raise ValueError(f"{rows.place(0)} {refusal}") from None
    if path.suffix == ".json" and is_json_list(path):
        where, record = "its first record", json_list(path, 1.0).record(0)
    else:
        with path.open("rb") as file:
            number, line = next(((number, line) for number, line in enumerate(file, 1) if line.strip()), (1, b""))
        where = f"line {number}"
        try:
            text = utf8(line.removeprefix(BOM if number == 1 else b"").rstrip(b"\r\n"))
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        if path.suffix == ".txt":
            return {text_column: text}
        try:
            record = parse(text)
        except ValueError as error:
            raise ValueError(f"{where} {error}; one record a line is read") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object")
    return record
