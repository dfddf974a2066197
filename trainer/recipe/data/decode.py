"""Decodes bytes of a data file as text and as JSON. Imports nothing of the training packages.

Functions raise ``ValueError``, whose text has the reason.
"""

import json
from typing import Any

BOM = b"\xef\xbb\xbf"


def utf8(content: bytes) -> str:
    """Return bytes as text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError("is not text in UTF-8; convert the file, as iconv -f LATIN1 -t UTF-8 does from Latin-1")
    return text


def parse(text: str) -> Any:
    """Return the value of JSON text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"is not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError:  # Python's limit of 4,300 digits
        raise ValueError("is not JSON: a number has too many digits") from None
