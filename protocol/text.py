"""Text and figures for people: safe to print, and always in the same units."""

import math
import re

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "�")
_CONTROL[0x09] = "    "
_CONTROL.update(dict.fromkeys((0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)), "�"))
# Halves of surrogate pairs come from bytes that were not UTF-8; no terminal and no file takes them.
_CONTROL.update(dict.fromkeys(range(0xD800, 0xE000), "�"))


def sanitize(text: str, limit: int = 4096) -> str:
    """Make one untrusted line safe for a terminal: no escape, control, bidirectional or line-breaking characters."""
    return _ANSI.sub("", text[: limit * 4]).translate(_CONTROL)[:limit]


def gib(count: float, digits: int = 2) -> str:
    """Format bytes in GiB, ``37.40 GiB``; below 0.1 GiB in MiB, below 0.1 MiB in KiB."""
    size = abs(count)
    if size >= 0.1 * 2**30:
        return f"{count / 2**30:.{digits}f} GiB"
    if size >= 0.1 * 2**20:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.1f} KiB"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: ``4 ms``, ``34 s``, ``2 m 14 s``, ``2 h 14 m``, ``3 d 4 h``."""
    if not math.isfinite(seconds):
        return "? s"
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
