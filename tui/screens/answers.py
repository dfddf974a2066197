"""What dialogs that act share: the two buttons, and the answers to a command as they come."""

from rich.style import Style

from ..model.run import RunModel
from ..source.base import CommandRecord
from ..widgets.alert_lines import wrap
from ..widgets.line import Line
from ..widgets.theme import Theme


def button_line(no: str, yes: str, yes_chosen: bool, look: Theme) -> Line:
    """Draw two buttons; the chosen one is filled and in brackets."""

    def button(text: str, chosen: bool, tone: str) -> Line:
        if chosen:
            return Line(f"[ {text} ]", look.style("on_color", tone, bold=True, reverse=not look.color))
        return Line(f"  {text}  ", look.style("dim"))

    line = Line("  ", look.base).join(button(no, not yes_chosen, "accent")).add("   ", look.base)
    return line.join(button(yes, yes_chosen, "error"))


def answer_lines(record: CommandRecord, model: RunModel, width: int, look: Theme) -> list[Line]:
    """Draw how far a command is: sent, accepted or refused, done or failed, with what the hub says of it."""
    glyphs = look.glyphs
    good, bad, dim = look.style("good"), look.style("error", bold=True), look.style("dim")
    accepted, result = record.accepted, record.result
    if accepted is None:
        waited = max(0.0, model.now - record.sent) if record.sent else 0.0
        text = "sent, waiting for the hub" + (f" for {waited:.0f} s" if waited >= 2 else "")
        return [Line(f"{glyphs.states['starting']} {text}", dim)]
    if not accepted.ok:
        return _marked(f"{glyphs.error} refused: ", accepted.text, bad, width, look)
    lines = _marked(f"{glyphs.resolved} ", accepted.text or "under way", good, width, look)
    if result is None:
        return lines
    mark, style = (glyphs.resolved, good) if result.ok else (glyphs.error, bad)
    return lines + _marked(f"{mark} ", result.text or ("done" if result.ok else "failed"), style, width, look)


def _marked(mark: str, text: str, style: Style, width: int, look: Theme) -> list[Line]:
    """Draw text with a mark before its first row."""
    first, *rest = wrap(text, width - len(mark))
    return [Line(mark, style).add(first, look.base), *(Line(" " * len(mark) + row, look.base) for row in rest)]
