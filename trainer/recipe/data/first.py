"""Reads the first record of a file before anything starts, without the training packages."""

from pathlib import Path
from typing import Any

from .decode import BOM, parse, utf8
from .messages import RefusedError
from .tables import delimited, is_json_list, json_list


def first_record(path: Path, text_column: str) -> dict[str, Any]:
    """Return the first record of a file that is not Parquet.

    Raises:
        ValueError: it is not a record; the text has the reason.
        OSError: the file cannot be read.
    """
    if path.suffix in (".csv", ".tsv"):
        rows = delimited(path, most=1)
        if not len(rows):
            raise ValueError("has a header and no rows")
        try:
            return rows.record(0)
        except RefusedError as refusal:
            raise ValueError(f"{rows.place(0)} {refusal}") from None
    if path.suffix == ".json" and is_json_list(path):
        where, record = "its first record", json_list(path).record(0)
    else:
        with path.open("rb") as file:
            number, line = next(((number, line) for number, line in enumerate(file, 1) if line.strip()), (1, b""))
        where, as_lines = f"line {number}", ""
        try:
            text = utf8(line.removeprefix(BOM if number == 1 else b"").rstrip(b"\r\n"))
            if path.suffix == ".txt":
                return {text_column: text}
            as_lines = "; one record a line is read"
            record = parse(text)
        except ValueError as error:
            raise ValueError(f"{where} {error}{as_lines}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object")
    return record
