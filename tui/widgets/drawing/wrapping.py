"""Breaking text into lines."""

import re

from rich.cells import chop_cells

from ....protocol.text import sanitize
from .line import width_of


def wrap(text: str, width: int) -> list[str]:
    """Return text broken at blanks into lines of at most ``width`` cells; longer words are broken too."""
    width = max(8, width)
    lines: list[str] = []
    line = ""
    for chunk in re.findall(r"\s+|\S+", sanitize(text).rstrip()):
        if width_of(line) + width_of(chunk) <= width:
            line += chunk
        elif chunk.isspace():
            lines.append(line)
            line = ""
        elif width_of(chunk) > width:
            *full, line = chop_cells(line + chunk, width)
            lines += full
        else:
            lines += [line.rstrip()] if line.strip() else []
            line = chunk
    return [*lines, line]
