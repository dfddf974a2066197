"""A figure with its expected error and basis."""

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """An estimate with its expected error and its basis."""

    value: float
    """In the unit stated by the function that returns it."""
    error: float
    """Expected error as a share of the value, 0.05 for 5 %."""
    basis: str
    """The measurement or computation behind it, for display."""
