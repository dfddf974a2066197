"""Text that compares a live run's peaks with the predicted ones."""

from collections.abc import Sequence

from ...text import gib
from ..estimates.live import Compared
from .words import PART_LABELS

_PHASES = {"optimizer": "the optimizer step"}
_ALIKE_SHARE = 0.25
"""If the differences of all phases agree within this share, they are reported as one."""


def percent(share: float) -> str:
    """Format a difference: ``+4.3 %``."""
    text = f"{share * 100:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def comparison_sentences(found: Sequence[Compared], error: float) -> list[str]:
    """Return sentences with the predicted peaks of a rank's phases, and the differences of the measured ones."""
    within = [
        f"{one.phase} {gib(one.predicted_bytes)} (measured {percent(one.share)})"
        for one in found
        if one.predicted_bytes
    ]
    sentences = [f"predicted: {', '.join(within)}"]
    parted = [one for one in found if one.parted]
    if not parted:
        return sentences
    most = max(parted, key=lambda one: abs(one.by_bytes))
    where = "above" if most.by_bytes > 0 else "below"
    phase = _PHASES.get(most.phase, most.phase)
    text = (
        f"{phase} was {gib(abs(most.by_bytes))} {where} its prediction, more than the expected error of "
        f"{error * 100:.0f} %"
    )
    if most.parts:
        named = ", ".join(f"{PART_LABELS.get(name, name)} {_signed(size)}" for name, size in most.parts)
        taken = f" (step {most.parts_step:,} analysed)" if most.parts_step else ""
        return [*sentences, f"{text}: {named}{taken}"]
    return [*sentences, text + _by_phase(found, parted, most)]


def _by_phase(found: Sequence[Compared], parted: Sequence[Compared], most: Compared) -> str:
    """Return the text by phase, if the parts are unknown."""
    if len(parted) < len(found):
        others = [one.phase for one in found if not one.parted]
        return f"; {' and '.join(others)} {'agrees' if len(others) == 1 else 'agree'}"
    spread = max(abs(one.by_bytes - most.by_bytes) for one in found)
    if len(found) > 1 and spread <= _ALIKE_SHARE * abs(most.by_bytes):
        return "; all phases by the same amount, so this memory stays allocated"
    return ""


def _signed(size: int) -> str:
    return ("+" if size > 0 else "-") + gib(abs(size))
