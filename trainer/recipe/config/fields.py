"""What every section of the configuration is, and the types of its fields.

A section is defined in the module ``config`` of the component it configures, with a docstring behind every field:
``ftmon train --print-config`` writes them as comments. Nothing here imports torch.
"""

from typing import Annotated

import msgspec

AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Momentum = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every section of the configuration is."""
