"""Help of the snapshot explorer."""

from ...widgets.drawing.line import Line
from ..help import HelpScreen

_FIGURES = (
    ("alloc", "blocks the program holds, rounding included"),
    ("active", "the same, and freed blocks that wait for a stream"),
    ("req", "sizes that the program requested, of active blocks"),
    ("rsvd", "segments obtained from the driver"),
)


class SnapshotHelp(HelpScreen):
    """Explains the explorer: its signs, figures and keys."""

    def content(self, width: int) -> list[Line]:
        """Return all lines; signs and figures come before the keys."""
        theme = self.theme
        lines = super().content(width)
        keys = next(index for index, line in enumerate(lines) if line.plain == "keys")
        signs = [Line("signs", theme.style("accent", bold=True))]
        for glyph, tone, words in (
            (theme.glyphs.eighths[8], "allocated", "allocated; the lighter tone behind it is reserved"),
            (theme.glyphs.peak, "peak", "the highest allocated figure of the window; below the graph: P"),
            ("fwd", "text", "bands under the graph: phases, recorded spans, user metadata"),
            (theme.glyphs.spike, "accent", "the cursor: everything below is as of then"),
            ("m", "warning", "the mark that 3 compares the cursor with"),
            (theme.glyphs.error, "error", "an allocation failed: out of memory"),
        ):
            signs.append(Line(f"  {glyph} ", theme.style(tone, bold=True)).add(words, theme.style("dim")))
        signs += [Line(), Line("figures", theme.style("accent", bold=True))]
        signs += [Line(f"  {name:<8}", theme.base).add(words, theme.style("dim")) for name, words in _FIGURES]
        return [*lines[:keys], *signs, Line(), *lines[keys:]]
