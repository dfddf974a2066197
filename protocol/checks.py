"""What ``ftmon doctor`` checks: the packages of the training side, and the results, which that side prints as JSON."""

from typing import Literal

import msgspec

TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft")
"""The packages that ftmon's own trainer and its predictions need: ``ftmon[train]`` installs and a rank imports them."""
State = Literal["ok", "warning", "error"]


class Check(msgspec.Struct, frozen=True):
    """Result of one check of this machine."""

    name: str
    state: State
    text: str
    remedy: str = ""
    """How to fix a warning or an error."""
