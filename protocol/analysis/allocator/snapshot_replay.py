"""State of the allocator at every entry of a trace: curves of figures, live allocations, and segments.

Like PyTorch's own viewer, the replay is anchored at the window's end: the segments are known then, and walking the
trace from there gives every earlier moment. The moment of entry ``k`` is the state right after it; ``-1`` is the state
before the first. The live allocations at any entry are found without walking the whole trace, from checkpoints at
regular intervals; addresses are numbered in ascending order, so they need no sorting when the cursor moves.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress
from typing import NamedTuple

from ...snapshot.columns import OOM, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, Frame, Snapshot, Trace
from .allocations import (
    BEFORE,
    BEGINS,
    ENDS,
    FREED,
    FREED_AND_ENDS,
    NOTHING,
    RESERVES,
    Allocations,
    columns,
    reserved_curve,
)
from .settings import SMALL_MOST_BYTES

_STRIDE = 512
_MOST_KEPT = 4_000_000
"""Maximum number of ranges stored in all states together, one reference each."""
_LEAST_STRIDE = 2048
_MOST_LIVE = 8_000_000
"""Maximum number of owners in all checkpoints together, 4 bytes each."""
_MOST_CHECKPOINTS = 256

_MOST_SUMS = 32

Totals = dict[int, tuple[int, int]]
"""Bytes and blocks by stack."""

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


class Range(NamedTuple):
    """A segment, or a mapped range of an expandable one, at a moment."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    pool: str
    """A private pool's identifier; ``""`` for the shared one, and for segments that were gone by the end."""

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + self.size


class SegmentHistory:
    """Undoes changes of segments from the end backwards; the state is stored at regular intervals."""

    def __init__(self, snapshot: Snapshot, device: int, trace: Trace, entries: list[int]) -> None:
        self._trace, self._entries = trace, entries
        self._addresses, self._sizes = columns(trace.addresses, "Q"), columns(trace.sizes, "q")
        self._streams = columns(trace.streams, "q")
        last = [
            Range(one.address, one.size, one.stream, one.small, one.expandable, one.pool)
            for one in snapshot.segments
            if one.device == device
        ]
        state = _State(last)
        self._stride = max(_STRIDE, len(entries) * (len(last) + 1) // _MOST_KEPT)
        self._kept: list[list[Range]] = []
        """States after all changes, after all but ``stride``, all but ``2 * stride``, and so on."""
        for undone in range(len(entries) + 1):
            if undone % self._stride == 0:
                self._kept.append(state.ranges())
            if undone < len(entries):
                self._undo(state, entries[len(entries) - 1 - undone])

    def at(self, index: int) -> list[Range]:
        """Return the ranges right after entry ``index``, by address."""
        undone = len(self._entries) - bisect_right(self._entries, index)
        kept = undone // self._stride
        if undone % self._stride == 0:
            return self._kept[kept]
        state = _State(self._kept[kept])
        for number in range(kept * self._stride, undone):
            self._undo(state, self._entries[len(self._entries) - 1 - number])
        return state.ranges()

    def _undo(self, state: "_State", entry: int) -> None:
        action, address, size = self._trace.actions[entry], self._addresses[entry], self._sizes[entry]
        stream = self._streams[entry]
        if action == SEGMENT_ALLOC:
            state.remove(address)
        elif action == SEGMENT_FREE:
            state.put(Range(address, size, stream, size <= 2 * SMALL_MOST_BYTES, False, ""))
        elif action == SEGMENT_MAP:
            state.cut(address, address + size)
        else:
            state.join(address, size, stream)


class _State:
    """Ranges by address; a later one at the same address replaces the one before."""

    def __init__(self, ranges: list[Range]) -> None:
        self._at = {one.address: one for one in ranges}
        self._starts = sorted(self._at)

    def ranges(self) -> list[Range]:
        return [self._at[start] for start in self._starts]

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


class ActiveBlocks(NamedTuple):
    """Numbers and addresses of active allocations, ordered by address."""

    numbers: list[int]
    addresses: list[int]


class LiveSets:
    """The live sets of a trace, computed from the checkpoint before an entry."""

    def __init__(self, of: Allocations) -> None:
        self._of = of
        self._slots, self._addresses = _slots(of)
        self._in_order = all(map(int.__le__, self._addresses, self._addresses[1:]))
        kept = max(1, min(_MOST_CHECKPOINTS, _MOST_LIVE // max(1, len(self._addresses))))
        self._stride = max(_LEAST_STRIDE, -(-of.entries // kept))
        self._owners: list[array[int]] = []
        self._sums: dict[int, tuple[list[int], list[int]]] = {}
        owner = array("I", bytes(4 * len(self._addresses)))
        for number, begin in enumerate(of.begins):
            if begin == BEFORE:
                owner[self._slots[number]] = number + 1
        for begin in range(0, max(1, of.entries), self._stride):
            self._owners.append(owner[:])
            self._advance(owner, begin, min(begin + self._stride, of.entries))

    def active_blocks_at(self, index: int) -> ActiveBlocks:
        """Return the allocations whose blocks are in use right after entry ``index``."""
        nearest = min((index + 1) // self._stride, len(self._owners) - 1)
        owner = self._owners[nearest][:]
        self._advance(owner, nearest * self._stride, index + 1)
        numbers = [one - 1 for one in owner if one]
        addresses = list(compress(self._addresses, owner))
        if not self._in_order:
            order = sorted(range(len(numbers)), key=addresses.__getitem__)
            numbers, addresses = [numbers[at] for at in order], [addresses[at] for at in order]
        return ActiveBlocks(numbers, addresses)

    def totals_at(self, index: int) -> Totals:
        """Return the memory held by the program right after entry ``index``, by stack.

        The sums at a checkpoint are cached, because a moving cursor stays near the same ones.
        """
        of = self._of
        nearest = min((index + 1) // self._stride, len(self._owners) - 1)
        begin, end = nearest * self._stride, index + 1
        kept = self._sums.get(nearest)
        if kept is None:
            owners = (owner - 1 for owner in self._owners[nearest] if owner)
            kept = self._sums[nearest] = _by_stack(of, [number for number in owners if of.freed[number] >= begin])
        size, blocks = kept[0][:], kept[1][:]
        stacks, sizes = of.stacks, of.sizes
        for event, number in zip(of.events[begin:end], of.numbers[begin:end], strict=True):
            if event == BEGINS:
                size[stacks[number]] += sizes[number]
                blocks[stacks[number]] += 1
            elif event in (FREED, FREED_AND_ENDS):
                size[stacks[number]] -= sizes[number]
                blocks[stacks[number]] -= 1
        for odd in of.odd[bisect_left(of.odd, (begin,)) : bisect_left(of.odd, (end,))]:
            if odd.frees:
                size[stacks[odd.number]] -= sizes[odd.number]
                blocks[stacks[odd.number]] -= 1
        return _totals(size, blocks)

    def _advance(self, owner: "array[int]", begin: int, end: int) -> None:
        """Apply the entries ``begin`` up to but not including ``end`` to the owners of addresses."""
        of, slots = self._of, self._slots
        for event, number in zip(of.events[begin:end], of.numbers[begin:end], strict=True):
            if event == BEGINS:
                owner[slots[number]] = number + 1
            elif event >= ENDS:
                owner[slots[number]] = 0
        for odd in of.odd[bisect_left(of.odd, (begin,)) : bisect_left(of.odd, (end,))]:
            if odd.ends and owner[slots[odd.number]] == odd.number + 1:
                owner[slots[odd.number]] = 0


def sums(of: Allocations, numbers: list[int]) -> Totals:
    """Return the sums of allocations by stack."""
    return _totals(*_by_stack(of, numbers))


def _by_stack(of: Allocations, numbers: list[int]) -> tuple[list[int], list[int]]:
    size, blocks = [0] * of.different_stacks, [0] * of.different_stacks
    of_stack = map(of.stacks.__getitem__, numbers)
    for stack, one in zip(of_stack, map(of.sizes.__getitem__, numbers), strict=True):
        size[stack] += one
        blocks[stack] += 1
    return size, blocks


def _totals(size: list[int], blocks: list[int]) -> Totals:
    return {stack: (size[stack], found) for stack, found in enumerate(blocks) if found}


class Begun:
    """Sums by stack of the window's first allocations up to any number, with stored sums at regular intervals."""

    def __init__(self, of: Allocations) -> None:
        self._of = of
        self._stride = max(1, -(-of.in_window // _MOST_SUMS))
        size, blocks = array("q", bytes(8 * of.different_stacks)), array("q", bytes(8 * of.different_stacks))
        self._kept: list[tuple[array[int], array[int]]] = []
        for begin in range(0, of.in_window + 1, self._stride):
            self._kept.append((size[:], blocks[:]))
            self._add(size, blocks, begin, min(begin + self._stride, of.in_window))

    def sums(self, low: int, high: int) -> Totals:
        """Return the sums of the allocations numbered from ``low`` up to but not including ``high``."""
        (less, fewer), (size, blocks) = self._up_to(low), self._up_to(high)
        return {
            stack: (size[stack] - less[stack], count - fewer[stack])
            for stack, count in enumerate(blocks)
            if count > fewer[stack]
        }

    def _up_to(self, number: int) -> "tuple[array[int], array[int]]":
        nearest = number // self._stride
        size, blocks = (kept[:] for kept in self._kept[nearest])
        self._add(size, blocks, nearest * self._stride, number)
        return size, blocks

    def _add(self, size: "array[int]", blocks: "array[int]", begin: int, end: int) -> None:
        for stack, one in zip(self._of.stacks[begin:end], self._of.sizes[begin:end], strict=True):
            size[stack] += one
            blocks[stack] += 1


def _slots(of: Allocations) -> tuple[list[int], list[int]]:
    """Return the slot of each allocation, and the address of each slot.

    In a complete trace an address has one owner at a time. If frees are missing, a block from before the window may
    overlap another block of the trace: it gets its own slot.
    """
    addresses = sorted(set(of.addresses))
    place = dict(zip(addresses, range(len(addresses)), strict=True))
    slots = list(map(place.__getitem__, of.addresses))
    before = {of.addresses[number] for number, begin in enumerate(of.begins) if begin == BEFORE}
    if before:
        seen: set[int] = set()
        for number, (address, begin) in enumerate(zip(of.addresses, of.begins, strict=True)):
            if address not in before:
                continue
            if begin == BEFORE and address in seen:
                slots[number] = len(addresses)
                addresses.append(address)
            seen.add(address)
    return slots, addresses


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
        self._curves()
        self.peak_bytes = max(self.allocated)
        self.peak_index = self.allocated.index(self.peak_bytes) - 1
        """The first entry at which allocated memory is highest; -1: before the first."""
        self.ooms = [index for index, action in enumerate(self.trace.actions) if action == OOM]
        self._live = LiveSets(self.allocations)
        self._taken: dict[int, ActiveBlocks] = {}

    def complete(self, snapshot: Snapshot) -> None:
        """Add the stacks of the complete snapshot, if this was made without them."""
        self.snapshot = snapshot
        self.allocations.add_stacks(snapshot)
        self.trace = self.allocations.trace

    @cached_property
    def segments(self) -> SegmentHistory:
        """The segments at any moment."""
        return SegmentHistory(self.snapshot, self.device, self.trace, self.segment_entries)

    @property
    def last(self) -> int:
        """The index of the last entry; -1 without a trace."""
        return self.entries - 1

    def at(self, curve: "array[int]", index: int) -> int:
        """Return a curve's value right after entry ``index``."""
        return curve[max(BEFORE, min(index, self.last)) + 1]

    def _curves(self) -> None:
        of = self.allocations
        sizes, asked = of.sizes, of.requested
        before = [number for number, begin in enumerate(of.begins) if begin == BEFORE]
        # freed == BEFORE: it was pending at the start of the window and never counts as allocated.
        held = sum(sizes[number] for number in before if of.freed[number] != BEFORE)
        taken, wanted = (sum(column[number] for number in before) for column in (sizes, asked))
        self.allocated, self.active, self.requested = (array("q", [start]) for start in (held, taken, wanted))
        add_held, add_taken, add_wanted = self.allocated.append, self.active.append, self.requested.append
        odd = [*of.odd, None]
        begin, at = 0, 0
        while begin < of.entries:
            following = odd[at]
            end = of.entries if following is None else following.at + 1
            for event, number in zip(of.events[begin:end], of.numbers[begin:end], strict=True):
                if event == BEGINS:
                    size = sizes[number]
                    held += size
                    taken += size
                    wanted += asked[number]
                elif event == FREED:
                    held -= sizes[number]
                elif event != NOTHING:
                    size = sizes[number]
                    taken -= size
                    wanted -= asked[number]
                    held -= size if event == FREED_AND_ENDS else 0
                add_held(held)
                add_taken(taken)
                add_wanted(wanted)
            while (one := odd[at]) is not None and one.at < end:
                held -= sizes[one.number] if one.frees else 0
                taken -= sizes[one.number] if one.ends else 0
                wanted -= asked[one.number] if one.ends else 0
                at += 1
            self.allocated[-1], self.active[-1], self.requested[-1] = held, taken, wanted
            begin = end
        end = sum(segment.size for segment in self.snapshot.segments if segment.device == self.device)
        self.reserved = reserved_curve(self.trace, end)

    def active_blocks_at(self, index: int) -> ActiveBlocks:
        """Return the allocations active (allocated or pending) right after entry ``index``, by address."""
        index = max(BEFORE, min(index, self.last))
        # Two results are kept, for the mark and the cursor: one of them stays while the other moves.
        found = self._taken.pop(index, None) or self._live.active_blocks_at(index)
        self._taken = {**dict(list(self._taken.items())[-1:]), index: found}
        return found

    def active_at(self, index: int) -> list[int]:
        """Return the allocations whose blocks are in use (allocated or pending) right after entry ``index``."""
        return self.active_blocks_at(index).numbers

    def totals_at(self, index: int) -> Totals:
        """Return the bytes and blocks held by the program right after entry ``index``, by stack."""
        return self._live.totals_at(max(BEFORE, min(index, self.last)))

    @cached_property
    def begun(self) -> Begun:
        """The sums of the window's allocations."""
        return Begun(self.allocations)

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
