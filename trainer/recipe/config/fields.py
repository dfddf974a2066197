"""Base class of the configuration's sections, and the types of their fields.

A section is defined in the module ``config`` of the component it configures, with a docstring behind every field:
``ftmon train --print-config`` writes them as comments. Nothing here imports torch.
"""

from typing import Annotated

import msgspec

MOST_WHOLE = 10**15
"""The largest whole number where a field has no bound of its own: recordings and PyTorch hold 64 bits, and counts are
multiplied with one another."""
MOST_SEED = 2**32 - 1
"""PyTorch's seeds have 64 bits; the order of an epoch is drawn from the seed times a million and more."""

AtLeast0 = Annotated[int, msgspec.Meta(ge=0, le=MOST_WHOLE)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1, le=MOST_WHOLE)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=MOST_SEED)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Momentum = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the configuration's sections."""
