"""Formats text and figures for display: safe to print, and always in the same units."""

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from unicodedata import combining, east_asian_width

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_UNSAFE = (
    *range(32), *range(127, 160),  # C0, DEL, C1
    0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x2070),  # bidirectional, deprecated formatting
    0x2028, 0x2029,  # line and paragraph separator
    0x00AD, 0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x180F), 0x3164, 0xFFA0,  # invisible letters
    0x200B, *range(0x2060, 0x2065), 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080),  # zero width, tags
    # Halves of surrogate pairs result from bytes that were not UTF-8; no terminal or file accepts them.
    *range(0xD800, 0xE000),
)  # fmt: skip
_CONTROL: dict[int, str] = dict.fromkeys(_UNSAFE, "�")
_CONTROL[0x09] = "    "
# Joiners are part of the spelling of some languages and of emoji; removing them loses nothing visible.
_CONTROL.update(dict.fromkeys((0x200C, 0x200D), ""))

_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in (*_UNSAFE, 0x200C, 0x200D) if code >= 128} | {127: "\\u007f"}

_LEAST_WIDTH = 24  # least width of a column that is wrapped


def sanitize(text: str, limit: int = 4096) -> str:
    """Return an untrusted line without escapes and control, bidirectional or invisible characters, for a terminal."""
    return _ANSI.sub("", text[: limit * 4]).translate(_CONTROL)[:limit]


def cells_of(text: str) -> int:
    """Return the width of a line in a terminal, in cells: East Asian wide letters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(each) in "WF" else not combining(each) for each in text)


def terminal_width(descriptor: int) -> int | None:
    """Return the width of a descriptor's terminal in cells; None if it has none, or one without a size."""
    try:
        return os.get_terminal_size(descriptor).columns or None
    except OSError:
        return None


def wrapped(line: str, descriptor: int) -> str:
    """Return a line in lines as wide as the terminal of a descriptor, which continue below the last of its columns.

    Columns are separated by two spaces. Unchanged where the descriptor has no terminal, or that column no room.
    """
    width = terminal_width(descriptor)
    indent = max((found.end() for found in re.finditer("  +", line)), default=2)
    if width is None or cells_of(line) <= width or width - indent < _LEAST_WIDTH:
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def first_line(text: str, limit: int = 200) -> str:
    """Return the first line of an untrusted text that is not blank, sanitised for a title."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return sanitize(line.strip(), limit)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 rank``, ``2,000 steps``, ``2 processes``."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as text for a sentence: ``rank 3``, ``ranks 0, 1 and 4``; above 4 their number: ``512 ranks``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
    return f"{len(ranks)} ranks"


def all_ranks(ranks: Iterable[int]) -> str:
    """Return all ranks as text: ``rank 3``, ``ranks 0-2, 5``; ``no ranks`` for none."""
    ordered = sorted(set(ranks))
    return f"rank{'' if len(ordered) == 1 else 's'} {_ranges(ordered)}" if ordered else "no ranks"


def ranks_counted(ranks: Iterable[int]) -> str:
    """Return the count and all ranks as text: ``rank 3``, ``7 ranks (0-2, 4-7)``."""
    ordered = sorted(set(ranks))
    return f"rank {ordered[0]}" if len(ordered) == 1 else f"{len(ordered)} ranks ({_ranges(ordered)})"


def _ranges(ordered: Sequence[int]) -> str:
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def kernel_sleep(function: str = "") -> str:
    """Return process state D as text: ``in uninterruptible sleep``, with the kernel function it waits in, if known."""
    return f"in uninterruptible sleep{f' in {function}' if function else ''}"


def escape_json(text: str) -> str:
    """Escape in JSON text the characters that ``sanitize`` removes; the decoded value is the same.

    JSON itself escapes only C0 characters; all others occur only within strings.
    """
    return text.translate(_ESCAPED)


def gib(count: float, digits: int = 2) -> str:
    """Return bytes in GiB, ``37.40 GiB``; below 0.1 GiB in MiB, below 0.1 MiB in KiB."""
    size = abs(count)
    if size >= 0.1 * 2**30:
        return f"{count / 2**30:.{digits}f} GiB"
    if size >= 0.1 * 2**20:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.1f} KiB"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: ``4 ms``, ``34 s``, ``2 m 14 s``, ``2 h 14 m``, ``3 d 4 h``."""
    if not math.isfinite(seconds):
        return "? s"
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def names_c_locale(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment asks for the C locale, in which Python itself would write UTF-8 (PEP 538, 540)."""
    coerced = bool(sys.flags.utf8_mode) and environ.get("LC_CTYPE") == "C.UTF-8"
    names = (environ.get("LC_ALL"), "" if coerced else environ.get("LC_CTYPE"), environ.get("LANG"))
    return next((name for name in names if name), "") in ("C", "POSIX")
