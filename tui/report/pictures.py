"""A report as one HTML file that opens offline, its charts as SVG, and as PNG by resvg if that is installed."""

import math
from collections.abc import Sequence
from html import escape
from importlib import import_module
from itertools import cycle
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.text import sanitize
from .data import OUT_OF_MEMORY, Chart, Curve, Report, Section

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 12, 44
_LEGEND_LINE = 18
_TITLE = 30
_STYLE = """
svg { font: 12px system-ui, sans-serif; fill: #1c2530 } .title { font-size: 14px; font-weight: 600 }
.tick { fill: #5d6b7a } .grid { stroke: #d5dbe2 } .mark { stroke: #5d6b7a; stroke-dasharray: 2 3 }
.failed { stroke: #c8322f; stroke-dasharray: 2 3 }
"""
COLOURS = ("#2f7fd1", "#d1702f", "#2f9e63", "#9257c9", "#c23a5b", "#7a8a1e", "#1f9aa3", "#8a5a3c")


def sheet(report: Report) -> str:
    """Return a file with all charts of a report, one below the other, with their own colours."""
    parts: list[str] = []
    top = 0
    for section in report.sections:
        for chart in section.charts:
            drawn = svg(chart)
            if not drawn:
                continue
            title = _text(f"{section.title}: {chart.heading}")
            height = _height(chart)
            parts.append(f'<text class="title" x="4" y="{top + 20}">{title}</text>')
            place = f'<svg y="{top + _TITLE}" width="{_WIDTH}" height="{height}"'
            parts.append(drawn.replace("<svg", place, 1))
            top += _TITLE + height
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>', *parts, "</svg>\n"])


def _height(chart: Chart) -> int:
    return _HEIGHT + _LEGEND_LINE * len(chart.curves)


def svg(chart: Chart) -> str:
    """Return a chart as one ``svg`` element; text and lines have the page's colour."""
    xs = [x for curve in chart.curves for x in curve.xs] + [x for x, _ in chart.marks]
    if not any(curve.xs for curve in chart.curves):
        return ""
    scale = _Scale(min(xs), max(xs), *chart.limits)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_height(chart)}" role="img" aria-label="{_text(chart.title)}">',
        *_axes(chart, scale),
        *_marks(chart, scale),
    ]
    for number, (curve, colour) in enumerate(zip(chart.curves, cycle(COLOURS), strict=False)):
        parts += _curve(curve, colour, scale)
        parts += _legend(curve, colour, _HEIGHT + _LEGEND_LINE * number + 10, chart.band)
    return "\n".join([*parts, "</svg>"])


class _Scale:
    def __init__(self, low: float, high: float, bottom: float, top: float) -> None:
        margin = 0.0 if high > low else max(0.5, abs(low) * 1e-6)  # 0.5 is rounded off at a value of 1e16
        self.low, self.high = low - margin, high + margin
        span = top - bottom
        self.step = nice_step(span * 1.05)
        self.bottom = self.step * math.floor(bottom / self.step)
        self.top = self.step * math.ceil((top + span * 0.02) / self.step)

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return round(_TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM), 1)


def nice_step(span: float, parts: int = 5) -> float:
    """Return 1, 2 or 5 times a power of ten that divides the span into about ``parts``."""
    raw = span / parts if span > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)


def _axes(chart: Chart, scale: _Scale) -> list[str]:
    parts: list[str] = []
    first, last = round(scale.bottom / scale.step), round(scale.top / scale.step)
    for value in (number * scale.step for number in range(first, last + 1)):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:,.6g}</text>')
    step = nice_step(scale.high - scale.low, 8)
    y = _HEIGHT - _BOTTOM + 16
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    for at in (number * step for number in range(first, last + 1)):
        parts.append(f'<text class="tick" x="{scale.x(at)}" y="{y}" text-anchor="middle">{at:,.6g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{_text(chart.x_name)}</text>')
    parts.append(f'<text x="4" y="{_TOP + 8}">{_text(chart.unit)}</text>')
    return parts


def _marks(chart: Chart, scale: _Scale) -> list[str]:
    parts: list[str] = []
    for x, text in chart.marks:
        at = scale.x(x)
        kind = "failed" if text == OUT_OF_MEMORY else "mark"
        parts.append(f'<line class="{kind}" x1="{at}" y1="{_TOP}" x2="{at}" y2="{_HEIGHT - _BOTTOM}">')
        parts.append(f"<title>{_text(text)} at {x:,.0f}</title></line>")
    for text, x in {text: x for x, text in reversed(chart.marks)}.items():  # the first of each kind
        at = scale.x(x)
        anchor, place = ("end", at - 4) if at > _WIDTH / 2 else ("start", at + 4)
        parts.append(f'<text class="tick" x="{place}" y="{_TOP + 10}" text-anchor="{anchor}">{_text(text)}</text>')
    return parts


def _curve(curve: Curve, colour: str, scale: _Scale) -> list[str]:
    parts: list[str] = []
    if curve.has_band:
        around = [*zip(curve.xs, curve.high, strict=True), *reversed([*zip(curve.xs, curve.low, strict=True)])]
        points = _points(around, scale)
        parts.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.18"/>')
    dashes = ' stroke-dasharray="5 4"' if curve.predicted else ""
    points = _points(list(zip(curve.xs, curve.median, strict=True)), scale)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
    if len(curve.xs) <= 64 and not curve.predicted:
        for x, y in zip(curve.xs, curve.median, strict=True):
            parts.append(f'<circle cx="{scale.x(x)}" cy="{scale.y(y)}" r="3" fill="{colour}">')
            parts.append(f"<title>{x:,.0f}: {y:,.6g}</title></circle>")
    return parts


def _legend(curve: Curve, colour: str, y: int, band: str) -> list[str]:
    dashes = ' stroke-dasharray="5 4"' if curve.predicted else ""
    words = _text(curve.name or "median rank") + (f", band: {band}" if curve.has_band else "")
    return [
        f'<line x1="{_LEFT}" y1="{y - 4}" x2="{_LEFT + 26}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dashes}/>',
        f'<text class="tick" x="{_LEFT + 34}" y="{y}">{words}</text>',
    ]


def _points(points: Sequence[tuple[float, float]], scale: _Scale) -> str:
    return " ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in points)


def _text(text: str, limit: int = 200) -> str:
    return escape(sanitize(text, limit))


_ZOOM = 2
_FAMILIES = (
    *("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica", "Helvetica Neue", "Segoe UI", "Ubuntu"),
    *("Cantarell", "Roboto", "Open Sans", "FreeSans", "Nimbus Sans"),
)
"""resvg draws no text in a missing font family, and cannot list the installed ones."""
_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="32" height="16"><text y="12" {}</text></svg>'
_SANS = 'font-family="sans-serif">'


def png(picture: str) -> bytes:
    """Return an SVG as PNG of twice its size; raise ``UsageError`` if resvg or a font is missing."""
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


_HTML_STYLE = """
:root { color-scheme: light dark; --text: #1c2530; --dim: #5d6b7a; --rule: #d5dbe2; --ground: #fff; --failed: #c8322f }
@media (prefers-color-scheme: dark) {
  :root { --text: #d3dae3; --dim: #8491a1; --rule: #2a323e; --ground: #10141a; --failed: #f2726f } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; border-bottom: 1px solid var(--rule); margin-top: 2.5rem }
h3 { font-size: 1rem; margin-bottom: .2rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem } dt { color: var(--dim) }
dd { margin: 0; overflow-wrap: anywhere }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--text) }
svg .tick { fill: var(--dim) } svg .grid { stroke: var(--rule) }
svg .mark { stroke: var(--dim); stroke-dasharray: 2 3 } svg .failed { stroke: var(--failed); stroke-dasharray: 2 3 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap }
footer { color: var(--dim); margin-top: 2rem }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report, version: str, made: str) -> str:
    """Return the whole file; ``made``: its creation time in words."""
    title = _text(report.title)
    body = "\n".join(_section(section) for section in report.sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_HTML_STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{title}</h1>\n{body}\n<footer>ftmon {escape(version)}, {escape(made)}</footer>\n</body>\n</html>\n"
    )


def _cell(text: str) -> str:
    return _text(text, 1000)


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{_cell(section.title)}</h2>"]
    if section.facts:
        facts = "".join(f"<dt>{_cell(name)}</dt><dd>{_cell(value)}</dd>" for name, value in section.facts)
        parts.append(f"<dl>{facts}</dl>")
    parts += [_chart(chart) for chart in section.charts]
    parts += [f"<p>{_cell(note)}</p>" for note in section.notes]
    if section.table:
        head, *rows = section.table
        cells = "".join(f"<th>{_cell(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>')
    parts.append("</section>")
    return "\n".join(parts)


def _chart(chart: Chart) -> str:
    notes = "".join(f"<p>{_cell(note)}</p>" for note in chart.notes)
    return f"<h3>{_cell(chart.heading)}</h3>\n{svg(chart)}\n{notes}"
