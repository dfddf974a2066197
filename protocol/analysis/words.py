"""Types of the texts of findings; text of a peak's curve, and of a comparison of peaks with the predicted ones."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..text import gib
from .estimates.memory import WHOLE_STEP, Piece
from .estimates.time import Compared

PART_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "master_copies": "master weights",
    "partitions": "ZeRO partitions",
    "buckets": "buckets",
    "activations": "activations",
    "temporaries": "temporaries",
    "other": "other memory",
    "unattributed": "not attributed",
}
"""Labels of ``protocol.messages.memory.PARTS``."""
KIB, MIB = 2**10, 2**20
_LEAST_MIB = 0.05  # slopes below this are written in KiB, because they would be 0.0 MiB
_FLAT = 0.005  # a piece that rises by less than this share of its peak is described as flat
_ALIKE_SHARE = 0.25  # if the differences of all phases agree within this share, they are reported as one


class Words(NamedTuple):
    """Text of a finding."""

    title: str
    text: str  # the meaning, with figures, without the remedy
    remedy: str = ""
    resolved: str = "It is over."  # added to the text when the finding is resolved


class Added(NamedTuple):
    """An addition to a finding's text and evidence."""

    name: str  # name of the addition; a later one of the same name replaces it
    evidence: dict[str, Any]
    text: str = ""  # a sentence; empty: none


def sentence(clause: str) -> str:
    """Return a clause as a sentence; empty for an empty one."""
    return f"{clause[0].upper()}{clause[1:]}." if clause else ""


def stop(clause: str) -> str:
    """Return a clause with a full stop at its end."""
    return clause if clause.endswith(".") else f"{clause}."


def number(value: float | None) -> str:
    """Format a figure in four significant digits; ``?`` for None."""
    if value is None:
        return "?"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


HIGH_RATE = 10.0  # no optimizer is meant for a higher learning rate


def high_rate(lr: float | None) -> tuple[str, str]:
    """Return what a title and a remedy say of a learning rate that is too high to train; empty for others."""
    if lr is None or not lr > HIGH_RATE:
        return "", ""
    return f", at a learning rate of {number(lr)}", f"Lower the learning rate of {number(lr)} first. "


def describe_curve(curve: Sequence[Piece], unit: str = "token") -> str:
    """Return the highest phases by range: ``optimizer leads to 497 tokens, then backward at +7.6 MiB a token``.

    For a curve without phases: ``flat to 497 tokens, then at +7.6 MiB a token``. For phases that are equally high:
    ``backward and optimizer tie``. ``unit``: of the horizontal axis, in the singular.
    """
    words: list[str] = []
    before: list[str] = []
    for number, piece in enumerate(curve):
        rise = piece.slope_bytes * (piece.end - piece.start)
        flat = abs(rise) <= _FLAT * max(piece.at(piece.start), piece.at(piece.end))
        size, name = (MIB, "MiB") if abs(piece.slope_bytes) >= _LEAST_MIB * MIB else (KIB, "KiB")
        rate = "" if flat else f" at {piece.slope_bytes / size:+.1f} {name} a {unit}"
        until = "" if number == len(curve) - 1 else f" to {round(piece.end):,} {unit}s"
        phases = sorted([piece.phase, *piece.tied])
        names = " and ".join(filter(None, (", ".join(phases[:-1]), phases[-1])))
        if not words and piece.phase == WHOLE_STEP:
            words.append(f"{rate.removeprefix(' at ') or 'flat'}{until}")
        elif not words:
            words.append(f"{names} {'tie' if piece.tied else 'leads'}{rate}{until}")
        elif phases == before:
            words.append(f"then{rate or ' flat'}{until}")
        else:
            words.append(f"then {names}{rate}{until}")
        before = phases
    return ", ".join(words)


def percent(share: float) -> str:
    """Format a difference: ``+4.3 %``."""
    text = f"{share * 100:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def comparison_sentences(found: Sequence[Compared], error: float) -> list[str]:
    """Return sentences with the predicted peaks of a rank's phases, and the differences of the measured ones."""
    known = [one for one in found if one.predicted_bytes]
    within = [f"{one.phase} {gib(one.predicted_bytes)} (measured {percent(one.share)})" for one in known]
    sentences = [f"predicted: {', '.join(within)}"]
    parted = [one for one in found if one.parted]
    if not parted:
        return sentences
    most = max(parted, key=lambda one: abs(one.by_bytes))
    text = (
        f"{'the optimizer step' if most.phase == 'optimizer' else most.phase} was {gib(abs(most.by_bytes))} "
        f"{'above' if most.by_bytes > 0 else 'below'} its prediction, more than the expected error "
        f"of {error * 100:.0f} %"
    )
    if not most.parts:
        return [*sentences, text + _by_phase(found, parted, most)]
    named = ", ".join(
        f"{PART_LABELS.get(name, name)} {'+' if size > 0 else '-'}{gib(abs(size))}" for name, size in most.parts
    )
    taken = f" (step {most.parts_step:,} analysed)" if most.parts_step else ""
    return [*sentences, f"{text}: {named}{taken}"]


def _by_phase(found: Sequence[Compared], parted: Sequence[Compared], most: Compared) -> str:
    """Return the text by phase, if the parts are unknown."""
    if len(parted) < len(found):
        others = [one.phase for one in found if not one.parted]
        return f"; {' and '.join(others)} {'agrees' if len(others) == 1 else 'agree'}"
    spread = max(abs(one.by_bytes - most.by_bytes) for one in found)
    if len(found) > 1 and spread <= _ALIKE_SHARE * abs(most.by_bytes):
        return "; all phases by the same amount, so this memory stays allocated"
    return ""
