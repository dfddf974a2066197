"""Draws one line of a rank's output, for the logs and the rank screen."""

from ....protocol.text import sanitize
from ...model.logs import LogEntry
from ..drawing.line import Line
from ..drawing.theme import Theme
from .scrubber import time_of_day


def log_line(entry: LogEntry, width: int, theme: Theme, with_rank: bool = True, selected: bool = False) -> Line:
    """Draw time, rank and text; lines of standard error are marked."""
    ground = "raised" if selected else "background"
    line = Line(f" {time_of_day(entry.time)} ", theme.style("dim", ground))
    if with_rank:
        name = "launcher" if entry.rank < 0 else f"rank {entry.rank}"
        line.add(f"{name:<9}", theme.style("accent", ground))
    if entry.stream == "err":
        line.add("err  ", theme.style("warning", ground))
    text = theme.cut(sanitize(entry.text), max(0, width - line.width))
    return line.add(text, theme.style("text", ground)).fit(width, theme.style("text", ground))
