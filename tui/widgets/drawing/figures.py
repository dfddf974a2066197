"""Formats numbers for the screen: short, with fixed places, with units at their first appearance."""

from collections.abc import Callable
from typing import NamedTuple

GIB = 2**30
MIB = 2**20


def gib(count: float, short: bool = False) -> str:
    """Format bytes as a number of GiB without the unit: ``139.8``, ``37.40`` (short: ``37.4``), ``0.512``."""
    size = count / GIB
    if short and abs(size) >= 10:
        return f"{size:.1f}"
    if abs(size) >= 100:
        return f"{size:.1f}"
    return f"{size:.2f}" if abs(size) >= 1 else f"{size:.3f}"


def gib_signed(count: float) -> str:
    """Format a change in GiB with its sign; ``0`` if it rounds to zero."""
    size = count / GIB
    if abs(size) < 0.0005:
        return "0"
    return f"{size:+.2f}" if abs(size) >= 1 else f"{size:+.3f}"


def mib(count: float) -> str:
    """Format bytes as a number of MiB without the unit: ``788.5``."""
    return f"{count / MIB:,.1f}"


def mib_signed(count: float) -> str:
    """Format a change in MiB with its sign; ``0`` if it rounds to zero."""
    return f"{count / MIB:+,.1f}" if abs(count) >= MIB / 20 else "0"


class Unit(NamedTuple):
    """The unit of a whole table: its name, and the formats of sizes and changes."""

    name: str
    size: Callable[[float], str]
    change: Callable[[float], str]


def gib_fixed(count: float) -> str:
    """Format bytes as GiB with always two decimals, for columns: ``37.40``, ``0.04``."""
    return f"{count / GIB:.2f}"


def mib_fixed(count: float) -> str:
    """Format bytes as MiB with one decimal, for columns: ``788.5``."""
    return f"{count / MIB:.1f}"


GIB_UNIT = Unit("GiB", gib, gib_signed)
MIB_UNIT = Unit("MiB", mib, mib_signed)


def count(value: float) -> str:
    """Format a rate or count in at most five characters: ``987``, ``12.4k``, ``1.30M``, ``2.1B``."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "B")):
        if abs(value) < limit * 0.9995:
            scaled = value / divisor
            if not unit:
                return f"{scaled:.0f}" if scaled >= 10 or scaled == int(scaled) else f"{scaled:.1f}"
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{value:.2g}"


def step_time(seconds: float) -> str:
    """Format a step's time: ``740 ms`` below a second, else ``1.24 s``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def milliseconds(us: float | None) -> str:
    """Format microseconds as milliseconds with three significant figures; empty for None."""
    if us is None:
        return ""
    ms = us / 1e3
    if ms >= 100:
        return f"{ms:,.0f}"
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def loss(value: float) -> str:
    """Format a loss in five or six characters."""
    if value != value:
        return "nan"
    if abs(value) >= 1e4:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def small(value: float) -> str:
    """Format a learning rate or gradient norm with three significant figures."""
    if value != value:
        return "nan"
    if value == 0:
        return "0"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}"
    return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e+")
