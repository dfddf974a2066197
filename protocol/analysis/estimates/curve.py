"""A peak over sequence length or micro-batch as straight pieces, each with the phase of the highest peak.

The size of every tensor of a step is affine in the length (attention without a materialised matrix). Therefore the peak
of a phase is the maximum of a few straight lines, one for each moment that can be its peak, and the peak of the step is
the maximum over the phases. The pieces are these lines between their crossovers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

Points = Mapping[int, Mapping[str, float]]
"""Peak bytes of each phase, by length (or micro-batch)."""

WHOLE_STEP = "peak"
"""Phase name of points that are known only for the whole step."""
TOLERANCE = 0.002
"""Maximum distance of a point from its line, as a share of the peak."""


class Piece(msgspec.Struct, frozen=True):
    """A straight piece of a curve, from ``start`` to ``end`` inclusive."""

    start: float
    end: float
    phase: str
    """The phase with the highest peak in this range."""
    slope_bytes: float
    """Bytes per token (or per row of the micro-batch)."""
    intercept_bytes: float
    """Value of the line at 0."""
    tied: list[str] = []
    """Other phases whose peaks are equally high in the whole range, within the tolerance."""

    def at(self, x: float) -> float:
        """Return the peak at a length, bytes."""
        return self.intercept_bytes + self.slope_bytes * x


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

    Args:
        tolerance: maximum distance of points from their piece, as a share of the peak.

    Raises:
        ValueError: no points, or a phase is missing somewhere.
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
    for x, end in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        active = [_active(one, (x + end) / 2) for one in lines.values()]
        for number, first in enumerate(active):
            for second in active[number + 1 :]:
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


def sample_curve(
    predict: Callable[[int], Mapping[str, float]], low: int, high: int, tolerance: float = 0.005, most: int = 40
) -> dict[int, Mapping[str, float]]:
    """Return points of a curve from as few calls of ``predict`` as straight pieces need to explain it.

    A range is halved if, for some phase, its middle is not on the straight line between its ends.

    Args:
        predict: peak bytes of each phase at a length; a phase is compared where both ends and the middle have it.
        tolerance: share of the peak within which the middle counts as on the line.
    """
    points: dict[int, Mapping[str, float]] = {}

    def value(x: int) -> Mapping[str, float]:
        if x not in points:
            points[x] = predict(x)
        return points[x]

    ranges = [(low, high)]
    value(low)
    value(high)
    while ranges and len(points) < most:
        start, end = ranges.pop(0)
        middle = (start + end) // 2
        if middle in (start, end):
            continue
        begin, half, stop = value(start), value(middle), value(end)
        share = (middle - start) / (end - start)
        allowed = tolerance * max(half.values())
        common = begin.keys() & half.keys() & stop.keys()
        if any(abs(begin[phase] + (stop[phase] - begin[phase]) * share - half[phase]) > allowed for phase in common):
            ranges += [(start, middle), (middle, end)]
    return dict(sorted(points.items()))
