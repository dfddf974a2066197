"""Draws the legends of a screen's signs, with the signs themselves."""

from collections.abc import Callable, Iterable, Mapping

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


def _legend(title: str, rows: Iterable[tuple[str, Style, str, str]], theme: Theme, lead: str = "  ") -> list[Line]:
    """Draw a title, and a line for each sign: the sign with its style, its name, and what it means."""
    lines = [Line(title, theme.style("accent", bold=True))]
    for sign, style, name, words in rows:
        lines.append(Line(lead, theme.base).add(sign, style).add(name, theme.base).add(words, theme.style("dim")))
    return lines


def _graph(theme: Theme) -> list[Line]:
    glyphs, spike = theme.glyphs, theme.style("warning", bold=True)
    behind = glyphs.reserved * 2 if theme.plain_graphs else "  "
    rows = [
        (glyphs.eighths[8] * 2, theme.style("allocated"), "", "  allocated (on a CPU: in use, by glibc)"),
        (behind, theme.style("text", "reserved"), "", "  reserved by the allocator (on a CPU: the resident set)"),
        (glyphs.peak * 2, theme.style("peak"), "", "  the highest peak of this rank so far"),
        (glyphs.spike + " ", spike, "", "  a spike: memory allocated and freed; n jumps to it, a explains it"),
    ]
    top = Line("  the top edge is the device's capacity, or after z the run's highest peak", theme.style("dim"))
    return [*_legend("memory", rows, theme), top]


def _fill(letters: Mapping[str, str], name: str, other: str, color: str, theme: Theme) -> tuple[str, Style]:
    return letters.get(name, other) * 2 if theme.plain_graphs else "  ", theme.style("on_color", color)


def _phases(theme: Theme) -> list[Line]:
    fills = ((*_fill(FILLS, name, "_", theme.phase(name), theme), name) for name in PHASE_WORDS)
    rows = [(sign, style, f"  {SHORT[name]:<6}", PHASE_WORDS[name]) for sign, style, name in fills]
    return _legend("shares of a step", rows, theme)


def _states(theme: Theme) -> list[Line]:
    signs = ((*theme.state(state), state) for state in STATE_WORDS)
    rows = [(f"  {glyph}   ", theme.style(tone), f"{state:<12}", STATE_WORDS[state]) for glyph, tone, state in signs]
    return _legend("states", rows, theme, lead="")


def _alerts(theme: Theme) -> list[Line]:
    words = {"error": "the run is blocked or ends", "warning": "needs attention", "info": "for information"}
    signs = ((*theme.severity(severity), text) for severity, text in words.items())
    rows = [(f"  {glyph}   ", theme.style(tone), "", text) for glyph, tone, text in signs]
    return _legend("alerts", rows, theme, lead="")


def _heat(theme: Theme) -> list[Line]:
    ramp = Line("  ", theme.base)
    for color in theme.palette.heat if theme.color else ():
        ramp.add(" ", theme.style("text", color))
    words = "  a rank's peak as a share of its device, in percent (small cells: tens of percent)"
    return [*_legend("heat map", (), theme), ramp.add(words, theme.style("dim"))]


def _parts(theme: Theme) -> list[Line]:
    labels = LABELS | {"unused": "unused, reserved"}
    fills = ((*_fill(PART_FILLS, name, "?", theme.part(name), theme), name) for name in PART_WORDS)
    rows = [(sign, style, f"  {labels.get(name, name):<22}", PART_WORDS[name]) for sign, style, name in fills]
    return _legend("composition of a peak", rows, theme)


def _training(theme: Theme) -> list[Line]:
    points = "loss of single steps; where several share a dot, the lowest and the highest"
    signs = (
        (sign_of("points", theme), "dim", points),
        (sign_of("line", theme), "accent", "smoothed loss; below, the mean of the steps"),
        (sign_of("marks", theme), "warning", "loss of an evaluation"),
        ("c", "good", "a checkpoint; C is the best so far"),
        ("E", "accent", "the training stopped early"),
    )
    rows = [(sign, theme.style(tone), "", f"   {words}") for sign, tone, words in signs]
    return _legend("curves and marks", rows, theme)


LEGENDS: dict[str, Callable[[Theme], list[Line]]] = {
    "graph": _graph,
    "phases": _phases,
    "states": _states,
    "alerts": _alerts,
    "heat": _heat,
    "parts": _parts,
    "training": _training,
}
