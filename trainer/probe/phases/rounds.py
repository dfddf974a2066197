"""Groups updates of several engines or optimizers into rounds of the training loop: one round is one step of the run.

The order of updates is no evidence: critic, critic, critic, actor may be a round with an inner loop over the critic,
or three rounds of a loop in which the actor updates in every third. The code decides: every update has a place, the
calls that led to it, and the loops of the frame in which the places of two updates part are known from its bytecode.
Control that has jumped back is in the next round, unless it jumped within an inner loop that leaves another update out.
"""

import dis
import os
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

import torch

LIBRARIES = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep)
"""Folders of the probe and of PyTorch, whose frames are no place in a script."""
INNER_LIMIT = 128
"""Updates in one round; an inner loop that makes more is one over data."""
_ALONE = 2
"""After so many rounds of one alone, another one at the same place is no part of them."""
_KEPT_SITES = 4
"""Places kept for each updater: those it updated at last."""
_KEPT_ROUNDS = 32
"""Different rounds that are remembered."""

Site = tuple[tuple[CodeType, int], ...]
"""Place of an update: the code and the position in it (a byte offset) of every frame, the outermost first."""


class Entry(NamedTuple):
    """One update."""

    key: int
    """Key of the engine or optimizer that updated."""
    site: Site
    exhausted: bool = False
    """A dataloader came to its end between the update before and this one."""


def call_site(frame: FrameType | None, skipped: tuple[str, ...] = ()) -> Site:
    """Return the place of a call. Frames are not kept: they would keep their variables alive.

    Args:
        frame: frame of the call.
        skipped: folders of libraries whose innermost frames do not count: there are loops in PyTorch's own ``step``.
    """
    found: list[tuple[CodeType, int]] = []
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    found.reverse()
    return tuple(found)


class Rounds:
    """Splits a sequence of updates into rounds, by all places that updates were seen at."""

    def __init__(self) -> None:
        self._sites: dict[int, list[Site]] = {}
        self._loose: set[int] = set()
        """Keys of those that update in an inner loop over data, where every update is a round."""
        self._closed: dict[tuple[int, ...], int] = {}
        """Number of rounds so far, by the set of keys that updated in them."""

    @property
    def known(self) -> int:
        """Number of engines or optimizers that have updated."""
        return len(self._sites)

    def note(self, entry: Entry) -> None:
        """Learn the place of an update that begins."""
        sites = self._sites.setdefault(entry.key, [])
        if entry.site not in sites:
            sites.append(entry.site)
            del sites[:-_KEPT_SITES]

    def split(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Split updates into rounds; all but the last are over."""
        rounds: list[list[Entry]] = []
        for entry in entries:
            last = rounds[-1] if rounds else []
            if last and (len(last) >= INNER_LIMIT or (entry.exhausted and self._is_inner(last[-1]))):
                self._loose.update(each.key for each in last)
                rounds[-1:] = [[each] for each in last]
                rounds.append([entry])
            elif not last or self._begins(last, entry):
                rounds.append([entry])
            else:
                last.append(entry)
        return rounds

    def close(self, entries: Sequence[Entry]) -> None:
        """Learn a round that is over."""
        keys = tuple(entry.key for entry in entries)
        if keys in self._closed or len(self._closed) < _KEPT_ROUNDS:
            self._closed[keys] = self._closed.get(keys, 0) + 1

    def is_whole(self, entries: Sequence[Entry]) -> bool:
        """Return whether a round is over with the update that ended just now, by comparison with similar rounds."""
        keys = tuple(entry.key for entry in entries)
        longer = any(len(other) > len(keys) and other[: len(keys)] == keys for other in self._closed)
        return not longer and self._closed.get(keys, 0) >= 2

    def _begins(self, current: Sequence[Entry], entry: Entry) -> bool:
        """Return whether an update begins a new round after those of ``current``."""
        last = current[-1]
        parted = _part(last.site, entry.site)
        shared = _common_loops(last.site, entry.site)
        repeated = any(each.key == entry.key for each in current)
        if parted is None and not repeated and len(current) == 1 and self._closed.get((last.key,), 0) >= _ALONE:
            return True  # one line that updated the other alone until now: stages of a training, one after the other
        back = repeated if parted is None else parted[1] < parted[0] or not shared
        if back:
            return not self._is_inner(last, entry)
        # Onward, out of a loop: the inner loop of a round, or a loop of its own before this one (a warm-up).
        left_a_loop = len(_common_loops(last.site, last.site)) > len(shared)
        return left_a_loop and not self._is_inner(last)

    def _is_inner(self, entry: Entry, second: Entry | None = None) -> bool:
        """Return whether updates share an inner loop: another's is outside of it, in a loop around both."""
        both = (entry,) if second is None else (entry, second)
        if any(each.key in self._loose for each in both):
            return False
        around = len(_common_loops(entry.site, both[-1].site))
        for key, sites in self._sites.items():
            if any(each.key == key for each in both):
                continue
            for site in sites:
                shared = len(_common_loops(entry.site, site))
                nearest = max(len(_common_loops(own, site)) for own in self._sites.get(entry.key, [entry.site]))
                if 0 < shared < around and shared == nearest:
                    return True
        return False


def went_back(first: Site, second: Site) -> bool:
    """Return whether a loop has gone on between two calls: the second lies before the first one, or is the same."""
    parted = _part(first, second)
    return first == second if parted is None else parted[1] < parted[0]


def _part(first: Site, second: Site) -> tuple[int, int] | None:
    """Return both positions in the frame in which two places part; None where they are the same."""
    for (code, at), (other, other_at) in zip(first, second, strict=False):
        if code is not other:
            return None  # one call that calls now this, now that
        if at != other_at:
            return at, other_at
    return None


def _common_loops(first: Site, second: Site) -> list[tuple[int, tuple[int, int]]]:
    """Return the loops that two places are both in, from the outermost in; each with the depth of its frame."""
    found: list[tuple[int, tuple[int, int]]] = []
    for depth, ((code, at), (other, other_at)) in enumerate(zip(first, second, strict=False)):
        if code is not other:
            break
        found += [(depth, loop) for loop in loops(code) if _in(loop, at) and _in(loop, other_at)]
        if at != other_at:
            break
    return found


_loops: dict[int, tuple[CodeType, list[tuple[int, int]]]] = {}


def loops(code: CodeType) -> list[tuple[int, int]]:
    """Return the first and last position of each loop of a function, from its jumps backward."""
    known = _loops.get(id(code))
    if known is not None and known[0] is code:
        return known[1]
    ends: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name:
            target = int(instruction.argval)
            ends[target] = max(ends.get(target, 0), instruction.offset)
    found = sorted(ends.items())
    _loops[id(code)] = (code, found)
    return found


def _in(loop: tuple[int, int], position: int) -> bool:
    return loop[0] <= position <= loop[1]
