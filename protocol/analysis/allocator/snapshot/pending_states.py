"""How much an optimizer's first step still had to allocate when it ran out of memory, from a snapshot.

An optimizer makes its states parameter by parameter: each is as large as its parameter, times the ratio of their types'
widths. So the states made so far are recognised by their stacks. The parameters are a group of earlier allocations from
one place in the code, whose sizes include those of the states.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from ....snapshot.model import Frame
from .allocations import columns
from .replay import Replay

STATE_FRAMES = ("_init_group", "initialize_optimizer_states", "init_state", "_init_state")
"""Functions (their names in lower case) in which optimizers make their states."""

_FEWEST = 3
"""States made so far; fewer may be found anywhere."""
_SCALAR = 64
"""Bytes; a state of up to this is a step's counter, and of no parameter."""
_A_PARAMETER = (1, 2, 3)
"""States of one parameter: momentum; Adam's two; AMSGrad's three."""
_WIDTHS = (1.0, 2.0, 0.5, 0.25)
"""A state's bytes by its parameter's: fp32 by fp32, fp32 by bf16, bf16 by fp32, 8 bits by fp32."""


def pending_states(replay: Replay, index: int) -> int:
    """Estimate what a failed creation of optimizer states still had to allocate, the failed request included, bytes.

    Args:
        replay: of a device.
        index: the entry of the out-of-memory error.

    Returns:
        The least of what would fit what was made so far; 0 where it was no such request, or nothing fits.
    """
    of = replay.allocations
    failing = columns(replay.trace.stacks, "I")[index]
    if not of.stacks or not _makes_states(replay.snapshot.frames_of(failing)):
        return 0
    made: list[int] = []
    groups: dict[Frame, list[int]] = {}
    states: dict[int, bool] = {}
    for number in sorted(replay.live_at(index)):  # in the order in which they were allocated
        frames = replay.snapshot.frames_of(of.stacks[number])
        if of.stacks[number] not in states:
            states[of.stacks[number]] = _makes_states(frames)
        if states[of.stacks[number]]:
            made.append(of.requested[number])
        elif frames:
            groups.setdefault(frames[0], []).append(of.requested[number])
    return min(filter(None, (pending_bytes(made, sizes) for sizes in groups.values())), default=0)


def pending_bytes(made: Sequence[int], parameters: Iterable[int]) -> int:
    """Estimate what is left to make of states that follow the sizes of ``parameters``; 0 where they do not.

    A reading (one, two or three states of a parameter, and of what width) in which the states come in the order of the
    parameters, or in the opposite one, goes before one in which only their sizes are found; of several it is the least.
    """
    had = [size for size in made if size > _SCALAR]
    whole = [size for size in parameters if size > _SCALAR]
    if len(had) < _FEWEST:
        return 0
    counted, in_order, by_size = Counter(had), list[int](), list[int]()
    for width in _WIDTHS:
        for count in _A_PARAMETER:
            due = [size * width for size in whole for _ in range(count)]
            left = round(sum(due)) - sum(had)
            if had in (due[: len(had)], due[::-1][: len(had)]):
                in_order.append(left)
            elif counted <= Counter(due):
                by_size.append(left)
    return min(in_order or by_size, default=0)


def _makes_states(frames: Sequence[Frame]) -> bool:
    return any(frame.name.lower() in STATE_FRAMES for frame in frames)
