"""Memory of a training: a peak over lengths as straight pieces, other tools' measurements, memory outside PyTorch.

A peak over sequence length or micro-batch as straight pieces, each with the phase of the highest peak.

The size of every tensor of a step is affine in the length (attention without a materialised matrix). Therefore the
peak of a phase is the maximum of a few straight lines, one for each moment that can be its peak, and the peak of
the step is the maximum over the phases. The pieces are these lines between their crossovers.

Reads other tools' measurements from CSV files, with a mapping of their columns.

Two layouts are supported: one row per length (and iteration) with a column for each GPU,
``gpu_{rank}_allocated_mib``, and one row per length, iteration and rank. A file without a header has the length,
allocated and reserved memory of each GPU in MiB, and may end with the iterations per second. A size of 0 is no
measurement: a rank that writes a column for each GPU has figures of its own only.
"""

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, pairwise
from typing import NamedTuple

import msgspec

Points = Mapping[int, Mapping[str, float]]  # peak bytes of each phase, by length (or micro-batch)
WHOLE_STEP = "peak"  # phase name of points that are known only for the whole step
_MOST_POINTS = 40
_ON_LINE = 0.005  # share of the peak within which the middle of a range counts as on the line between its ends
TOLERANCE = 0.002  # maximum distance of a point from its line, as a share of the peak
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_RANK = "{rank}"
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
RATES = ("its", "iterations_per_second")
"""Names of figures that are no sizes: iterations per second. The first is that of a column recognised as one."""
_RATE = r"its|(its?|iter(ation)?s?|steps?)_(per_)?(s|sec|second)"
_UNNAMED = ("gpu_{rank}_allocated_MiB", "gpu_{rank}_reserved_MiB")
"""Columns of each GPU, in their order, of a file without a header."""
_CONTEXT_BYTES = 1256 << 20
"""One rank: context, loaded modules, cuBLAS, a communicator without peers. An out-of-memory event on an H200 with
18,904 MiB reserved left 128,973,930,496 bytes free of 139.80 GiB (torch 2.11, CUDA 13, DeepSpeed 0.19)."""
_PEER_BYTES = 586 << 20
"""Per neighbour in NCCL's ring. Each of four ranks on NVSwitch has two: 2,428 MiB in 8 of 8 measured ranks."""
_OFFLOAD_BYTES = 42 << 20  # additional bytes with the optimizer on the CPU: 2,470 MiB in total in 4 of 4 measured ranks
WEIGHT_BYTES, ADAM_BYTES = 2, 12  # bytes per parameter: bf16 weight; fp32 master copy with Adam's two fp32 states


def checkpoint_bytes(
    parameters: int,
    trainable: int,
    kept: int,
    weight_bytes: int = WEIGHT_BYTES,
    state_bytes: float = ADAM_BYTES,
) -> int:
    """Return the disk space of checkpoints, over all ranks.

    ``kept``: number of checkpoints kept; while one is written there is one more. ``state_bytes``: optimizer states per
    trained parameter, including the master copy; 0: the checkpoint has none.
    """
    return (parameters * weight_bytes + round(trainable * state_bytes)) * (kept + 1)


class Piece(msgspec.Struct, frozen=True):
    """A straight piece of a curve, from ``start`` to ``end`` inclusive."""

    start: float
    end: float
    phase: str  # the phase with the highest peak in this range
    slope_bytes: float  # bytes per token (or per row of the micro-batch)
    intercept_bytes: float  # value of the line at 0
    tied: list[str] = []  # other phases whose peaks are equally high in the whole range, within the tolerance

    def at(self, x: float) -> float:
        """Return the peak at a length, bytes."""
        return self.intercept_bytes + self.slope_bytes * x


def reaches(curve: Sequence[Piece], size: float) -> float | None:
    """Return the lowest length at which a curve is at least ``size`` bytes; None: it is below everywhere."""
    for piece in curve:
        if piece.at(piece.start) >= size:
            return piece.start
        if piece.at(piece.end) >= size:
            return (size - piece.intercept_bytes) / piece.slope_bytes
    return None


class Line(NamedTuple):
    """A straight line over a range of points."""

    start: float
    end: float
    slope: float
    intercept: float

    def at(self, x: float) -> float:
        """Return the value at a length."""
        return self.intercept + self.slope * x


def pieces(points: Points, tolerance: float = TOLERANCE) -> list[Piece]:
    """Return the pieces of the highest phase's peak, from the lowest length to the highest.

    ``tolerance``: maximum distance of points from their piece, as a share of the peak. Raises ``ValueError`` if there
    are no points, or a phase is missing somewhere.
    """
    if not points:
        raise ValueError("a curve needs at least one point")
    lengths = sorted(points)
    phases = list(points[lengths[0]])
    if not phases or any(set(points[x]) != set(phases) for x in lengths):
        raise ValueError("every point must have the same phases")
    highest = max(max(points[x].values()) for x in lengths)
    lines = {phase: fit_lines([(x, points[x][phase]) for x in lengths], tolerance * highest) for phase in phases}
    return _envelope(lines, lengths[0], lengths[-1], tolerance * highest)


def fit_lines(values: Sequence[tuple[float, float]], tolerance: float) -> list[Line]:
    """Return straight lines within ``tolerance`` of all points, in order, each as long as possible.

    If one line ends and the next one starts between two points, both are extended to their crossing.
    """
    runs = _runs(values, tolerance)
    lines: list[Line] = []
    at = 0
    while at < len(runs):
        line = _regress(runs[at])
        gap = at > 0 and len(runs[at]) == 2 and at + 1 < len(runs)
        after = _regress(runs[at + 1]) if gap else line
        crossing = _crossing(lines[-1], after) if gap and lines else None
        if crossing is not None and line.start < crossing < line.end:
            lines[-1] = lines[-1]._replace(end=crossing)
            lines.append(after._replace(start=crossing))
            at += 2
        else:
            lines.append(line)
            at += 1
    return lines


def _runs(values: Sequence[tuple[float, float]], tolerance: float) -> list[Sequence[tuple[float, float]]]:
    """Split the points into runs that are each on a straight line; adjacent runs share a point."""
    runs: list[Sequence[tuple[float, float]]] = []
    begin, last = 0, len(values) - 1
    while begin < last or not runs:
        end, step = min(begin + 1, last), 1
        while step:
            if end + step <= last and _holds(values[begin : end + step + 1], tolerance):
                end += step
                step *= 2
            else:
                step //= 2
        runs.append(values[begin : end + 1])
        begin = end
    return runs


def _crossing(before: Line, after: Line) -> float | None:
    """Return where a steeper line crosses ``before``; None if ``after`` is not steeper."""
    if after.slope <= before.slope:
        return None
    return (before.intercept - after.intercept) / (after.slope - before.slope)


def _regress(values: Sequence[tuple[float, float]]) -> Line:
    """Return the line of least squares."""
    count = len(values)
    middle = sum(x for x, _ in values) / count
    mean = sum(y for _, y in values) / count
    spread = sum((x - middle) ** 2 for x, _ in values)
    slope = sum((x - middle) * (y - mean) for x, y in values) / spread if spread else 0.0
    return Line(values[0][0], values[-1][0], slope, mean - slope * middle)


def _holds(values: Sequence[tuple[float, float]], tolerance: float) -> bool:
    line = _regress(values)
    return all(abs(line.at(x) - y) <= tolerance for x, y in values)


def _envelope(lines: Mapping[str, Sequence[Line]], low: float, high: float, slack: float) -> list[Piece]:
    """Return the maximum of the phases' lines, cut where another one becomes the highest by more than ``slack``."""
    cuts = {low, high} | {line.start for one in lines.values() for line in one}
    for x, end in pairwise(sorted(cuts)):
        for first, second in combinations([_active(one, (x + end) / 2) for one in lines.values()], 2):
            if first.slope != second.slope:
                at = (second.intercept - first.intercept) / (first.slope - second.slope)
                if x < at < end:
                    cuts.add(at)
    found: list[Piece] = []
    ordered = sorted(cuts)
    for x, end in zip(ordered, ordered[1:] or ordered, strict=False):
        middle = (x + end) / 2
        current = {name: _active(one, middle) for name, one in lines.items()}
        top = [max(line.at(place) for line in current.values()) for place in (x, end)]
        highest = max(current, key=lambda name: current[name].at(middle))
        tied = [name for name, line in current.items() if min(line.at(x) - top[0], line.at(end) - top[1]) >= -slack]
        last = found[-1] if found else None
        # Among equals the previous phase is kept, because a change due to noise is not a crossover.
        phase = last.phase if last is not None and last.phase in tied else highest
        line = current[phase]
        others = [name for name in tied if name != phase]
        if last is not None and (last.phase, last.slope_bytes, last.intercept_bytes) == (phase, *line[2:]):
            both = [name for name in last.tied if name in others]
            found[-1] = msgspec.structs.replace(last, end=end, tied=both)
        else:
            found.append(Piece(x, end, phase, line.slope, line.intercept, others))
    return found


def _active(lines: Sequence[Line], x: float) -> Line:
    return next((line for line in lines if x <= line.end), lines[-1])


def sample_curve(predict: Callable[[int], Mapping[str, float]], low: int, high: int) -> dict[int, Mapping[str, float]]:
    """Return points of a curve from as few calls of ``predict`` as straight pieces need to explain it.

    A range is halved if, for some phase, its middle is not on the straight line between its ends. ``predict`` returns
    peak bytes of each phase at a length; a phase is compared where both ends and the middle have it.
    """
    points: dict[int, Mapping[str, float]] = {}

    def value(x: int) -> Mapping[str, float]:
        if x not in points:
            points[x] = predict(x)
        return points[x]

    ranges = [(low, high)]
    value(low)
    value(high)
    while ranges and len(points) < _MOST_POINTS:
        start, end = ranges.pop(0)
        middle = (start + end) // 2
        if middle in (start, end):
            continue
        begin, half, stop = value(start), value(middle), value(end)
        share = (middle - start) / (end - start)
        allowed = _ON_LINE * max(half.values())
        common = begin.keys() & half.keys() & stop.keys()
        if any(abs(begin[phase] + (stop[phase] - begin[phase]) * share - half[phase]) > allowed for phase in common):
            ranges += [(start, middle), (middle, end)]
    return dict(sorted(points.items()))


class CsvMapping(msgspec.Struct, frozen=True):
    """Mapping of columns to their meaning."""

    length: str  # column with the sequence length, or another quantity of the horizontal axis
    figures: dict[str, str]  # columns by the figure's name (`allocated`, `its` ...); `{rank}` stands for a GPU's number
    rank: str = ""  # column with the rank, if each rank has its own rows
    iteration: str = ""  # column with the iteration, if a length was measured several times
    unit: str = "MiB"  # unit of all sizes; one of `UNITS`


class Measurement(msgspec.Struct, frozen=True):
    """Figures of one rank in one row."""

    length: int
    rank: int
    iteration: int
    figures: dict[str, float]  # bytes, or iterations/s of `RATES`, by the figure's name. Empty: out of memory


class Band(msgspec.Struct, frozen=True):
    """A figure at one length over the ranks, bytes or iterations per second."""

    length: int
    lowest: float
    median: float
    highest: float
    ranks: int


class HeaderError(ValueError):
    """The file has no header with names separated by commas."""


def read_csv(text: str, mapping: CsvMapping) -> list[Measurement]:
    """Return the measurements of a CSV file in the order of its rows, and of ranks within a row.

    Raises ``ValueError`` if it does not match the mapping: one line with the file's line and column.
    """
    if mapping.unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, not {mapping.unit}")
    header, rows = _open(text, mapping.length)
    columns = _Columns(header, mapping)
    found: list[Measurement] = []
    line = 0
    for line, row in rows:
        if len(row) != len(header) and not _is_oom(row):
            raise ValueError(f"line {line}: {len(row)} columns, the first line has {len(header)}")
        found.extend(columns.measurements(row, line))
    if not found:
        raise ValueError(f"no measurements: {'every figure is 0 or empty' if line else 'no rows below the header'}")
    return found


def guess_mapping(text: str, length: str = "") -> CsvMapping:
    """Return a mapping guessed from the header's names.

    ``length``: column with the length, which is not guessed then; in a file without a header, the first one's name.
    Raises ``ValueError`` if no column is recognised as a length, or none as a figure.
    """
    header, _ = _open(text, length)
    plain = {name: re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in header}
    length = length or _first(plain, r"(seq(uence)?_?)?len(gth)?|seq(uence)?|tokens|context(_length)?|x")
    rank = _first(plain, r"rank|gpu|device")
    iteration = _first(plain, r"iter(ation)?|step|repeat|run")
    figures: dict[str, str] = {}
    for name, words in plain.items():
        parts = words.split("_")
        figure = next((one for one in ("allocated", "reserved", "active", "nvml") if one in parts), None)
        if figure is not None:
            figure += "_peak" if "peak" in parts or "max" in parts else ""
            pattern = name if rank else re.sub(r"(?<![0-9])\d+(?![0-9])", _RANK, name, count=1)
            figures.setdefault(figure, pattern)
        elif name not in (length, iteration) and re.fullmatch(_RATE, words):
            figures.setdefault(RATES[0], name)
    if not length or not figures:
        what = "length" if not length else f"figure (allocated, reserved, active, nvml, {', '.join(RATES)})"
        raise ValueError(f"no column looks like a {what} among {', '.join(header) or 'none'}")
    words = re.sub(r"(?<![A-Za-z])bytes?(?![A-Za-z])", "B", " ".join(header), flags=re.IGNORECASE)
    unit = next((one for one in UNITS if re.search(rf"(?<![A-Za-z]){one}(?![A-Za-z])", words, re.IGNORECASE)), "MiB")
    return CsvMapping(length, figures, rank, iteration, unit)


def _open(text: str, length: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of a file's columns, and its other rows that are not blank with their lines.

    ``length``: name of the first column if the first line has numbers instead of names. Raises ``HeaderError`` if the
    file is empty, is not separated by commas, or has neither names nor the columns of a file without them.
    """
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
    first = [name.strip() for name in next(rows, [])]
    if not any(first):
        raise HeaderError("is empty, or has no header in its first line")
    other = next((name for mark, name in _SEPARATORS.items() if len(first) == 1 and mark in first[0]), None)
    if other is not None:
        raise HeaderError(f"its columns are separated by {other}, not by commas: write it with commas")
    below = ((rows.line_num, row) for row in rows if any(cell.strip() for cell in row))
    if not all(_is_number(cell) for cell in first if cell):
        return first, below
    gpus, rates = divmod(len(first) - 1, len(_UNNAMED))
    if not gpus:
        raise HeaderError(
            f"has no header, and {len(first)} columns: without one it must have the length, allocated and reserved "
            "memory of each GPU in MiB, and iterations per second; add a line with the columns' names"
        )
    names = [name.replace(_RANK, str(gpu)) for gpu in range(gpus) for name in _UNNAMED]
    return [length or "sequence_length", *names, *RATES[:rates]], chain([(1, first)], below)


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _is_oom(row: Sequence[str]) -> bool:
    """Return whether a row has a length, and instead of its figures that the memory did not suffice."""
    filled = [cell.strip().lower() for cell in row[1:] if cell.strip()]
    return filled in (["oom"], ["out of memory"])


def bands(measurements: Iterable[Measurement], figure: str) -> list[Band]:
    """Return the lowest, median and highest rank at each length, ordered by length.

    A rank's size is the highest of its iterations, its rate their median. Raises ``ValueError`` if no measurement has
    that figure.
    """
    of: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in measurements:
        if figure in one.figures:
            of[one.length][one.rank].append(one.figures[figure])
    if not of:
        raise ValueError(f"no measurement has a figure {figure}")
    of_rank = statistics.median if figure in RATES else max
    found = [(length, sorted(map(of_rank, ranks.values()))) for length, ranks in sorted(of.items())]
    return [Band(length, peaks[0], statistics.median(peaks), peaks[-1], len(peaks)) for length, peaks in found]


class _Columns:
    """Positions of a file's columns."""

    def __init__(self, header: list[str], mapping: CsvMapping) -> None:
        self._header = header
        self._unit = UNITS[mapping.unit]
        self._length = self._place(mapping.length)
        self._rank = self._place(mapping.rank) if mapping.rank else -1
        self._iteration = self._place(mapping.iteration) if mapping.iteration else -1
        self._figures: dict[int, dict[str, int]] = defaultdict(dict)
        """Columns by rank and figure; rank -1 if a row belongs to one rank."""
        self._shared: dict[str, int] = {}  # columns of rates that belong to each rank with other figures in the row
        if not mapping.figures:
            raise ValueError("the mapping names no figure")
        for figure, name in mapping.figures.items():
            for rank, place in self._places(name):
                self._figures[rank][figure] = place
        if len(self._figures) > 1:
            self._shared = {name: self._figures[-1].pop(name) for name in RATES if name in self._figures[-1]}

    def measurements(self, row: list[str], line: int) -> Iterable[Measurement]:
        def number(place: int, *, whole: bool = True) -> float:
            try:
                found = float(row[place])
            except ValueError:
                found = math.nan
            valid = math.isfinite(found) and found >= 0
            if not valid or (whole and found != int(found)):
                what = "whole number" if valid else "number of 0 or more"
                raise ValueError(f"line {line}, column {self._header[place]}: {row[place][:40]!r} is no {what}")
            return found

        def measured(columns: Mapping[str, int]) -> dict[str, float]:
            given = {figure: number(place, whole=False) for figure, place in columns.items() if row[place].strip()}
            sizes = {figure: found if figure in RATES else round(found * self._unit) for figure, found in given.items()}
            return {figure: found for figure, found in sizes.items() if found}

        if _is_oom(row):
            yield Measurement(int(number(self._length)), 0, 0, {})
            return
        length = int(number(self._length))
        iteration = int(number(self._iteration)) if self._iteration >= 0 else 0
        shared = measured(self._shared)
        for rank, columns in sorted(self._figures.items()):
            own = max(0, rank) if self._rank < 0 else int(number(self._rank))
            if figures := measured(columns):
                yield Measurement(length, own, iteration, figures | shared)

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


def _first(plain: dict[str, str], pattern: str) -> str:
    return next((name for name, words in plain.items() if re.fullmatch(pattern, words)), "")


class Figure(msgspec.Struct, frozen=True):
    """An estimate with its expected error and its basis."""

    value: float  # in the unit stated by the function that returns it
    error: float  # expected error as a share of the value, 0.05 for 5 %
    basis: str  # the measurement or computation behind it, for display


def beside_pytorch(ranks_on_host: int, hosts: int = 1, offload: bool = False, device: str = "NVIDIA H200") -> Figure:
    """Return the bytes that one process, with its optimizer on the CPU (``offload``), uses outside PyTorch's memory."""
    ranks = ranks_on_host * hosts
    neighbours = min(max(0, ranks - 1), 2)
    value = _CONTEXT_BYTES + neighbours * _PEER_BYTES + (_OFFLOAD_BYTES if offload else 0)
    if hosts == 1 and any(name in device for name in ("H200", "H100", "H800")):
        if ranks_on_host in (1, 4):
            return Figure(value, 0.03, "measured on H200s, torch 2.11, CUDA 13")
        if ranks_on_host < 4:
            return Figure(value, 0.1, "between one and four ranks measured on H200s, by neighbours in NCCL's ring")
        return Figure(value, 0.3, "four ranks measured on H200s; more may use NVLink SHARP or trees")
    where = "several hosts" if hosts > 1 else "this GPU"
    return Figure(value, 0.4, f"measured on H200s of one host, not on {where}")
