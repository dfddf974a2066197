"""Draws the legends of a screen's signs, with the signs themselves."""

from collections.abc import Callable

from rich.style import Style

from ..model.waterfall import LABELS
from .drawing import Line
from .memory import PART_FILLS
from .plots import FILLS, SHORT, sign_of
from .theme import Theme

STATE_WORDS = {
    "starting": "its process is up, no step is finished yet",
    "training": "it makes progress",
    "waiting": "it is in a collective that others have not entered",
    "hung": "no progress for longer than the phase's time limit",
    "held": "it waits at an out-of-memory error (--on-oom hold)",
    "stopped": "the process is stopped (SIGSTOP)",
    "gone": "there is no process any more",
    "unreachable": "no messages arrive from its host",
    "finished": "it ended without an error",
}

PHASE_WORDS = {
    "data": "waiting for the next batch",
    "generate": "generation (the rollout of a step)",
    "forward": "forward pass",
    "backward": "backward pass, gradient reduction included",
    "optimizer": "optimizer step",
    "wait": "inside collective calls (not part of the phases)",
    "other": "between phases, evaluations, checkpoints",
}


def _head(text: str, theme: Theme) -> Line:
    return Line(text, theme.style("accent", bold=True))


def _sign(sign: str, style: Style, words: str, theme: Theme) -> Line:
    return Line("  ", theme.base).add(sign, style).add(f"  {words}", theme.style("dim"))


def graph_legend(theme: Theme) -> list[Line]:
    """Explain the memory graph."""
    glyphs = theme.glyphs
    behind = glyphs.reserved * 2 if theme.plain_graphs else "  "
    signs = (
        (glyphs.eighths[8] * 2, theme.style("allocated"), "allocated (on a CPU: in use, by glibc)"),
        (behind, theme.style("text", "reserved"), "reserved by the allocator (on a CPU: the resident set)"),
        (glyphs.peak * 2, theme.style("peak"), "the highest peak of this rank so far"),
        (
            glyphs.spike + " ",
            theme.style("warning", bold=True),
            "a spike: memory allocated and freed; n jumps to it, a explains it",
        ),
    )
    top = Line("  the top edge is the device's capacity, or after z the run's highest peak", theme.style("dim"))
    return [_head("memory", theme), *(_sign(*sign, theme) for sign in signs), top]


def phase_legend(theme: Theme) -> list[Line]:
    """Explain the phase bar."""
    lines = [_head("shares of a step", theme)]
    for name, words in PHASE_WORDS.items():
        sample = FILLS.get(name, "_") * 2 if theme.plain_graphs else "  "
        line = Line("  ", theme.base).add(sample, theme.style("on_color", theme.phase(name)))
        lines.append(line.add(f"  {SHORT[name]:<6}", theme.base).add(words, theme.style("dim")))
    return lines


def state_legend(theme: Theme) -> list[Line]:
    """Explain the states of a rank."""
    lines = [_head("states", theme)]
    for state, words in STATE_WORDS.items():
        glyph, tone = theme.state(state)
        line = Line(f"  {glyph}   ", theme.style(tone)).add(f"{state:<12}", theme.base)
        lines.append(line.add(words, theme.style("dim")))
    return lines


def alert_legend(theme: Theme) -> list[Line]:
    """Explain the severities."""
    lines = [_head("alerts", theme)]
    for severity, words in (
        ("error", "the run is blocked or ends"),
        ("warning", "needs attention"),
        ("info", "for information"),
    ):
        glyph, tone = theme.severity(severity)
        lines.append(Line(f"  {glyph}   ", theme.style(tone)).add(words, theme.style("dim")))
    return lines


def heat_legend(theme: Theme) -> list[Line]:
    """Explain the heat map."""
    ramp = Line("  ", theme.base)
    for color in theme.palette.heat if theme.color else ():
        ramp.add(" ", theme.style("text", color))
    words = "  a rank's peak as a share of its device, in percent (small cells: tens of percent)"
    return [_head("heat map", theme), ramp.add(words, theme.style("dim"))]


PART_WORDS = {
    "parameters": "the model's weights as it computes with them",
    "gradients": "gradients of the weights",
    "optimizer_states": "Adam's moments and the like",
    "master_copies": "the weights that mixed precision updates",
    "partitions": "ZeRO's flat partitions that are none of these",
    "buckets": "communication and reduction buffers",
    "activations": "saved in a forward for its backward",
    "temporaries": "allocated and freed within the phase",
    "other": "held by PyTorch, of no known use",
    "unattributed": "allocated, of unknown purpose",
    "untraced": "on the CPU: code, libraries, and what glibc's malloc keeps after free",
    "unused": "reserved by the allocator, not allocated",
}


def part_legend(theme: Theme) -> list[Line]:
    """Explain the colours of a memory peak's parts (in stacked bars without colour: their letters)."""
    lines = [_head("composition of a peak", theme)]
    for name, words in PART_WORDS.items():
        sample = PART_FILLS.get(name, "?") * 2 if theme.plain_graphs else "  "
        line = Line("  ", theme.base).add(sample, theme.style("on_color", theme.part(name)))
        label = "unused, reserved" if name == "unused" else LABELS.get(name, name)
        lines.append(line.add(f"  {label:<22}", theme.base).add(words, theme.style("dim")))
    return lines


def training_legend(theme: Theme) -> list[Line]:
    """Explain the curves and marks of a training."""
    lines = [_head("curves and marks", theme)]
    points = "loss of single steps; where several share a dot, the lowest and the highest"
    for sign, tone, words in (
        (sign_of("points", theme), "dim", points),
        (sign_of("line", theme), "accent", "smoothed loss; below, the mean of the steps"),
        (sign_of("marks", theme), "warning", "loss of an evaluation"),
        ("c", "good", "a checkpoint; C is the best so far"),
        ("E", "accent", "the training stopped early"),
    ):
        lines.append(_sign(sign, theme.style(tone), f" {words}", theme))
    return lines


LEGENDS: dict[str, Callable[[Theme], list[Line]]] = {
    "graph": graph_legend,
    "phases": phase_legend,
    "states": state_legend,
    "alerts": alert_legend,
    "heat": heat_legend,
    "parts": part_legend,
    "training": training_legend,
}
