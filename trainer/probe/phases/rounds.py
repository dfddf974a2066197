"""Groups updates of several engines or optimizers into rounds of the training loop: one round is one step of the run.

The order of updates is no evidence: critic, critic, critic, actor may be a round with an inner loop over the critic,
or three rounds of a loop in which the actor updates in every third. The code decides. The place of an update is its
call stack. Two places part in one frame, and that frame's bytecode shows its loops. Control that has jumped back is in
the next round, unless it jumped within an inner loop that excludes another update. Going from one branch of an ``if``
to the other is also a jump back.
"""

import os
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from .code_flow import can_follow, loops, within

LIBRARIES = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep)
"""Folders of the probe and of PyTorch, whose frames are no place in a script."""
INNER_LIMIT = 128
"""Limit of one optimizer's updates in one round; an inner loop with more is a loop over data."""
_ALONE = 2
"""After this many rounds of one updater alone, another updater at the same place is no part of them."""
_KEPT_SITES = 4
"""Latest places kept for each updater."""
_KEPT_ROUNDS = 32
"""Limit of different rounds kept."""

Site = tuple[tuple[CodeType, int], ...]
"""Call stack of an update: code and position in it (a byte offset) of every frame, outermost first."""


class Place:
    """A place at which engines or optimizers have updated."""

    __slots__ = ("keys", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.keys: set[int] = set()
        """Keys of the engines or optimizers that updated here."""


class Entry(NamedTuple):
    """One update."""

    key: int
    """Key of the engine or optimizer that updated."""
    place: Place
    exhausted: bool = False
    """Whether a dataloader was exhausted between the previous update and this one."""
    freed: bool = False
    """Whether the engine or optimizer of the previous update has been freed."""
    fetched: bool = False
    """Whether a batch was fetched between the previous update and this one."""


def call_site(frame: FrameType | None, skipped: tuple[str, ...] = ()) -> Site:
    """Return the place of a call, without references to frames, which would keep their variables alive.

    Args:
        frame: frame of the call.
        skipped: folders of libraries whose innermost frames are left out (PyTorch's own ``step`` has loops).
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
    """Splits a sequence of updates into rounds, by the places of all updates so far."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        """All known places, each once."""
        self._own: dict[int, list[Place]] = {}
        """Places by key."""
        self._shared: dict[tuple[int, int], int] = {}
        """Number of loops that two places are both in, by the ids of both."""
        self._branches: dict[tuple[int, int], bool] = {}
        """Whether two places are branches, by the ids of both."""
        self._loose: set[int] = set()
        """Keys of updaters in an inner loop over data, where every update is a round."""
        self._closed: dict[tuple[int, ...], int] = {}
        """Number of rounds so far, by the keys that updated in them, in order."""
        self._held: list[Entry] = []
        """Finished updates of unfinished rounds."""
        self._counts: dict[int, int] = {}
        """Number of updates held, by key."""
        self._similar: list[tuple[int, ...]] = []
        """Keys of the closed rounds that begin with the updates held."""
        self._may_go_on: dict[tuple[int, ...], bool] = {}
        """Whether a round may have further updates, by the ids of its places so far."""
        self._unsplit = False
        """Whether the updates held may be of several rounds, as a place was added or a round closed since the split."""

    @property
    def width(self) -> int:
        """Number of different engines or optimizers among the updates held."""
        return len(self._counts)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the updates held, in order."""
        return tuple(entry.key for entry in self._held)

    def note(self, key: int, site: Site, exhausted: bool = False, freed: bool = False, fetched: bool = False) -> Entry:
        """Record the place of an update that begins.

        Args:
            key: key of the engine or optimizer.
            site: where it updates.
            exhausted: whether a dataloader was exhausted since the previous update.
            freed: whether the engine or optimizer of the previous update has been freed.
            fetched: whether a batch was fetched since the previous update.
        """
        own = self._own.setdefault(key, [])
        place = next((each for each in own if each.site == site), None)
        if place is None:
            place = self._learn(key, own, site)
        return Entry(key, place, exhausted, freed, fetched)

    def over(self, entry: Entry, waits: bool = False) -> list[int]:
        """Return the lengths of the rounds, among the updates held, that end before an update.

        Args:
            entry: the update, which begins.
            waits: whether to leave the decision to the next update.
        """
        self._unsplit |= waits
        if waits or not self._held:
            return []
        if self._unsplit or self._is_over_data(self._held[-1], self._counts, entry):
            found = [len(each) for each in self.split([*self._held, entry])[:-1]]
            self._unsplit = bool(found)  # closing these rounds may decide the last one
            return found
        return [len(self._held)] if self._begins(self._held[-1], self._counts, entry) else []

    def add(self, entry: Entry) -> None:
        """Hold a finished update."""
        self._held.append(entry)
        self._counts[entry.key] = self._counts.get(entry.key, 0) + 1
        length = len(self._held)
        if length == 1:
            self._similar = list(self._closed)
        self._similar = [keys for keys in self._similar if len(keys) >= length and keys[length - 1] == entry.key]

    def is_whole(self) -> bool:
        """Return whether the latest update ends its round, by comparison with similar rounds.

        It does not if the round could continue at a place with occasional updates (a regulariser).
        """
        similar = self._similar
        if len(similar) != 1 or len(similar[0]) != len(self._held) or self._closed[similar[0]] < 2:
            return False
        passed = tuple(id(entry.place) for entry in self._held)
        found = self._may_go_on.get(passed)
        if found is None:
            found = self._may_go_on[passed] = self._leads_on(self._held[-1], passed)
        return not found

    def rest(self, exhausted: bool = False) -> list[int]:
        """Return the lengths of the rounds of all updates held; no further update follows.

        Args:
            exhausted: whether a dataloader was exhausted since the last update.
        """
        rounds = self.split(self._held)
        if exhausted and rounds and self._is_inner(rounds[-1][-1]):
            rounds[-1:] = self._split_loop(rounds[-1])
        return [len(each) for each in rounds]

    def close(self, lengths: Sequence[int]) -> None:
        """Record the first of the updates held as finished rounds of these lengths, and release them."""
        held, start = self._held, 0
        for length in lengths:
            keys = tuple(entry.key for entry in held[start : start + length])
            if keys in self._closed or len(self._closed) < _KEPT_ROUNDS:
                self._closed[keys] = self._closed.get(keys, 0) + 1
            start += length
        self._held, self._counts, self._similar = [], {}, []
        for entry in held[start:]:
            self.add(entry)

    def extend(self, keys: tuple[int, ...], key: int) -> None:
        """Add one more update to the latest closed round, which had these keys."""
        self._closed.pop(keys, None)
        self._closed[(*keys, key)] = 1

    def split(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Split updates into rounds; all but the last are finished."""
        rounds: list[list[Entry]] = []
        counts: dict[int, int] = {}
        for entry in entries:
            if rounds and self._is_over_data(rounds[-1][-1], counts, entry):
                self._loose.update(counts)
                self._may_go_on.clear()
                rounds[-1:] = self._split_loop(rounds[-1])
                begins = True
            else:
                begins = not rounds or self._begins(rounds[-1][-1], counts, entry)
            if begins:
                rounds.append([])
                counts = {}
            rounds[-1].append(entry)
            counts[entry.key] = counts.get(entry.key, 0) + 1
        return rounds

    def _leads_on(self, last: Entry, passed: Sequence[int]) -> bool:
        """Return whether an update at a place other than those passed could continue the round of ``last``."""
        return any(
            not self._begins(last, self._counts, Entry(key, place))
            for place in self._places
            if id(place) not in passed
            for key in place.keys
        )

    def _split_loop(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Split updates of a round that has turned out to be a loop over data."""
        rounds: list[list[Entry]] = []
        counts: dict[int, int] = {}
        for entry in entries:
            if not rounds or entry.key in counts or self._begins(rounds[-1][-1], counts, entry):
                rounds.append([])
                counts = {}
            rounds[-1].append(entry)
            counts[entry.key] = 1
        return rounds

    def _learn(self, key: int, own: list[Place], site: Site) -> Place:
        """Add the place of a site at which this key has not updated, and return it."""
        place = next((each for each in self._places if each.site == site), None)
        # Another of many optimizers at a place, as in a loop over them, does not affect earlier updates.
        self._unsplit |= place is None or len(place.keys) < 3
        self._may_go_on.clear()
        if place is None:
            place = Place(site)
            self._places.append(place)
            self._forget_pairs()
        place.keys.add(key)
        own.append(place)
        for former in own[:-_KEPT_SITES]:
            former.keys.discard(key)
            if not former.keys:
                self._places.remove(former)
                self._forget_pairs()
        del own[:-_KEPT_SITES]
        return place

    def _forget_pairs(self) -> None:
        self._shared.clear()
        self._branches.clear()

    def _is_over_data(self, last: Entry, counts: dict[int, int], entry: Entry) -> bool:
        """Return whether the round under way turns out to be an inner loop over data."""
        return counts.get(entry.key, 0) >= INNER_LIMIT or (entry.exhausted and self._is_inner(last))

    def _begins(self, last: Entry, counts: dict[int, int], entry: Entry) -> bool:
        """Return whether an update begins a new round after those of ``counts``, of which ``last`` is the latest."""
        same = last.place is entry.place
        parted = None if same else _part(last.place.site, entry.place.site)
        repeated = entry.key in counts
        if parted is None and not repeated and counts == {last.key: 1} and self._closed.get((last.key,), 0) >= _ALONE:
            return True  # one line updated only the other until now: consecutive stages of a training
        shared = self._loops_around(last.place, entry.place)
        # If one line updates several, as in a loop over a list, those that exist together make a round.
        back = repeated or entry.freed if parted is None else parted[1] < parted[0] or not shared
        # With a batch each, or in the only loop, two branches are two rounds; else an inner loop visits the branches.
        if back or ((entry.fetched or shared == 1) and self._are_branches(last.place, entry.place)):
            return not self._is_inner(last, entry)
        # Forward and out of a loop: the inner loop of a round, or a separate loop before this one (a warm-up).
        left_a_loop = self._loops_around(last.place, last.place) > shared
        return left_a_loop and not self._is_inner(last)

    def _is_inner(self, entry: Entry, second: Entry | None = None) -> bool:
        """Return whether updates share an inner loop: a third update is outside it, in a loop around both."""
        other = second or entry
        keys = {entry.key, other.key}
        if not keys.isdisjoint(self._loose):
            return False
        around = self._loops_around(entry.place, other.place)
        for place in self._places:
            if place.keys <= keys:
                continue
            shared = self._loops_around(entry.place, place)
            if 0 < shared < around and all(self._loops_around(own, place) <= shared for own in self._own[entry.key]):
                return True
        return False

    def _are_branches(self, first: Place, second: Place) -> bool:
        """Return whether control can pass between two places only in a later iteration of a loop around both."""
        pair = id(first), id(second)
        found = self._branches.get(pair)
        if found is None:
            found = self._branches[pair] = _are_branches(first.site, second.site)
        return found

    def _loops_around(self, first: Place, second: Place) -> int:
        """Return the number of loops that two places are both in."""
        pair = id(first), id(second)
        found = self._shared.get(pair)
        if found is None:
            found = self._shared[pair] = _common_loops(first.site, second.site)
        return found


def went_back(first: Site, second: Site) -> bool:
    """Return whether a loop has advanced between two calls: the second is at an earlier place, or at the same."""
    parted = _part(first, second)
    return first == second if parted is None else parted[1] < parted[0]


def _part(first: Site, second: Site) -> tuple[int, int] | None:
    """Return both positions in the frame in which two places part; None if they are the same."""
    frame = _parting_frame(first, second)
    return None if frame is None else frame[1:]


def _are_branches(first: Site, second: Site) -> bool:
    frame = _parting_frame(first, second)
    return frame is not None and not can_follow(*frame)


def _parting_frame(first: Site, second: Site) -> tuple[CodeType, int, int] | None:
    """Return the frame in which two places part, and both positions in it; None if they are the same."""
    for (code, at), (other, other_at) in zip(first, second, strict=False):
        if code is not other:
            return None  # one call with different targets
        if at != other_at:
            return code, at, other_at
    return None


def _common_loops(first: Site, second: Site) -> int:
    """Return the number of loops that two places are both in."""
    found = 0
    for (code, at), (other, other_at) in zip(first, second, strict=False):
        if code is not other:
            break
        found += sum(within(loop, at) and within(loop, other_at) for loop in loops(code))
        if at != other_at:
            break
    return found
