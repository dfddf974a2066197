"""Numbers stacks: a million lists of frames become a column of numbers, and each distinct stack is kept once."""

from array import array
from collections.abc import Sequence
from itertools import chain
from operator import eq, itemgetter
from typing import Any

from ..text import sanitize
from .model import Frame

_PIECE = 8192
"""Entries processed at once: the identities of a million stacks would need hundreds of megabytes."""
_HEAD = 6
"""Innermost frames that distinguish most stacks; longer stacks are looked up by these, and then compared."""
_LARGEST_LINE = 2**47


class Stacks:
    """All frames and stacks of a snapshot; ``stacks[0]`` is the empty one."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.stacks: list[list[int]] = [[]]
        self._frame_of: dict[Frame, int] = {}
        self._frame_by_id: dict[int, int] = {}
        self._number_of: dict[tuple[int, ...], int] = {(): 0}
        self._by_ids: dict[tuple[int, ...], int] = {(): 0}
        self._by_head: dict[tuple[int, ...], int] = {}
        self._raw: list[Any] = [[]]
        # Identities are keys here, so their objects must stay alive.
        self._kept: list[Any] = []
        self._head = itemgetter(*range(_HEAD))

    def column(self, stacks: Sequence[Any]) -> "array[int]":
        """Return the numbers of a column of stacks, each a list of dictionaries, innermost first.

        Entries share their frames' dictionaries, so a stack is identified by the frames' identities. A long stack is
        looked up by its innermost frames, and the candidate compared with it: list comparison checks identities first.

        Raises:
            TypeError, ValueError, AttributeError, KeyError: a stack is invalid.
        """
        column: array[int] = array("I")
        for begin in range(0, len(stacks), _PIECE):
            column.extend(self._piece(stacks[begin : begin + _PIECE]))
        return column

    def number(self, frames: Any) -> int:
        """Return the number of one stack."""
        key = tuple(map(id, frames))
        found = self._by_ids.get(key)
        return self._new(key, frames) if found is None else found

    def _piece(self, stacks: Sequence[Any]) -> list[int]:
        long = [len(frames) > 2 * _HEAD for frames in stacks]
        if not any(long):
            return self._by_frames(stacks)
        if all(long):
            return self._by_heads(stacks)
        short = iter(self._by_frames([frames for frames, is_long in zip(stacks, long, strict=True) if not is_long]))
        rest = iter(self._by_heads([frames for frames, is_long in zip(stacks, long, strict=True) if is_long]))
        return [next(rest) if is_long else next(short) for is_long in long]

    def _by_frames(self, stacks: Sequence[Any]) -> list[int]:
        found = list(map(self._by_ids.get, [tuple(map(id, frames)) for frames in stacks]))
        if None in found:
            return list(map(self.number, stacks))
        return found  # type: ignore[return-value]  # no None is left

    def _by_heads(self, stacks: Sequence[Any]) -> list[int]:
        identities = map(id, chain.from_iterable(map(self._head, stacks)))
        keys = list(zip(*[identities] * _HEAD, strict=True))
        found = [self._by_head.get(key, 0) for key in keys]
        same = list(map(eq, map(self._raw.__getitem__, found), stacks))
        if all(same):
            return found
        for place, is_same in enumerate(same):
            if not is_same:
                found[place] = self.number(stacks[place])
                self._by_head.setdefault(keys[place], found[place])
        return found

    def _new(self, key: tuple[int, ...], frames: Any) -> int:
        self._kept.append(frames)
        numbers = tuple([self._frame(frame) for frame in frames])
        found = self._number_of.get(numbers)
        if found is None:
            found = self._number_of[numbers] = len(self.stacks)
            self.stacks.append(list(numbers))
            self._raw.append(frames)
        self._by_ids[key] = found
        return found

    def _frame(self, raw: dict[str, Any]) -> int:
        found = self._frame_by_id.get(id(raw))
        if found is None:
            name, filename, line = raw.get("name") or "", raw.get("filename") or "", raw.get("line") or 0
            if not isinstance(name, str) or not isinstance(filename, str):
                raise TypeError("a frame whose name is no text")
            if not isinstance(line, int) or not 0 <= line < _LARGEST_LINE:
                raise ValueError("a frame whose line is no number")
            frame = Frame(sanitize(name, 300), sanitize(filename, 1000), line)
            found = self._frame_of.setdefault(frame, len(self.frames))
            if found == len(self.frames):
                self.frames.append(frame)
            self._frame_by_id[id(raw)] = found
        return found
