"""Palettes for dark and light terminals, and the settings of drawing: palette, glyphs, colour."""

from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style

from .drawing import UNICODE, Glyphs, Line, cut, spread


@dataclass(frozen=True)
class Palette:
    """All colours of widgets, as ``#rrggbb``. A phase has the same colour on every screen."""

    name: str
    dark: bool
    phases: dict[str, str]
    parts: dict[str, str]
    """Parts of a memory peak (``ftmon.protocol.messages.memory.PARTS``), and the other memory in use on the device."""
    heat: tuple[str, ...]  # memory share from empty to full, in equal steps
    background: str
    raised: str  # background of a selected line or a dialog
    text: str
    dim: str
    faint: str
    rule: str
    accent: str
    good: str
    warning: str
    error: str
    allocated: str
    reserved: str
    spike_behind: str  # background of a spike's column, which itself has the warning colour
    peak: str
    on_color: str


_TONES = {
    "background": ("#10141a", "#fbfaf7"),
    "raised": ("#1f2733", "#e6eaf0"),
    "text": ("#d3dae3", "#20262e"),
    "dim": ("#8491a1", "#5b6673"),
    "faint": ("#566172", "#8c96a3"),
    "rule": ("#2a323e", "#d5d9de"),
    "accent": ("#6cb2f5", "#1e66b8"),
    "good": ("#6fc28b", "#2b8a4b"),
    "warning": ("#e8b04b", "#a86400"),
    "error": ("#f2726f", "#c22f35"),
    "allocated": ("#45a9a5", "#2a8f8c"),
    "reserved": ("#1f4b4f", "#b4dbd9"),
    "spike_behind": ("#6b5426", "#ecd3a0"),
    "peak": ("#c9a86a", "#9a6b14"),
    "on_color": ("#0d1117", "#ffffff"),
}
"""Colours on a dark and on a light background, as in the two tables below."""

_PHASES = {
    "init": ("#7f8b99", "#6d7783"),
    "data": ("#8fb573", "#557f33"),
    "generate": ("#d6bf5a", "#8f7400"),
    "forward": ("#64a0e8", "#2468b4"),
    "backward": ("#9a86ea", "#6a4fc4"),
    "optimizer": ("#dd83b4", "#b23a7c"),
    "eval": ("#5fb8b8", "#1f7f80"),
    "checkpoint": ("#c19a6b", "#8a6230"),
    "idle": ("#3d4653", "#b3bac3"),
    "wait": ("#6b7789", "#7c8794"),
    "other": ("#3d4653", "#9aa4b0"),
}
_PARTS = {
    "parameters": ("#64a0e8", "#2468b4"),
    "gradients": ("#45a9a5", "#2a8f8c"),
    "optimizer_states": ("#9a86ea", "#6a4fc4"),
    "master_copies": ("#7c6bc9", "#8d7ad8"),
    "partitions": ("#5d7fb5", "#5b7fb8"),
    "buckets": ("#c19a6b", "#8a6230"),
    "activations": ("#8fb573", "#557f33"),
    "temporaries": ("#e8b04b", "#c98a1b"),
    "other": ("#7f8b99", "#6d7783"),
    "unattributed": ("#d98880", "#c0605a"),
    "untraced": ("#566172", "#9aa4b0"),
    "unused": ("#1f4b4f", "#b4dbd9"),
    "context": ("#566172", "#9aa4b0"),
    "others": ("#3d4653", "#c3c9d1"),
}
_HEAT = (
    "#1b2a33 #1d3a42 #1f4b4f #24605f #2c7672 #388f8b #45a9a5 #6bb28d #97b873 #c4b85c #e8b04b #ee9150 #f2726f",
    "#e3eeee #cfe5e4 #b4dbd9 #92cac7 #6cb6b3 #46a29f #2a8f8c #4c8f63 #728c3c #96851f #a86400 #b64a1e #c22f35",
)


def _palette(name: str, at: int) -> Palette:
    phases, parts, tones = ({key: pair[at] for key, pair in table.items()} for table in (_PHASES, _PARTS, _TONES))
    return Palette(name, at == 0, phases, parts, tuple(_HEAT[at].split()), **tones)


DARK, LIGHT = _palette("ftmon-dark", 0), _palette("ftmon-light", 1)


STATE_TONES = {
    **dict.fromkeys(("starting", "finished"), "dim"),
    "training": "good",
    **dict.fromkeys(("waiting", "stopped", "stopping"), "warning"),
    **dict.fromkeys(("hung", "held", "gone", "unreachable", "failed"), "error"),
}

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
        return self.palette.phases.get(name, self.palette.dim)

    def part(self, name: str) -> str:
        """Return the colour of a part of a memory peak."""
        return self.palette.parts.get(name, self.palette.dim)

    def state(self, name: str) -> tuple[str, str]:
        """Return a rank or run state's glyph and tone."""
        return self.glyphs.states.get(name, "?"), STATE_TONES.get(name, "dim")

    def severity(self, name: str) -> tuple[str, str]:
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
