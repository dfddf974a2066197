"""Bounds of numbers in messages: decoding refuses values outside them.

They protect receivers from a rank of 2^60, for which a receiver would allocate, and from times outside the calendar.
"""

from typing import Annotated

from msgspec import Meta

MAX_RANKS = 16_384
"""Ranks are below this; -1 means the launcher, or no rank."""

MAX_WHOLE = 2**53
"""Integers up to this are exact in a double; sums of many such numbers fit 64 bits."""

Rank = Annotated[int, Meta(ge=-1, lt=MAX_RANKS)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A count or a number of bytes, in the range of an SQLite column. (A script may request 2**62 bytes and be refused.)"""
Stage = Annotated[int, Meta(ge=0, le=3)]
"""A ZeRO stage."""
LAST_TIME = 1e11
Time = Annotated[float, Meta(ge=0.0, lt=LAST_TIME)]
"""Seconds since the epoch, up to the year 5138; neither infinite nor NaN."""
Gauge = Annotated[float, Meta(ge=-1e6, le=1e9)]
"""A measured value: a temperature, a power, a share."""
Flops = Annotated[float, Meta(ge=0.0, le=1e30)]
"""A number of floating-point operations."""
Sequence = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]
Name = Annotated[str, Meta(max_length=256)]
