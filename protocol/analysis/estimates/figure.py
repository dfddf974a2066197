"""A figure with its expected error and basis."""

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """An estimate, how far off it may be, and why it is believed."""

    value: float
    """In the unit that the function returning it names."""
    error: float
    """Expected error as a share of the value, 0.05 for 5 %."""
    basis: str
    """The measurement or computation behind it, for display."""
