"""One result of ``ftmon doctor``, from the command line's checks, or as JSON from those of the training side."""

from typing import Literal

import msgspec

State = Literal["ok", "warning", "error"]


class Check(msgspec.Struct, frozen=True):
    """Result of one check of this machine."""

    name: str
    state: State
    text: str
    remedy: str = ""
    """How to fix a warning or an error."""
