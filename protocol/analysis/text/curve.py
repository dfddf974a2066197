"""Text of a peak's curve."""

from collections.abc import Sequence

from ..estimates.curve import WHOLE_STEP, Piece

KIB, MIB = 2**10, 2**20
_LEAST_MIB = 0.05
"""Slopes below this are written in KiB, because they would be 0.0 MiB."""
_FLAT = 0.005
"""A piece that rises by less than this share of its peak is described as flat."""


def describe_curve(curve: Sequence[Piece], unit: str = "token") -> str:
    """Return the highest phases by range: ``optimizer leads to 497 tokens, then backward at +7.6 MiB a token``.

    For a curve without phases: ``flat to 497 tokens, then at +7.6 MiB a token``. For phases that are equally high:
    ``backward and optimizer tie``.

    Args:
        unit: unit of the horizontal axis, in the singular.
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
