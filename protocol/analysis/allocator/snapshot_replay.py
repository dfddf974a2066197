"""State of the allocator at every entry of a trace: curves of figures, live allocations, and segments.

Like PyTorch's own viewer, the replay is anchored at the window's end: the segments are known then, and walking the
trace from there gives every earlier moment. The moment of entry ``k`` is the state right after it; ``-1`` is the state
before the first.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...snapshot.columns import OOM, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, Frame, Snapshot
from .allocations import BEFORE, RESERVES, Allocations, columns, reserved_curve
from .settings import SMALL_MOST_BYTES

Totals = dict[int, tuple[int, int]]  # bytes and blocks by stack

STATE_FRAMES = ("_init_group", "initialize_optimizer_states", "init_state", "_init_state")
"""Functions (names in lower case) in which optimizers create their states."""

_FEWEST = 3  # minimum number of states created so far; fewer would match any group
_SCALAR = 64  # bytes; a state of at most this size is a step counter, not a parameter's state
_A_PARAMETER = (1, 2, 3)  # number of states per parameter: momentum; Adam's two; AMSGrad's three
_WIDTHS = (1.0, 2.0, 0.5, 0.25)  # a state's bytes to its parameter's: fp32/fp32, fp32/bf16, bf16/fp32, 8 bits/fp32


class Range(NamedTuple):
    """A segment, or a mapped range of an expandable one, at a moment."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    pool: str  # a private pool's identifier; `""` for the shared one, and for segments that were gone by the end

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + self.size


class _State:
    """Ranges by address; a later one at the same address replaces the one before."""

    def __init__(self, ranges: list[Range]) -> None:
        self._at = {one.address: one for one in ranges}
        self._starts = sorted(self._at)

    def ranges(self) -> list[Range]:
        return [self._at[start] for start in self._starts]

    def undo(self, action: int, address: int, size: int, stream: int) -> None:
        if action == SEGMENT_ALLOC:
            self.remove(address)
        elif action == SEGMENT_FREE:
            self.put(Range(address, size, stream, size <= 2 * SMALL_MOST_BYTES, False, ""))
        elif action == SEGMENT_MAP:
            self.cut(address, address + size)
        else:
            self.join(address, size, stream)

    def put(self, one: Range) -> None:
        if one.address not in self._at:
            insort(self._starts, one.address)
        self._at[one.address] = one

    def remove(self, address: int) -> None:
        if self._at.pop(address, None) is not None:
            del self._starts[bisect_left(self._starts, address)]

    def cut(self, address: int, end: int) -> None:
        """Remove the addresses from ``address`` to ``end`` from expandable ranges."""
        first = max(0, bisect_right(self._starts, address) - 1)
        for start in self._starts[first : bisect_left(self._starts, end)]:
            one = self._at[start]
            if not one.expandable or one.end <= address:
                continue
            self.remove(start)
            for begin, stop in ((start, address), (end, one.end)):
                if begin < stop:
                    self.put(one._replace(address=begin, size=stop - begin))

    def join(self, address: int, size: int, stream: int) -> None:
        """Restore an unmapped range, merged with adjacent expandable ranges."""
        place = bisect_left(self._starts, address)
        before = self._at[self._starts[place - 1]] if place else None
        if before is not None and not (before.end == address and before.expandable and before.stream == stream):
            before = None
        after = self._at.get(address + size)
        if after is not None and not (after.expandable and after.stream == stream):
            after = None
        if before is not None:
            address, size = before.address, before.size + size
            self.remove(before.address)
        if after is not None:
            size += after.size
            self.remove(after.address)
        like = before or after
        self.put(Range(address, size, stream, like is not None and like.small, True, like.pool if like else ""))


def sums(of: Allocations, numbers: Iterable[int]) -> Totals:
    """Return the sums of allocations by stack."""
    size, blocks = [0] * of.different_stacks, [0] * of.different_stacks
    for number in numbers:
        stack = of.stacks[number]
        size[stack] += of.sizes[number]
        blocks[stack] += 1
    return {stack: (size[stack], found) for stack, found in enumerate(blocks) if found}


class Replay:
    """States of one device of a snapshot at every moment.

    ``allocated``, ``active``, ``requested`` and ``reserved`` have one value more than the trace has entries, in bytes:
    position 0 is the state before the first entry, position ``k + 1`` that after entry ``k``; ``at`` indexes by entry.
    """

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.snapshot, self.device = snapshot, device
        self.allocations = Allocations(snapshot, device)
        self.trace = self.allocations.trace
        self.entries = len(self.trace)
        self.segment_entries = [index for index, action in enumerate(self.trace.actions) if action in RESERVES]
        of, held = self.allocations, sum(one.size for one in snapshot.segments if one.device == device)
        self.allocated, self.active = of.curve(of.freed, of.sizes), of.curve(of.ends, of.sizes)
        self.requested, self.reserved = of.curve(of.ends, of.requested), reserved_curve(self.trace, held)
        self.peak_bytes = max(self.allocated)
        self.peak_index = self.allocated.index(self.peak_bytes) - 1
        """The first entry at which allocated memory is highest; -1: before the first."""
        self.ooms = [index for index, action in enumerate(self.trace.actions) if action == OOM]
        self._taken: dict[int, list[int]] = {}

    def ranges_at(self, index: int) -> list[Range]:
        """Return the segments, or mapped ranges, right after entry ``index``, by address."""
        trace = self.trace
        state = _State(
            [
                Range(one.address, one.size, one.stream, one.small, one.expandable, one.pool)
                for one in self.snapshot.segments
                if one.device == self.device
            ]
        )
        addresses, sizes, streams = (
            columns(trace.addresses, "Q"),
            columns(trace.sizes, "q"),
            columns(trace.streams, "q"),
        )
        for entry in reversed(self.segment_entries[bisect_right(self.segment_entries, index) :]):
            state.undo(trace.actions[entry], addresses[entry], sizes[entry], streams[entry])
        return state.ranges()

    @property
    def last(self) -> int:
        """The index of the last entry; -1 without a trace."""
        return self.entries - 1

    def at(self, curve: "array[int]", index: int) -> int:
        """Return a curve's value right after entry ``index``."""
        return curve[max(BEFORE, min(index, self.last)) + 1]

    def active_at(self, index: int) -> list[int]:
        """Return the allocations whose blocks are in use (allocated or pending) right after entry ``index``."""
        index = max(BEFORE, min(index, self.last))
        # Two results are kept, for the mark and the cursor: one of them stays while the other moves.
        found = self._taken.pop(index, None)
        if found is None:
            of = self.allocations
            begun = bisect_right(of.begins, index, 0, of.in_window)
            found = [number for number, end in enumerate(of.ends[:begun]) if end > index]
            found += (number for number in range(of.in_window, len(of.ends)) if of.ends[number] > index)
        self._taken = {**dict(list(self._taken.items())[-1:]), index: found}
        return found

    def totals_at(self, index: int) -> Totals:
        """Return the bytes and blocks held by the program right after entry ``index``, by stack."""
        return sums(self.allocations, self.live_at(index))

    def live_at(self, index: int) -> list[int]:
        """Return the allocations that the program holds right after entry ``index``."""
        index = max(BEFORE, min(index, self.last))
        freed, active = self.allocations.freed, self.active_at(index)
        if self.at(self.active, index) == self.at(self.allocated, index):
            return active  # no block waits for a stream
        return [number for number in active if freed[number] > index]

    def time_of(self, index: int) -> int:
        """Return an entry's time, microseconds since the epoch; 0 if none was recorded."""
        return columns(self.trace.times, "q")[index] if 0 <= index < self.entries else 0

    def oom_index(self) -> int | None:
        """Return the last out-of-memory entry; None if there is none."""
        return self.ooms[-1] if self.ooms else None


def pending_states(replay: Replay, index: int) -> int:
    """Return an estimate of the bytes that optimizer states still needed, including the failed request.

    An optimizer creates its states parameter by parameter; a state's size is its parameter's, times the ratio of the
    data types' widths. The states created so far are recognised by their stacks; the parameters are a group of earlier
    allocations from one line of code. The smallest consistent estimate counts; 0 if the request was not for states, or
    if no estimate is consistent.
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
