"""Searches of a sweep: earlier runs and predictions determine the configurations to run."""

from collections.abc import Mapping, Sequence

from ...protocol.analysis.estimates.curve import Piece
from ...protocol.analysis.sweep.search import Tried, UndecidedError, largest, phase_curve
from ...protocol.analysis.sweep.text import describe_pieces, settings_text, value_text
from ...protocol.sweep.rows import Planned, Predicted, Row, Search, Settings
from .predictions import Predictor, predicted
from .session import Session
from .spec import LENGTH

_PREDICTED_POINTS = 9
"""Number of lengths at which a searched axis is predicted."""


def search(session: Session, predictor: Predictor, wanted: Search, grid: Sequence[Settings]) -> list[str]:
    """Search along an axis for each combination of the others; return the results, a line each.

    Raises:
        StopError: from the session.
    """
    lines: list[str] = []
    for others in grid:
        where = f"{settings_text(others)}: " if others else ""
        try:
            lines.append(where + _one(session, predictor, wanted, others))
        except UndecidedError as error:
            lines.append(f"{where}cannot tell: {error}")
    return lines


def fits_the_goal(run: Planned) -> bool:
    """Return whether to run a configuration in a search for the fastest: unless it is known not to fit."""
    return run.predicted is None or run.predicted.fits is not False


def _one(session: Session, predictor: Predictor, wanted: Search, others: Settings) -> str:
    axis = wanted.axis
    known = _predictions(predictor, wanted, others)
    pieces = known[1]

    def row_of(value: int) -> Row:
        return session.measure({**others, axis: value}, 0, known[0].get(value))

    def tried(value: int) -> Tried:
        row = row_of(value)
        if row.verdict == "done":
            return Tried(True, float(row.reserved_bytes or row.peak_bytes))
        if row.verdict == "out-of-memory":
            return Tried(False, 0.0)
        raise UndecidedError(f"{axis}={value_text(value)} {row.verdict}: {row.text}")

    def peaks(value: int) -> Mapping[str, float] | None:
        row = row_of(value)
        if row.verdict == "done" and row.phase_peaks:
            return row.phase_peaks
        if row.verdict == "out-of-memory":
            return None
        raise UndecidedError(f"{axis}={value_text(value)} {row.verdict}: {row.text}")

    if wanted.goal == "largest":
        guess = max((value for value, one in known[0].items() if one.fits), default=None)
        found = largest(tried, wanted.low, wanted.high, wanted.step, guess)
        name = axis.rpartition(".")[2]
        if found.value is None:
            return f"not even {name} {value_text(wanted.low)} fits"
        more = "; larger ones may, too" if found.at_the_end else ""
        return f"the largest {name} that fits is {value_text(found.value)}{more}"
    _, curve = phase_curve(peaks, wanted.low, wanted.high, pieces)
    return describe_pieces(curve, axis) if curve else f"not even {value_text(wanted.low)} fits"


def _predictions(predictor: Predictor, wanted: Search, others: Settings) -> tuple[dict[int, Predicted], list[Piece]]:
    """Predict some values of the searched length, then those around the largest that fits; empty for other axes."""
    if not predictor.on or wanted.axis != LENGTH:
        return {}, []
    last = (wanted.high - wanted.low) // wanted.step
    numbers = sorted({round(last * part / (_PREDICTED_POINTS - 1)) for part in range(_PREDICTED_POINTS)})
    found = predictor.predict(others, [wanted.low + number * wanted.step for number in numbers])
    if found is None:
        return {}, []
    known = {point.sequence_length: predicted(point) for point in found.points}
    if wanted.goal == "largest":
        guess = _crossing(known, wanted, predictor.capacity_bytes)
        if guess is not None and guess not in known:
            known |= {point.sequence_length: predicted(point) for point in predictor.points(others, [guess])}
    return known, found.pieces


def _crossing(known: Mapping[int, Predicted], wanted: Search, capacity: int | None) -> int | None:
    """Return the value at which a line from the last fitting to the first failing value reaches the capacity."""
    fits = max((value for value, one in known.items() if one.fits), default=None)
    over = min((value for value, one in known.items() if one.fits is False), default=None)
    if fits is None or over is None or capacity is None:
        return None
    low, high = known[fits].nvml_bytes, known[over].nvml_bytes
    share = (capacity - low) / (high - low) if high > low else 0.0
    value = fits + min(max(share, 0.0), 1.0) * (over - fits)
    return wanted.low + int((value - wanted.low) // wanted.step) * wanted.step
