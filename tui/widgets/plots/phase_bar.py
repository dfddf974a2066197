"""Draws the phase bar: the shares of a step, each in its phase's colour and labelled if it is wide enough."""

from collections.abc import Sequence

from ..drawing.line import Line
from ..drawing.theme import Theme

SHORT = {
    "init": "init",
    "data": "data",
    "generate": "gen",
    "forward": "fwd",
    "backward": "bwd",
    "optimizer": "opt",
    "eval": "eval",
    "checkpoint": "ckpt",
    "idle": "idle",
    "wait": "wait",
    "other": "other",
}
"""Short names of phases; ``wait`` is time inside collective calls, subtracted from the phases it fell in."""

FILLS = {"data": ".", "generate": "+", "forward": "-", "backward": "=", "optimizer": "#", "wait": "~"}
"""Characters of the phases' parts without colour."""


def phase_bar(shares: Sequence[tuple[str, float]], width: int, theme: Theme, figures: bool = True) -> Line:
    """Draw the bar ``width`` cells wide. ``shares`` are (phase, share 0..1) in drawing order, their sum at most 1."""
    line = Line()
    for (name, share), cells in zip(shares, cells_of([share for _, share in shares], width), strict=True):
        if not cells:
            continue
        # Without colour the last cell of a part is its edge.
        label = _label(name, share, cells - 1 if theme.plain_graphs and cells > 1 else cells, figures)
        if theme.plain_graphs:
            filled = (label.strip() if cells > 1 else "") + FILLS.get(name, "_") * cells
            line.add(
                filled[: cells - 1] + "|" if cells > 1 and line.width + cells < width else filled[:cells], theme.base
            )
        else:
            line.add(label.ljust(cells), theme.style("on_color", theme.phase(name)))
    return line.fit(width, theme.base)


def cells_of(shares: Sequence[float], width: int) -> list[int]:
    """Divide ``width`` cells by shares: at least one cell for half a percent or more, with the same sum."""
    exact = [share * width for share in shares]
    cells = [max(1 if share >= 0.005 else 0, int(value)) for share, value in zip(shares, exact, strict=True)]
    target = min(width, round(sum(exact)))
    while sum(cells) < target:
        index = max(range(len(cells)), key=lambda i: exact[i] - cells[i])
        cells[index] += 1
    while sum(cells) > target and any(count > 1 for count in cells):
        index = min((i for i, count in enumerate(cells) if count > 1), key=lambda i: exact[i] - cells[i])
        cells[index] -= 1
    return cells


def _label(name: str, share: float, cells: int, figures: bool) -> str:
    short = SHORT.get(name, name)
    percent = f"{share * 100:.0f}"
    initial = short[:1] if name in FILLS else ""
    candidates = [f" {short} {percent} % ", f"{short} {percent}", short, initial] if figures else [short, initial]
    return next((text for text in candidates if len(text) <= cells), "")
