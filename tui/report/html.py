"""Renders a report as one HTML file that opens offline, with style and charts and without scripts."""

from html import escape

from ...protocol.text import sanitize
from .model import Chart, Report, Section
from .svg import svg

_STYLE = """
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
    """Return the whole file.

    Args:
        report: the report.
        version: version of ftmon.
        made: creation time, in words.
    """
    title = escape(sanitize(report.title, 200))
    body = "\n".join(_section(section) for section in report.sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{title}</h1>\n{body}\n<footer>ftmon {escape(version)}, {escape(made)}</footer>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{_text(section.title)}</h2>"]
    if section.facts:
        facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in section.facts)
        parts.append(f"<dl>{facts}</dl>")
    parts += [_chart(chart) for chart in section.charts]
    parts += [f"<p>{_text(note)}</p>" for note in section.notes]
    if section.table:
        head, *rows = section.table
        cells = "".join(f"<th>{_text(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>')
    parts.append("</section>")
    return "\n".join(parts)


def _chart(chart: Chart) -> str:
    notes = "".join(f"<p>{_text(note)}</p>" for note in chart.notes)
    return f"<h3>{_text(chart.title)}, {_text(chart.unit)}</h3>\n{svg(chart)}\n{notes}"


def _text(text: str) -> str:
    return escape(sanitize(text, 1000))
