"""Renders the charts of a report as PNG, from its SVG by resvg, if that is installed."""

from importlib import import_module
from typing import Any

from ...protocol.errors import UsageError

_ZOOM = 2
_FAMILIES = (
    *("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica", "Helvetica Neue", "Segoe UI", "Ubuntu"),
    *("Cantarell", "Roboto", "Open Sans", "FreeSans", "Nimbus Sans"),
)
"""resvg draws no text in a missing font family, and cannot list the installed ones."""
_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="32" height="16"><text y="12" {}</text></svg>'
_SANS = 'font-family="sans-serif">'


def png(picture: str) -> bytes:
    """Return an SVG as PNG of twice its size.

    Raises:
        UsageError: resvg or a font is missing.
    """
    try:
        library: Any = import_module("resvg_py")
    except ImportError:
        raise UsageError(
            "--png needs resvg-py: pip install 'ftmon[png]'; or write --svg FILE, and convert it: rsvg-convert FILE"
        ) from None
    blank, text = _PROBE.format(_SANS), _PROBE.format(_SANS + "a")
    family = next((name for name in _FAMILIES if _draw(library, text, name) != _draw(library, blank, name)), "")
    if not family:
        raise UsageError("--png: none of the usual fonts (DejaVu, Liberation, Noto, Arial ...) is installed; use --svg")
    return _draw(library, picture, family)


def _draw(library: Any, picture: str, family: str) -> bytes:
    return bytes(library.svg_to_bytes(svg_string=picture, zoom=float(_ZOOM), sans_serif_family=family))
