"""Bounds of numbers in messages: decoding refuses figures outside of them.

They protect receivers from a rank of 2^60, for which one would allocate, and from times that no calendar has.
"""

from typing import Annotated

from msgspec import Meta

MAX_RANKS = 16_384
"""Ranks are below this; -1 stands for the launcher, or for none."""

MAX_WHOLE = 2**53
"""What a double still holds exactly: sums of many such numbers fit 64 bits."""

Rank = Annotated[int, Meta(ge=-1, lt=MAX_RANKS)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Any count or number of bytes: what a column of SQLite holds. (A script may ask for 2**62 bytes, and be refused.)"""
Stage = Annotated[int, Meta(ge=0, le=3)]
"""A ZeRO stage."""
LAST_TIME = 1e11
Time = Annotated[float, Meta(ge=0.0, lt=LAST_TIME)]
"""Seconds since the epoch, up to the year 5138; no infinity, and a number."""
Gauge = Annotated[float, Meta(ge=-1e6, le=1e9)]
"""What an instrument shows: a temperature, a power, a share."""
Flops = Annotated[float, Meta(ge=0.0, le=1e30)]
"""A number of floating-point operations."""
Sequence = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]
Name = Annotated[str, Meta(max_length=256)]
