"""Real faults, injected at one step of one rank, to test the monitor."""

from typing import Literal, get_args

import msgspec

from ....protocol.errors import UsageError

Kind = Literal["spike", "hang", "slow", "oom", "crash", "stop"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_STEP = 20
"""Late enough that a rank has a history for comparison, and early enough for a short test."""


class Fault(msgspec.Struct, frozen=True):
    """A fault: its kind, rank and step (for ``slow`` the first of its steps)."""

    kind: Kind
    rank: int
    step: int


def parse(text: str, ranks: int) -> Fault:
    """Read ``KIND[:rank=R,step=S]``, else raise ``UsageError``; the default is the last rank at step 20."""
    name, _, rest = text.partition(":")
    kind: Kind | None = next((known for known in KINDS if known == name), None)
    if kind is None:
        raise UsageError(f"must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {name!r}")
    numbers = {"rank": ranks - 1, "step": DEFAULT_STEP}
    for part in rest.split(",") if rest else []:
        key, _, value = part.strip().partition("=")
        if key not in numbers or not (value.isascii() and value.isdigit()):
            raise UsageError(f"must be of the form {kind}:rank=R,step=S, not {text!r}")
        numbers[key] = int(value)
    if numbers["rank"] >= ranks:
        raise UsageError(f"names rank {numbers['rank']}, but the ranks are 0 to {ranks - 1}")
    if numbers["step"] < 1:
        raise UsageError("names step 0, but steps count from 1")
    return Fault(kind, numbers["rank"], numbers["step"])
