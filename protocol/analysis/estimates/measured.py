"""Reads other tools' measurements from CSV files, with a mapping of their columns.

Two layouts are supported: one row per length (and iteration) with a column for each GPU, ``gpu_{rank}_allocated_mib``,
and one row per length, iteration and rank.
"""

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from .curve import WHOLE_STEP

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_RANK = "{rank}"
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


class CsvMapping(msgspec.Struct, frozen=True):
    """Mapping of columns to their meaning."""

    length: str
    """Column with the sequence length, or another quantity of the horizontal axis."""
    figures: dict[str, str]
    """Columns by the figure's name (``allocated``, ``reserved`` ...); ``{rank}`` stands for a GPU's number."""
    rank: str = ""
    """Column with the rank, if each rank has its own rows."""
    iteration: str = ""
    """Column with the iteration, if a length was measured several times."""
    unit: str = "MiB"
    """Unit of all figures; one of ``UNITS``."""


class Measurement(msgspec.Struct, frozen=True):
    """Figures of one rank in one row."""

    length: int
    rank: int
    iteration: int
    figures: dict[str, int]
    """Bytes by the figure's name."""


class Band(msgspec.Struct, frozen=True):
    """A figure at one length over the ranks, bytes."""

    length: int
    lowest: float
    median: float
    highest: float
    ranks: int


class HeaderError(ValueError):
    """The file has no header with names separated by commas."""


def read_csv(text: str, mapping: CsvMapping) -> list[Measurement]:
    """Return the measurements of a CSV file in the order of its rows, and of ranks within a row.

    Raises:
        ValueError: the file does not match the mapping; one line with the file's line and column.
    """
    if mapping.unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, not {mapping.unit}")
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
    header = _header(rows)
    columns = _Columns(header, mapping)
    found: list[Measurement] = []
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        line = rows.line_num
        if len(row) != len(header):
            raise ValueError(f"line {line}: {len(row)} columns, the header has {len(header)}")
        found.extend(columns.measurements(row, line))
    if not found:
        raise ValueError("no measurements: the file has no rows below its header")
    return found


def guess_mapping(text: str) -> CsvMapping:
    """Return a mapping guessed from the header's names.

    Raises:
        ValueError: no column is recognised as a length, or none as a figure in bytes.
    """
    header = _header(csv.reader(io.StringIO(text.removeprefix("\ufeff"))))
    plain = {name: re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in header}
    length = _first(plain, r"(seq(uence)?_?)?len(gth)?|seq(uence)?|tokens|context(_length)?|x")
    rank = _first(plain, r"rank|gpu|device")
    iteration = _first(plain, r"iter(ation)?|step|repeat|run")
    figures: dict[str, str] = {}
    for name, words in plain.items():
        figure = next((one for one in ("allocated", "reserved", "active", "nvml") if one in words.split("_")), None)
        if figure is None:
            continue
        if "peak" in words.split("_") or "max" in words.split("_"):
            figure = f"{figure}_peak"
        pattern = name if rank else re.sub(r"(?<![0-9])\d+(?![0-9])", _RANK, name, count=1)
        figures.setdefault(figure, pattern)
    if not length or not figures:
        what = "length" if not length else "figure (allocated, reserved, active, nvml)"
        raise ValueError(f"no column looks like a {what} among {', '.join(header) or 'none'}: give a mapping")
    words = re.sub(r"(?<![A-Za-z])bytes?(?![A-Za-z])", "B", " ".join(header), flags=re.IGNORECASE)
    unit = next((one for one in UNITS if re.search(rf"(?<![A-Za-z]){one}(?![A-Za-z])", words, re.IGNORECASE)), "MiB")
    return CsvMapping(length, figures, rank, iteration, unit)


def _header(rows: Iterator[list[str]]) -> list[str]:
    """Return the names in a file's first line.

    Raises:
        HeaderError: the file is empty, or its columns are not separated by commas.
    """
    header = [name.strip() for name in next(rows, [])]
    if not any(header):
        raise HeaderError("is empty, or has no header in its first line")
    other = next((name for mark, name in _SEPARATORS.items() if len(header) == 1 and mark in header[0]), None)
    if other is not None:
        raise HeaderError(f"its columns are separated by {other}, not by commas: write it with commas")
    return header


def bands(measurements: Iterable[Measurement], figure: str, warm_up: int = 0) -> list[Band]:
    """Return the lowest, median and highest rank at each length, ordered by length.

    Args:
        warm_up: number of first iterations of each length and rank to omit; at least one iteration is kept.

    Raises:
        ValueError: no measurement has that figure.
    """
    of: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for one in measurements:
        if figure in one.figures:
            of[one.length][one.rank].append((one.iteration, one.figures[figure]))
    if not of:
        raise ValueError(f"no measurement has a figure {figure}")
    found: list[Band] = []
    for length in sorted(of):
        # A rank's peak is the highest of its iterations.
        peaks = [max(size for _, size in sorted(rows)[min(warm_up, len(rows) - 1) :]) for rows in of[length].values()]
        found.append(Band(length, min(peaks), statistics.median(peaks), max(peaks), len(peaks)))
    return found


def points(measured: Iterable[Band], phase: str = WHOLE_STEP) -> dict[int, dict[str, float]]:
    """Return the highest rank's peaks as points of a curve with one phase, for ``curve.pieces``."""
    return {band.length: {phase: band.highest} for band in measured}


class _Columns:
    """Positions of a file's columns."""

    def __init__(self, header: list[str], mapping: CsvMapping) -> None:
        self._mapping = mapping
        self._header = header
        self._length = self._place(mapping.length)
        self._rank = self._place(mapping.rank) if mapping.rank else -1
        self._iteration = self._place(mapping.iteration) if mapping.iteration else -1
        self._figures: dict[int, dict[str, int]] = defaultdict(dict)
        """Columns by rank and figure; rank -1 if a row belongs to one rank."""
        if not mapping.figures:
            raise ValueError("the mapping names no figure")
        for figure, name in mapping.figures.items():
            for rank, place in self._places(name):
                self._figures[rank][figure] = place

    def measurements(self, row: list[str], line: int) -> Iterable[Measurement]:
        length = self._whole(row, self._length, line)
        iteration = self._whole(row, self._iteration, line) if self._iteration >= 0 else 0
        for rank, columns in sorted(self._figures.items()):
            figures = {
                figure: round(self._number(row, place, line) * UNITS[self._mapping.unit])
                for figure, place in columns.items()
                if row[place].strip()
            }
            own = max(0, rank) if self._rank < 0 else self._whole(row, self._rank, line)
            if figures:
                yield Measurement(length, own, iteration, figures)

    def _place(self, name: str) -> int:
        if name not in self._header:
            raise ValueError(f"column {name} is not in the file, which has {', '.join(self._header) or 'no header'}")
        if self._header.count(name) > 1:
            raise ValueError(f"column {name} is in the file {self._header.count(name)} times")
        return self._header.index(name)

    def _places(self, name: str) -> list[tuple[int, int]]:
        if _RANK not in name:
            return [(-1, self._place(name))]
        pattern = re.compile(re.escape(name).replace(re.escape(_RANK), r"(\d+)", 1))
        found = [(int(match[1]), at) for at, one in enumerate(self._header) if (match := pattern.fullmatch(one))]
        if not found:
            raise ValueError(f"no column matches {name} in the file, which has {', '.join(self._header)}")
        return found

    def _number(self, row: list[str], place: int, line: int) -> float:
        try:
            number = float(row[place])
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise ValueError(
                f"line {line}, column {self._header[place]}: {row[place][:40]!r} is no number of 0 or more"
            )
        return number

    def _whole(self, row: list[str], place: int, line: int) -> int:
        number = self._number(row, place, line)
        if number != int(number):
            raise ValueError(f"line {line}, column {self._header[place]}: {row[place][:40]!r} is no whole number")
        return int(number)


def _first(plain: dict[str, str], pattern: str) -> str:
    return next((name for name, words in plain.items() if re.fullmatch(pattern, words)), "")
