"""Settings of drawing: palette, glyphs, and whether colour is used."""

from functools import lru_cache

from rich.style import Style

from .glyphs import UNICODE, Glyphs
from .line import Line, cut, spread
from .palette import DARK, Palette

STATE_TONES = {
    "starting": "dim",
    "training": "good",
    "waiting": "warning",
    "hung": "error",
    "held": "error",
    "stopped": "warning",
    "stopping": "warning",
    "gone": "error",
    "unreachable": "error",
    "finished": "dim",
    "failed": "error",
}
"""The palette's colour of each rank or run state."""

SEVERITY_TONES = {"info": "accent", "warning": "warning", "error": "error"}


@lru_cache(4096)
def _style(fg: str | None, bg: str | None, bold: bool, dim: bool, reverse: bool) -> Style:
    return Style(color=fg, bgcolor=bg, bold=bold or None, dim=dim or None, reverse=reverse or None)


class Theme:
    """Palette, glyphs and colour, with the resulting styles.

    A tone is the name of a colour of the palette (``text``, ``dim``, ``accent`` ...) or a colour ``#rrggbb``. Without
    colour a style keeps only bold, dim and reverse.
    """

    def __init__(self, palette: Palette = DARK, glyphs: Glyphs = UNICODE, color: bool = True) -> None:
        self.palette = palette
        self.glyphs = glyphs
        self.color = color
        self.base = self.style("text")

    @property
    def plain_graphs(self) -> bool:
        """Whether graphs must distinguish their parts by characters instead of colours."""
        return not self.color or self.glyphs.is_ascii

    def cut(self, text: str, width: int) -> str:
        """Return text cut to at most ``width`` cells, with an ellipsis at the end if it is cut."""
        return cut(text, width, self.glyphs.ellipsis)

    def tone(self, name: str) -> str:
        """Return a tone's colour ``#rrggbb``."""
        return name if name.startswith("#") else getattr(self.palette, name)

    def style(self, tone: str = "text", on: str = "background", bold: bool = False, reverse: bool = False) -> Style:
        """Return the style of text in ``tone`` on ``on``."""
        if not self.color:
            return _style(None, None, bold, tone in ("dim", "faint", "rule"), reverse)
        return _style(self.tone(tone), self.tone(on), bold, False, reverse)

    def phase(self, name: str) -> str:
        """Return a phase's colour."""
        return self.palette.phases.get(name, self.palette.dim)

    def part(self, name: str) -> str:
        """Return the colour of a part of a memory peak."""
        return self.palette.parts.get(name, self.palette.dim)

    def state(self, name: str) -> tuple[str, str]:
        """Return a rank or run state's glyph and tone."""
        return self.glyphs.states.get(name, "?"), STATE_TONES.get(name, "dim")

    def severity(self, name: str) -> tuple[str, str]:
        """Return a severity's glyph and tone."""
        return getattr(self.glyphs, name, self.glyphs.info), SEVERITY_TONES.get(name, "dim")

    def heat(self, share: float) -> str:
        """Return the heat map's colour of a share 0..1."""
        heat = self.palette.heat
        return heat[min(len(heat) - 1, max(0, int(share * len(heat))))]


def ruled(title: Line, right: Line, width: int, theme: Theme) -> Line:
    """Draw a rule of ``width`` cells with a title near its left end, and another line near its right end."""
    style, dash = theme.style("rule"), theme.glyphs.rule
    left = Line(dash, style).join(title)
    right.add(dash, style)
    left.add(dash * max(0, width - left.width - right.width), style)
    return spread(left, right, width, theme.base)
