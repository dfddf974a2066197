"""plotext's figure. There is one per process, so each picture starts by clearing it.

Interface: plotext 6, ``plotext.figure.doc()``. Imported at the first picture, as it loads a library.
"""

from collections.abc import Sequence
from typing import Any

Color = tuple[int, int, int]


def new_figure(width: int, height: int) -> Any:
    """Return the cleared figure of ``width`` x ``height`` cells, independent of the terminal's size."""
    import plotext

    plot: Any = plotext
    plot.terminal.limit(False, False)
    figure = plot.figure
    figure.clear()
    figure.theme("colorless")
    return figure.plot_size(width, height)


def draw(
    figure: Any, xs: Sequence[float], ys: Sequence[float], marker: str, *, line: bool, color: Color | None = None
) -> None:
    """Add points, or the line through them.

    ``marker``: a character, or plotext's name of a raster (``braille``: 2 x 4 points a cell, ``hd``: 2 x 2).
    """
    import plotext

    plot: Any = plotext
    signal = figure.signal(list(xs), list(ys), marker=plot.marker(marker, color))
    figure.draw(signal.lines(line))


def rows(figure: Any, *, plain: bool = False) -> list[str]:
    """Return the picture's rows from top to bottom, coloured by ANSI sequences unless ``plain``."""
    return figure.build().string(plain).splitlines()
