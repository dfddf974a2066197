"""The first record of a file, read before anything starts: without the training packages."""

import json
from pathlib import Path
from typing import Any

from .tables import delimited, json_list


def first_record(path: Path, text_column: str) -> dict[str, Any]:
    """Read the first record of a file, without the training packages; empty for Parquet.

    Raises:
        ValueError: it is not a record; the text says why.
        OSError: the file cannot be read.
    """
    if path.suffix == ".parquet":
        return {}
    if path.suffix == ".txt":
        return {text_column: ""}
    if path.suffix in (".csv", ".tsv"):
        return delimited(path, 1.0, most=1).record(0)
    with path.open("rb") as file:
        start = file.read(1 << 20).removeprefix(b"\xef\xbb\xbf")
        if path.suffix == ".json" and start.lstrip()[:1] == b"[":
            record: Any = json_list(path, 1.0).record(0)
        else:
            line = next((line for line in start.splitlines() if line.strip()), b"")
            if len(line) == len(start):
                line += file.readline()
            record = json.loads(line.decode())
    if not isinstance(record, dict):
        raise ValueError("line 1 is not a JSON object")
    return record
