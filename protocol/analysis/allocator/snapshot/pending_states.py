"""Estimates how much an optimizer's first step still had to allocate when it ran out of memory, from a snapshot.

An optimizer creates its states parameter by parameter; a state's size is its parameter's, times the ratio of the data
types' widths. The states created so far are recognised by their stacks. The parameters are a group of earlier
allocations from one line of code, whose sizes include those of the states.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from ....snapshot.model import Frame
from .allocations import columns
from .replay import Replay

STATE_FRAMES = ("_init_group", "initialize_optimizer_states", "init_state", "_init_state")
"""Functions (names in lower case) in which optimizers create their states."""

_FEWEST = 3
"""Minimum number of states created so far; fewer would match any group."""
_SCALAR = 64
"""Bytes; a state of at most this size is a step counter, not a parameter's state."""
_A_PARAMETER = (1, 2, 3)
"""Number of states per parameter: momentum; Adam's two; AMSGrad's three."""
_WIDTHS = (1.0, 2.0, 0.5, 0.25)
"""Ratio of a state's bytes to its parameter's: fp32/fp32, fp32/bf16, bf16/fp32, 8 bits/fp32."""


def pending_states(replay: Replay, index: int) -> int:
    """Return an estimate of the bytes that optimizer states still needed, including the failed request.

    Returns:
        The smallest estimate consistent with the states created so far; 0 if the request was not for states, or if no
        estimate is consistent.
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
    """Return an estimate of the remaining bytes of states for ``parameters`` (sizes); 0 if the sizes do not match.

    Candidates are one, two or three states per parameter, in each width. Candidates in which the states are in the
    order of the parameters, or in reverse order, take precedence over those in which only the sizes occur. Of several
    the smallest counts.
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
