"""Draws predicted changes of a run, each from a dry run of its job, as a table below an out-of-memory verdict."""

import time

from ....protocol.text import duration, gib, sanitize
from ...model.what_if import Answer, Change, WhatIf
from ..drawing.line import Line
from ..drawing.theme import Theme
from ..drawing.wrapping import wrap

_NAME = 24
_MOST_WIDE = 118


def what_if_lines(found: WhatIf, width: int, theme: Theme) -> list[Line]:
    """Draw the progress or results of the dry runs; empty before their request."""
    if found.state == "none":
        return []
    lines = [Line(), Line(" what if: verified by dry runs of this job", theme.style("accent", bold=True))]
    if found.state == "running":
        now = found.done[-1] if found.done else "starting"
        count = f", {len(found.done) - 1} done" if len(found.done) > 1 else ""
        words = (
            f"  {theme.glyphs.states['starting']} {now}{count}, {duration(time.monotonic() - found.since)}   w: cancel"
        )
        return [*lines, Line(theme.cut(words, width), theme.base)]
    if found.state == "done" and found.answer is not None:
        return [*lines, *_table(found.answer, width, theme)]
    text = "cancelled   w: again" if found.state == "cancelled" else f"no prediction: {found.text}"
    tone = "dim" if found.state == "cancelled" else "warning"
    return [*lines, *(Line(f"  {row}", theme.style(tone)) for row in wrap(text, min(width, _MOST_WIDE) - 3))]


def _table(answer: Answer, width: int, theme: Theme) -> list[Line]:
    dim = theme.style("dim")
    lines = [Line(f"  {'':<{_NAME}}{'fits':>5}{'needs':>12}{'GPU time':>10}  set", dim)]
    base = max(answer.points, key=lambda point: point.sequence_length, default=None)
    if base is not None:
        length = f"as it is, {base.sequence_length:,} tokens"
        lines.append(_row(length, base.fits, base.needed_bytes, 1.0, "", width, theme))
    lines += [_change(one, width, theme) for one in answer.what_if]
    fits = sum(one.fits for one in answer.what_if)
    capacity = f" of the {gib(answer.capacity_bytes)} that PyTorch could have" if answer.capacity_bytes else ""
    if base is not None and base.fits:
        text = f"the job as it is should have fitted{capacity}: something else took memory, or fragments it"
    elif not fits:
        text = "none of them fits" + capacity
    else:
        text = "the cheapest that fits first" + capacity
    tone = "dim" if fits and not (base is not None and base.fits) else "warning"
    return lines + [Line(f"  {row}", theme.style(tone)) for row in wrap(text, min(width, _MOST_WIDE) - 3)]


def _change(one: Change, width: int, theme: Theme) -> Line:
    name = sanitize(one.name, 60)
    if one.refused:
        line = Line(f"  {theme.cut(name, _NAME - 1):<{_NAME}}", theme.style("dim"))
        return line.add(theme.cut(sanitize(one.refused, 300), width - line.width - 1), theme.style("dim"))
    return _row(name, one.fits, one.needed_bytes, one.slower, sanitize(one.change, 300), width, theme)


def _row(name: str, fits: bool | None, needs: int, slower: float, change: str, width: int, theme: Theme) -> Line:
    line = Line(f"  {theme.cut(name, _NAME - 1):<{_NAME}}", theme.style("text", bold=bool(fits)))
    line.add(f"{'yes' if fits else 'no':>5}", theme.style("good" if fits else "error", bold=bool(fits)))
    line.add(f"{gib(needs):>12}{f'x {slower:.2f}' if slower else '-':>10}  ", theme.base)
    return line.add(theme.cut(change, width - line.width - 1), theme.style("dim"))
