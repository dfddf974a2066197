"""Parts of dialogs that send commands: the two buttons, and the answers to a command."""

from rich.style import Style

from ..model.run import RunModel
from ..source.base import CommandRecord
from ..widgets.drawing.line import Line
from ..widgets.drawing.theme import Theme
from ..widgets.lines.alert_lines import wrap


def button_line(no: str, yes: str, yes_chosen: bool, theme: Theme) -> Line:
    """Draw two buttons; the selected one is filled and in brackets."""

    def button(text: str, chosen: bool, tone: str) -> Line:
        if chosen:
            return Line(f"[ {text} ]", theme.style("on_color", tone, bold=True, reverse=not theme.color))
        return Line(f"  {text}  ", theme.style("dim"))

    line = Line("  ", theme.base).join(button(no, not yes_chosen, "accent")).add("   ", theme.base)
    return line.join(button(yes, yes_chosen, "error"))


def answer_lines(record: CommandRecord, model: RunModel, width: int, theme: Theme) -> list[Line]:
    """Draw the state of a command: sent, accepted or refused, done or failed, with the hub's text."""
    glyphs = theme.glyphs
    good, bad, dim = theme.style("good"), theme.style("error", bold=True), theme.style("dim")
    accepted, result = record.accepted, record.result
    if accepted is None:
        waited = max(0.0, model.now - record.sent) if record.sent else 0.0
        text = "sent, waiting for the hub" + (f" for {waited:.0f} s" if waited >= 2 else "")
        return [Line(f"{glyphs.states['starting']} {text}", dim)]
    if not accepted.ok:
        return _marked(f"{glyphs.error} refused: ", accepted.text, bad, width, theme)
    lines = _marked(f"{glyphs.resolved} ", accepted.text or "under way", good, width, theme)
    if result is None:
        return lines
    mark, style = (glyphs.resolved, good) if result.ok else (glyphs.error, bad)
    return lines + _marked(f"{mark} ", result.text or ("done" if result.ok else "failed"), style, width, theme)


def _marked(mark: str, text: str, style: Style, width: int, theme: Theme) -> list[Line]:
    """Draw text with a mark before its first row."""
    first, *rest = wrap(text, width - len(mark))
    return [Line(mark, style).add(first, theme.base), *(Line(" " * len(mark) + row, theme.base) for row in rest)]
