"""Decodes bytes of a data file as text and as JSON. Imports nothing of the training packages.

Functions raise ``ValueError``, whose text has the reason.
"""

import json
from typing import Any

BOM = b"\xef\xbb\xbf"
_DEPTH = 100
"""Nesting limit, far below Python's own, which depends on the caller's depth."""


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
    deep = f"is nested too deeply: more than {_DEPTH} levels"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"is not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise ValueError(deep) from None
    except ValueError:  # Python's limit of 4,300 digits
        raise ValueError("is not JSON: a number has too many digits") from None
    if text.count("[") + text.count("{") > _DEPTH and _is_deep(value):
        raise ValueError(deep)
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH + 1):
        level = [
            below
            for found in level
            if isinstance(found, dict | list)
            for below in (found.values() if isinstance(found, dict) else found)
        ]
    return bool(level)
