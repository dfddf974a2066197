"""Measures the resident part of the host's allocated memory: a page that was never written uses none."""

import ctypes
import functools
import os
from typing import Any

from .storages import Held

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SMALL = 16 * _PAGE
"""Below this a storage counts in full."""


def resident_bytes(held: dict[int, Held]) -> dict[str, int]:
    """Return by part the bytes of storages that are in physical memory, by mincore(2)."""
    sums: dict[str, int] = {}
    for address, (size, part) in held.items():
        sums[part] = sums.get(part, 0) + (size if size < _SMALL else _resident(address, size))
    return sums


def _resident(address: int, size: int) -> int:
    mincore = _mincore()
    first = address - address % _PAGE
    pages = -(-(address + size - first) // _PAGE)
    found = (ctypes.c_ubyte * pages)()
    if mincore is None or mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * _PAGE), found) != 0:
        return size
    missing = bytes(found).count(0)
    return max(0, size - missing * _PAGE)


@functools.cache
def _mincore() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
