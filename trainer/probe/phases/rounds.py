"""Groups updates of several engines or optimizers into rounds of the training loop: one round is one step of the run.

The order of updates is no evidence: critic, critic, critic, actor may be a round with an inner loop over the critic,
or three rounds of a loop in which the actor updates in every third. The code decides: every update has a place, the
calls that led to it, and the loops of the frame in which the places of two updates part are known from its bytecode.
Control that has jumped back is in the next round, unless it jumped within an inner loop that leaves another update out.
It has also jumped back from one branch of an ``if`` to the other.
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
"""Updates of one optimizer in one round; an inner loop that makes more is one over data."""
_ALONE = 2
"""After so many rounds of one alone, another one at the same place is no part of them."""
_KEPT_SITES = 4
"""Places kept for each updater: those it updated at last."""
_KEPT_ROUNDS = 32
"""Different rounds that are remembered."""

Site = tuple[tuple[CodeType, int], ...]
"""Place of an update: the code and the position in it (a byte offset) of every frame, the outermost first."""


class Place:
    """A place at which some engines or optimizers have updated."""

    __slots__ = ("keys", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.keys: set[int] = set()
        """Keys of those that have."""


class Entry(NamedTuple):
    """One update."""

    key: int
    """Key of the engine or optimizer that updated."""
    place: Place
    exhausted: bool = False
    """A dataloader came to its end between the update before and this one."""
    freed: bool = False
    """The engine or optimizer of the update before has been freed since."""
    fetched: bool = False
    """A batch was fetched between the update before and this one."""


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
        self._places: list[Place] = []
        """All known places, each once."""
        self._own: dict[int, list[Place]] = {}
        """Places by key."""
        self._shared: dict[tuple[int, int], int] = {}
        """Number of loops that two places are both in, by the ids of both."""
        self._branches: dict[tuple[int, int], bool] = {}
        """Whether two places are branches, by the ids of both."""
        self._loose: set[int] = set()
        """Keys of those that update in an inner loop over data, where every update is a round."""
        self._closed: dict[tuple[int, ...], int] = {}
        """Number of rounds so far, by the keys that updated in them, in order."""
        self._held: list[Entry] = []
        """Updates that are over, of rounds that are not."""
        self._counts: dict[int, int] = {}
        """Number of updates held, by key."""
        self._similar: list[tuple[int, ...]] = []
        """Keys of the closed rounds that begin with those held."""
        self._may_go_on: dict[tuple[int, ...], bool] = {}
        """Whether rounds may have further updates, by the ids of the places of theirs so far."""
        self._unsplit = False
        """The updates held may be of several rounds: since they were split, a place was learned or a round closed."""

    @property
    def width(self) -> int:
        """Number of different engines or optimizers among the updates held."""
        return len(self._counts)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the updates held, in order."""
        return tuple(entry.key for entry in self._held)

    def note(self, key: int, site: Site, exhausted: bool = False, freed: bool = False, fetched: bool = False) -> Entry:
        """Learn the place of an update that begins.

        Args:
            key: key of the engine or optimizer.
            site: where it updates.
            exhausted: a dataloader came to its end since the update before.
            freed: the engine or optimizer of the update before has been freed since.
            fetched: a batch was fetched since the update before.
        """
        own = self._own.setdefault(key, [])
        place = next((each for each in own if each.site == site), None)
        if place is None:
            place = self._learn(key, own, site)
        return Entry(key, place, exhausted, freed, fetched)

    def over(self, entry: Entry, waits: bool = False) -> list[int]:
        """Return the lengths of the rounds, of the updates held, that are over as an update begins.

        Args:
            entry: the update.
            waits: leave that to the next update.
        """
        self._unsplit |= waits
        if waits or not self._held:
            return []
        if self._unsplit or self._is_over_data(self._held[-1], self._counts, entry):
            found = [len(each) for each in self.split([*self._held, entry])[:-1]]
            self._unsplit = bool(found)  # the rounds that are closed now may tell more of the last one
            return found
        return [len(self._held)] if self._begins(self._held[-1], self._counts, entry) else []

    def add(self, entry: Entry) -> None:
        """Hold an update that is over."""
        self._held.append(entry)
        self._counts[entry.key] = self._counts.get(entry.key, 0) + 1
        length = len(self._held)
        if length == 1:
            self._similar = list(self._closed)
        self._similar = [keys for keys in self._similar if len(keys) >= length and keys[length - 1] == entry.key]

    def is_whole(self) -> bool:
        """Return whether a round is over with the update added last, by comparison with similar rounds.

        It is not where the round could go on to a place at which an update is made now and then (a regulariser).
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
        """Return the lengths of the rounds of all updates held; no more are to come.

        Args:
            exhausted: a dataloader came to its end since the last one.
        """
        rounds = self.split(self._held)
        if exhausted and rounds and self._is_inner(rounds[-1][-1]):
            rounds[-1:] = self._split_loop(rounds[-1])
        return [len(each) for each in rounds]

    def close(self, lengths: Sequence[int]) -> None:
        """Learn the rounds that are over, the first of the updates held, by their lengths."""
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
        """Learn that the last round closed, of these keys, had one more update."""
        self._closed.pop(keys, None)
        self._closed[(*keys, key)] = 1

    def split(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Split updates into rounds; all but the last are over."""
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
        """Return whether an update at another place than those passed would be one more of the round of ``last``."""
        return any(
            not self._begins(last, self._counts, Entry(key, place))
            for place in self._places
            if id(place) not in passed
            for key in place.keys
        )

    def _split_loop(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Split the updates of what has turned out to be a loop over data."""
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
        """Return the place of a site that this key has not updated at."""
        place = next((each for each in self._places if each.site == site), None)
        # One more of many optimizers at a place, as in a loop over them, changes nothing for the updates before.
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
            return True  # one line that updated the other alone until now: stages of a training, one after the other
        shared = self._loops_around(last.place, entry.place)
        # Where one line updates now this, now that, those that exist together make a round, as a list of them.
        back = repeated or entry.freed if parted is None else parted[1] < parted[0] or not shared
        # With a batch each, or in the only loop, two branches are two rounds; else a loop over the branches is inside.
        if back or ((entry.fetched or shared == 1) and self._are_branches(last.place, entry.place)):
            return not self._is_inner(last, entry)
        # Onward, out of a loop: the inner loop of a round, or a loop of its own before this one (a warm-up).
        left_a_loop = self._loops_around(last.place, last.place) > shared
        return left_a_loop and not self._is_inner(last)

    def _is_inner(self, entry: Entry, second: Entry | None = None) -> bool:
        """Return whether updates share an inner loop: another's is outside of it, in a loop around both."""
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
        """Return whether control can come from one place to another only as a loop around both goes on."""
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
    """Return whether a loop has gone on between two calls: the second lies before the first one, or is the same."""
    parted = _part(first, second)
    return first == second if parted is None else parted[1] < parted[0]


def _part(first: Site, second: Site) -> tuple[int, int] | None:
    """Return both positions in the frame in which two places part; None where they are the same."""
    frame = _parting_frame(first, second)
    return None if frame is None else frame[1:]


def _are_branches(first: Site, second: Site) -> bool:
    frame = _parting_frame(first, second)
    return frame is not None and not can_follow(*frame)


def _parting_frame(first: Site, second: Site) -> tuple[CodeType, int, int] | None:
    """Return the frame in which two places part, and both positions in it; None where they are the same."""
    for (code, at), (other, other_at) in zip(first, second, strict=False):
        if code is not other:
            return None  # one call that calls now this, now that
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
