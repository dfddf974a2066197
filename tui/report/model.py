"""The contents of a report: plain data, drawn by ``terminal`` and ``html``."""

import msgspec


class Curve(msgspec.Struct, frozen=True):
    """A figure over the horizontal axis: the median, lowest and highest rank."""

    name: str
    xs: list[float]
    low: list[float]
    median: list[float]
    high: list[float]
    predicted: bool = False

    @property
    def has_band(self) -> bool:
        """Whether ranks differ."""
        return self.low != self.high


OUT_OF_MEMORY = "out of memory"
"""Mark of a run that ran out of memory."""


class Chart(msgspec.Struct, frozen=True):
    """Curves with one vertical axis. ``unit`` of the values is ``GiB``, ``ms`` or ``tokens/s``."""

    title: str
    x_name: str
    unit: str
    curves: list[Curve]
    marks: list[tuple[float, str]] = []
    """Positions on the horizontal axis with text: crossovers, ``OUT_OF_MEMORY``."""
    notes: list[str] = []
    """Sentences below the chart, such as the fitted pieces."""


class Section(msgspec.Struct, frozen=True):
    """One run, sweep or file; or several in one picture."""

    title: str
    facts: list[tuple[str, str]] = []
    charts: list[Chart] = []
    table: list[list[str]] = []
    """The first line is its head."""
    notes: list[str] = []


class Report(msgspec.Struct, frozen=True):
    """All sections, in order."""

    title: str
    sections: list[Section]
