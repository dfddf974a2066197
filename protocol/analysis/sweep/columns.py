"""Figures of a sweep's rows, selectable by name as columns of its table.

A name is a figure of the whole run (``peak``, ``loss``) or of a phase (``backward.peak``, ``forward.ms``).
"""

from collections.abc import Callable, Sequence

from ...messages.telemetry import PHASES
from ...sweep.rows import PhaseFigures, RankRow, Row
from ...text import gib

Figure = float | None
_PHASES = tuple(phase for phase in PHASES if phase != "init")


def _highest(of: Callable[[RankRow], float]) -> Callable[[Row], Figure]:
    """Return a function for a figure's maximum over ranks; it returns None for a row without ranks."""
    return lambda row: max((value for rank in row.ranks if (value := of(rank))), default=None)


def _loss(row: Row) -> Figure:
    losses = [rank.loss for rank in row.ranks if rank.loss is not None]
    return sum(losses) / len(losses) if losses else None


_OF_A_RUN: dict[str, Callable[[Row], Figure]] = {
    "peak": _highest(lambda rank: rank.peak_bytes),
    "reserved": _highest(lambda rank: rank.reserved_peak_bytes),
    "nvml": _highest(lambda rank: rank.nvml_bytes),
    "step_ms": _highest(lambda rank: rank.step_ms),
    "tokens_per_second": lambda row: row.tokens_per_second or None,
    "loss": _loss,
    "seconds": lambda row: row.seconds,
}
_OF_A_PHASE: dict[str, Callable[[PhaseFigures], float]] = {
    "peak": lambda figures: figures.peak_bytes,
    "allocated": lambda figures: figures.allocated_peak_bytes,
    "reserved": lambda figures: figures.reserved_peak_bytes,
    "ms": lambda figures: figures.device_ms if figures.device_ms is not None else figures.host_ms,
}
NAMES = (*_OF_A_RUN, *(f"PHASE.{name}" for name in _OF_A_PHASE))
"""Valid column names."""


def check(name: str) -> None:
    """Check the name of a column.

    Raises:
        ValueError: no figure has this name; the text lists the valid names.
    """
    phase, dot, figure = name.partition(".")
    if name in _OF_A_RUN or (dot and phase in _PHASES and figure in _OF_A_PHASE):
        return
    raise ValueError(f"are {', '.join(NAMES)} (PHASE: {', '.join(_PHASES)})")


def value(row: Row, name: str) -> Figure:
    """Return a figure of a row: bytes, milliseconds, tokens per second, seconds or the loss; None: not available.

    Over several ranks it is the maximum; for tokens per second the sum, for the loss the mean.
    """
    if name in _OF_A_RUN:
        return _OF_A_RUN[name](row)
    phase, _, figure = name.partition(".")
    found = [_OF_A_PHASE[figure](rank.phases[phase]) for rank in row.ranks if phase in rank.phases]
    return max((one for one in found if one), default=None)


def pooled_text(rows: Sequence[Row], name: str) -> str:
    """Return a figure over the finished repeats of a configuration, formatted for a table; empty: none."""
    found = (value(row, name) for row in rows if row.verdict == "done")
    return text([one for one in found if one is not None], name)


def text(values: Sequence[float], name: str) -> str:
    """Return a figure over repeats, formatted for a table: the median, and half the range if they differ."""
    if not values:
        return ""
    ordered = sorted(values)
    count = len(ordered)
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    figure = name.rpartition(".")[2]
    if figure in ("peak", "allocated", "reserved", "nvml"):
        return gib(round(median))
    digits = {"loss": 4, "tokens_per_second": 0}.get(figure, 1)
    half = (ordered[-1] - ordered[0]) / 2
    return f"{median:,.{digits}f}{f' ±{half:,.{digits}f}' if half else ''}"
