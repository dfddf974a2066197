"""Text, numbers and characters for the screen: formats, glyphs with ASCII replacements, styled lines, palettes."""

import locale
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from ...protocol.text import names_c_locale, sanitize
from .screen_output import ascii_character

GIB = 2**30
MIB = 2**20


def gib(count: float, short: bool = False) -> str:
    """Format bytes as a number of GiB without the unit: ``139.8``, ``37.40`` (short: ``37.4``), ``0.512``."""
    size = count / GIB
    if abs(size) >= (10 if short else 100):
        return f"{size:.1f}"
    return f"{size:.2f}" if abs(size) >= 1 else f"{size:.3f}"


def gib_signed(count: float) -> str:
    """Format a change in GiB with its sign; ``0`` if it rounds to zero."""
    size = count / GIB
    if abs(size) < 0.0005:
        return "0"
    return f"{size:+.2f}" if abs(size) >= 1 else f"{size:+.3f}"


def mib(count: float) -> str:
    """Format bytes as a number of MiB without the unit: ``788.5``."""
    return f"{count / MIB:,.1f}"


def mib_signed(count: float) -> str:
    """Format a change in MiB with its sign; ``0`` if it rounds to zero."""
    return f"{count / MIB:+,.1f}" if abs(count) >= MIB / 20 else "0"


class Unit(NamedTuple):
    """The unit of a whole table: its name, and the formats of sizes and changes."""

    name: str
    size: Callable[[float], str]
    change: Callable[[float], str]


def gib_fixed(count: float) -> str:
    """Format bytes as GiB with always two decimals, for columns: ``37.40``, ``0.04``."""
    return f"{count / GIB:.2f}"


def mib_fixed(count: float) -> str:
    """Format bytes as MiB with one decimal, for columns: ``788.5``."""
    return f"{count / MIB:.1f}"


GIB_UNIT = Unit("GiB", gib, gib_signed)
MIB_UNIT = Unit("MiB", mib, mib_signed)


def count(value: float) -> str:
    """Format a rate or count in at most five characters: ``987``, ``12.4k``, ``1.30M``, ``2.1B``."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "B")):
        if abs(value) < limit * 0.9995:
            scaled = value / divisor
            if not unit:
                return f"{scaled:.0f}" if scaled >= 10 or scaled == int(scaled) else f"{scaled:.1f}"
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{value:.2g}"


def step_time(seconds: float) -> str:
    """Format a step's time: ``740 ms`` below a second, else ``1.24 s``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def milliseconds(us: float | None) -> str:
    """Format microseconds as milliseconds with three significant figures; empty for None."""
    if us is None:
        return ""
    ms = us / 1e3
    if ms >= 100:
        return f"{ms:,.0f}"
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def loss(value: float) -> str:
    """Format a loss in five or six characters."""
    if value != value:
        return "nan"
    if abs(value) >= 1e4:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def small(value: float) -> str:
    """Format a learning rate or gradient norm with three significant figures."""
    if value != value:
        return "nan"
    if value == 0:
        return "0"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}"
    return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e+")


_STATES = {
    "starting": "◌", "training": "●", "waiting": "◷", "hung": "✖", "held": "■", "stopped": "‖",
    "stopping": "◌", "gone": "†", "unreachable": "?", "finished": "✓", "failed": "✖",
}  # fmt: skip
_KEYS = {"enter": "↵", "space": "space", "escape": "esc", "left": "←", "right": "→", "up": "↑", "down": "↓"}


@dataclass(frozen=True)
class Glyphs:
    """Characters (or short texts) by their use."""

    eighths: str = " ▁▂▃▄▅▆▇█"  # nine characters from an empty cell to a full one, filled from the bottom
    across: str = " ▏▎▍▌▋▊▉█"  # characters from an empty cell to a full one, filled from the left
    reserved: str = "░"  # reserved memory without colour, to distinguish it from allocated memory
    peak: str = "╌"
    spike: str = "▲"
    rule: str = "─"
    cross: str = "┼"
    bar: str = "│"
    dot: str = "·"
    selected: str = "▸"
    marked: str = "◉"
    unmarked: str = "○"
    info: str = "•"
    warning: str = "▲"
    error: str = "✖"
    resolved: str = "✓"
    play: str = "▶"
    pause: str = "‖"
    live: str = "●"
    knob: str = "●"
    track: str = "─"
    track_past: str = "━"
    back: str = "◂"
    ellipsis: str = "…"
    scroll: str = "┃"
    degree: str = "°C"
    minus: str = "−"
    times: str = "×"
    states: dict[str, str] = field(default_factory=_STATES.copy)
    keys: dict[str, str] = field(default_factory=_KEYS.copy)

    @property
    def is_ascii(self) -> bool:
        return self.eighths.isascii()


UNICODE = Glyphs()

ASCII = Glyphs(
    **{
        name: "".join(map(ascii_character, value))
        for name, value in asdict(UNICODE).items()
        if isinstance(value, str) and name not in ("eighths", "across")
    }
    | {"reserved": "-", "peak": "~", "marked": "x", "unmarked": ".", "warning": "!", "pause": "=", "knob": "O"}
    | {"track_past": "=", "degree": "C"},
    eighths=" ..::==##",
    across=" #",
    states={state: ascii_character(sign) for state, sign in _STATES.items()} | {"waiting": "w", "stopped": "="},
    keys=_KEYS | {"enter": "enter", "left": "<-", "right": "->", "up": "up", "down": "down"},
)


def choose(ascii_only: bool) -> Glyphs:
    """Return the glyphs for this terminal: ASCII on request, or if the locale cannot print block characters."""
    if ascii_only or names_c_locale():
        return ASCII
    encoding = locale.getpreferredencoding(False)
    try:
        "".join((UNICODE.eighths, UNICODE.error, UNICODE.selected)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def width_of(text: str) -> int:
    """Return the width of text in terminal cells."""
    return len(text) if text.isascii() else cell_len(text)


def cut(text: str, width: int, ellipsis: str = "…") -> str:
    """Return text cut to at most ``width`` cells, with an ellipsis at the end if it is cut."""
    if width <= 0:
        return ""
    if width_of(text) <= width:
        return text
    return set_cell_size(text, width - width_of(ellipsis)).rstrip() + ellipsis


def tail(text: str, width: int) -> str:
    """Return the end of a text, at most ``width`` cells."""
    text = text[-width:] if width > 0 else ""
    while width_of(text) > width:
        text = text[1:]
    return text


def fitting(parts: Iterable[str], gap: str, width: int) -> str:
    """Return as many of the first parts as fit in ``width`` cells, joined."""
    joined = ""
    for part in parts:
        longer = joined + gap + part if joined else part
        if width_of(longer) > width:
            break
        joined = longer
    return joined


class Line:
    """A line under construction. Adjacent pieces of one style become one segment."""

    __slots__ = ("parts", "width")

    def __init__(self, text: str = "", style: Style | None = None) -> None:
        self.parts: list[tuple[str, Style]] = []
        self.width = 0
        if text and style is not None:
            self.add(text, style)

    def add(self, text: str, style: Style) -> "Line":
        """Append text without its control characters."""
        if text:
            if not text.isprintable():
                text = sanitize(text)
            if self.parts and self.parts[-1][1] is style:
                self.parts[-1] = (self.parts[-1][0] + text, style)
            else:
                self.parts.append((text, style))
            self.width += width_of(text)
        return self

    def join(self, other: "Line") -> "Line":
        for text, style in other.parts:
            self.add(text, style)
        return self

    def pad(self, width: int, style: Style) -> "Line":
        """Append blanks up to ``width`` cells."""
        if self.width < width:
            self.add(" " * (width - self.width), style)
        return self

    def fit(self, width: int, style: Style) -> "Line":
        """Make the line exactly ``width`` cells: padded with ``style``, or cut."""
        if self.width > width:
            parts, self.parts, self.width = self.parts, [], 0
            for text, piece_style in parts:
                room = width - self.width
                if room <= 0:
                    break
                self.add(text if width_of(text) <= room else set_cell_size(text, room), piece_style)
        return self.pad(width, style)

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.parts)

    def strip(self) -> Strip:
        return Strip([Segment(text, style) for text, style in self.parts], self.width)


def spread(left: Line, right: Line, width: int, style: Style) -> Line:
    """Return a line of ``width`` cells with lines at its ends; the left one is cut if both do not fit."""
    room = width - right.width
    if room < 1:
        return left.fit(width, style)
    return left.fit(room, style).join(right)


def marked(mark: str, tone: Style, text: str, width: int, style: Style) -> list[Line]:
    """Return text broken into lines of at most ``width`` cells: the first after a mark, the others as far indented."""
    first, *rest = wrap(text, width - len(mark))
    return [Line(mark, tone).add(first, style), *(Line(" " * len(mark) + row, style) for row in rest)]


def beside(lines: Iterable[Line], gap: str, style: Style) -> Line:
    """Return the non-empty lines joined with a gap."""
    joined = Line()
    for line in lines:
        if line.width:
            if joined.width:
                joined.add(gap, style)
            joined.join(line)
    return joined


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
