"""The characters of the app, each with an ASCII replacement. All are one cell wide."""

import locale
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

_STATES = {
    "starting": "◌",
    "training": "●",
    "waiting": "◷",
    "hung": "✖",
    "held": "■",
    "stopped": "‖",
    "stopping": "◌",
    "gone": "†",
    "unreachable": "?",
    "finished": "✓",
    "failed": "✖",
}
_KEYS = {"enter": "↵", "space": "space", "escape": "esc", "left": "←", "right": "→", "up": "↑", "down": "↓"}


@dataclass(frozen=True)
class Glyphs:
    """Characters (or short texts) by their use."""

    eighths: str = " ▁▂▃▄▅▆▇█"
    """Nine characters from an empty cell to a full one, filled from the bottom."""
    across: str = " ▏▎▍▌▋▊▉█"
    """Characters from an empty cell to a full one, filled from the left."""
    reserved: str = "░"
    """Reserved memory without colour, to distinguish it from allocated memory."""
    peak: str = "╌"
    spike: str = "▲"
    rule: str = "─"
    cross: str = "┼"
    bar: str = "│"
    """Separator of columns."""
    dot: str = "·"
    """Separator of words."""
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
    """Pointer to the left."""
    ellipsis: str = "…"
    scroll: str = "┃"
    degree: str = "°C"
    minus: str = "−"
    times: str = "×"
    states: dict[str, str] = field(default_factory=_STATES.copy)
    keys: dict[str, str] = field(default_factory=_KEYS.copy)

    @property
    def is_ascii(self) -> bool:
        """Whether all glyphs are ASCII."""
        return self.eighths.isascii()


UNICODE = Glyphs()

ASCII = Glyphs(
    eighths=" ..::==##",
    across=" #",
    reserved="-",
    peak="~",
    spike="^",
    rule="-",
    cross="+",
    bar="|",
    dot="-",
    selected=">",
    marked="x",
    unmarked=".",
    info="*",
    warning="!",
    error="X",
    resolved="v",
    play=">",
    pause="=",
    live="*",
    knob="O",
    track="-",
    track_past="=",
    back="<",
    ellipsis="~",
    scroll="|",
    degree="C",
    minus="-",
    times="x",
    states={
        "starting": "o",
        "training": "*",
        "waiting": "w",
        "hung": "X",
        "held": "#",
        "stopped": "=",
        "stopping": "o",
        "gone": "+",
        "unreachable": "?",
        "finished": "v",
        "failed": "X",
    },
    keys={"enter": "enter", "space": "space", "escape": "esc", "left": "<-", "right": "->", "up": "up", "down": "down"},
)


def names_c_locale(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment asks for the C locale, in which Python itself would write UTF-8 (PEP 538, 540)."""
    coerced = bool(sys.flags.utf8_mode) and environ.get("LC_CTYPE") == "C.UTF-8"
    names = (environ.get("LC_ALL"), "" if coerced else environ.get("LC_CTYPE"), environ.get("LANG"))
    return next((name for name in names if name), "") in ("C", "POSIX")


def choose(ascii_only: bool) -> Glyphs:
    """Return the glyphs for this terminal: ASCII on request, or if the locale cannot print block characters."""
    if ascii_only:
        return ASCII
    if names_c_locale():
        return ASCII
    encoding = locale.getpreferredencoding(False)
    try:
        "".join((UNICODE.eighths, UNICODE.error, UNICODE.selected)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE
