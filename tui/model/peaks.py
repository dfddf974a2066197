"""The phase with a rank's peak, its lead, its dependence on batch length and step; and predicted changes of a run.

This explains a curve that is flat and then rises: with short batches, the highest phase is one whose peak does not
depend on the batch (such as the optimizer step); from some length on, it is a phase whose peak does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import msgspec

from ...protocol.messages.telemetry import Oom
from ...protocol.recording.results import PeakMark, bucket_of
from ...protocol.text import gib, sanitize

FLAT_SHARE = 0.01  # a phase whose peaks differ by less than this share over all lengths does not depend on the length
STEADY_SHARE = 0.7  # a peak grows with the batch when at least this share of the next longer batches has a higher one


@dataclass(frozen=True, slots=True)
class Crossing:
    """A batch length at which the phase with the highest peak changes."""

    below: str
    above: str
    last_below: PeakMark  # the longest batch at which `below` had the highest peak
    first_above: PeakMark
    size: float  # elements of a batch at which both peaks would be equal, by a line between the two
    ahead: bool = False
    """Whether the length is extrapolated: no batch was that long yet, and ``first_above`` is the longest batch."""


@dataclass(frozen=True, slots=True)
class PeakRanking:
    """A rank's phases ranked by their peaks, the highest first."""

    standing: tuple[PeakMark, ...]
    crossing: Crossing | None = None
    slopes: dict[str, float] | None = None
    """Bytes per element of the batch, by phase, over the longest batches; 0 for a phase with the same peak at every
    length at which it was highest, or at every length. None if there is only one length."""
    changes: tuple[tuple[int, str], ...] = ()
    """Step and phase of each change of the phase with the run's peak, including the first step."""

    @property
    def first(self) -> PeakMark:
        """The phase with the run's peak."""
        return self.standing[0]

    @property
    def next(self) -> PeakMark | None:
        """The phase with the second highest peak."""
        return self.standing[1] if len(self.standing) > 1 else None

    @property
    def by(self) -> int:
        """Bytes by which the first phase exceeds the second."""
        return self.first.bytes - (self.next.bytes if self.next is not None else 0)


def phase_words(phase: str) -> str:
    """Return a phase's name for a sentence: ``the optimizer step``, ``backward``."""
    return {"optimizer": "the optimizer step", "data": "data loading"}.get(phase) or sanitize(phase, 20)


def rank_phases(marks: Iterable[PeakMark]) -> PeakRanking | None:
    """Return the ranking from the marks of one rank; None without marks."""
    known = list(marks)
    if not known:
        return None
    standing = tuple(sorted(_highest(known).values(), key=lambda mark: -mark.bytes))
    sizes = _by_size(known)
    crossing = _crossing(sizes)
    return PeakRanking(standing, crossing, _slopes(sizes, crossing), _changes(known))


def _highest(marks: Iterable[PeakMark]) -> dict[str, PeakMark]:
    found: dict[str, PeakMark] = {}
    for mark in marks:
        if mark.phase not in found or mark.bytes > found[mark.phase].bytes:
            found[mark.phase] = mark
    return found


def _by_size(marks: Sequence[PeakMark]) -> list[dict[str, PeakMark]]:
    """Return the highest mark of each phase for each size of batch, by size.

    A size that only the first step had is excluded: before that step creates the optimizer's states, all phases are
    lower than later.
    """
    first = min(mark.step for mark in marks)
    found: dict[int, list[PeakMark]] = defaultdict(list)
    for mark in marks:
        if (bucket := bucket_of(mark.shape)) >= 0:
            found[bucket].append(mark)
    by_phase = [_highest(found[bucket]) for bucket in sorted(found)]
    return [phases for phases in by_phase if any(mark.step > first for mark in phases.values())] or by_phase


def _top(phases: dict[str, PeakMark]) -> PeakMark:
    return max(phases.values(), key=lambda mark: mark.bytes)


def _crossing(sizes: list[dict[str, PeakMark]]) -> Crossing | None:
    """Return the size at which the highest phase changes; None if it never changes, or changes several times."""
    leaders = [_top(phases).phase for phases in sizes]
    turns = [at for at in range(1, len(leaders)) if leaders[at] != leaders[at - 1]]
    if not turns and len(sizes) > 1:
        return _crossing_ahead(sizes)
    if len(turns) != 1:
        return None
    below, above = sizes[turns[0] - 1], sizes[turns[0]]
    lower, upper = _top(below), _top(above)
    low, high = lower.size, upper.size
    crossed = float(high)
    if upper.phase in below and lower.phase in above and high > low:
        before = below[upper.phase].bytes - lower.bytes
        after = upper.bytes - above[lower.phase].bytes
        crossed = low + (high - low) * -before / (after - before) if after != before else float(high)
    return Crossing(lower.phase, upper.phase, lower, upper, crossed)


def _crossing_ahead(sizes: list[dict[str, PeakMark]]) -> Crossing | None:
    """Return where a growing phase would exceed the highest one, up to 8 times the longest batch; None if nowhere."""
    leader = _top(sizes[-1])
    found: Crossing | None = None
    for phase, mark in sizes[-1].items():
        slope = _slope(sizes[-2:], phase)
        gain = slope - max(0.0, _slope(sizes[-2:], leader.phase))
        if phase == leader.phase or slope <= 0 or gain <= 0:
            continue
        size = mark.size + (leader.bytes - mark.bytes) / gain
        if size <= 8 * mark.size and (found is None or size < found.size):
            found = Crossing(leader.phase, phase, leader, mark, size, ahead=True)
    return found


def _slopes(sizes: list[dict[str, PeakMark]], crossing: Crossing | None) -> dict[str, float] | None:
    if len(sizes) < 2:
        return None
    found: dict[str, float] = {}
    for phase in dict.fromkeys(name for phases in sizes for name in phases):
        led = sizes
        if crossing is not None and not crossing.ahead and phase in (crossing.below, crossing.above):
            led = [each for each in sizes if (_top(each).phase == crossing.below) == (phase == crossing.below)]
        found[phase] = _slope(led if len(led) > 1 else sizes[-2:], phase)
    return found


def _slope(sizes: Sequence[dict[str, PeakMark]], phase: str) -> float:
    """Return bytes per element of the batch; 0 if the peaks are equal, or do not grow steadily."""
    marks = [phases[phase] for phases in sizes if phase in phases]
    if len(marks) < 2 or marks[-1].size <= marks[0].size:
        return 0.0
    highest, lowest = max(mark.bytes for mark in marks), min(mark.bytes for mark in marks)
    rising = sum(after.bytes >= before.bytes for before, after in pairwise(marks))
    if highest - lowest <= FLAT_SHARE * highest or rising < STEADY_SHARE * (len(marks) - 1):
        return 0.0
    return max(0.0, (marks[-1].bytes - marks[0].bytes) / (marks[-1].size - marks[0].size))


def _changes(marks: Sequence[PeakMark]) -> tuple[tuple[int, str], ...]:
    found: list[tuple[int, str]] = []
    top = 0
    for step, of_step in groupby(sorted(marks, key=lambda mark: mark.step), key=lambda mark: mark.step):
        best = max(of_step, key=lambda mark: mark.bytes)
        if best.bytes > top:
            top = best.bytes
            if not found or found[-1][1] != best.phase:
                found.append((step, best.phase))
    return tuple(found)


def ranking_sentences(ranking: PeakRanking) -> list[str]:
    """Return sentences on which phase leads, at which lengths, and since when; the most important first."""
    found = [_standing_sentence(ranking)]
    crossing = ranking.crossing
    if crossing is not None and not crossing.ahead:
        name = _namer([crossing.last_below, crossing.first_above])
        near = f"; they are equal near {_near(crossing)}" if _between(crossing) else ""
        above = f"{phase_words(crossing.above)}{_course(ranking, crossing.above)}"
        below = f"{phase_words(crossing.below)} leads{_course(ranking, crossing.below)}"
        found.append(f"up to {name(crossing.last_below)} {below}, from {name(crossing.first_above)} on {above}{near}")
    elif ranking.slopes is not None:
        slope = ranking.slopes.get(ranking.first.phase, 0.0)
        why = "does not grow with them" if not slope else f"grows {_rate(slope)}"
        found.append(f"{phase_words(ranking.first.phase)} leads at every length so far; its peak {why}")
        if crossing is not None:
            ahead = f"{phase_words(crossing.above)} grows {_rate(ranking.slopes.get(crossing.above, 0.0))}"
            found[-1] += f"; {ahead} and would lead from about {_near(crossing)} on"
    elif len(ranking.changes) > 1 and ranking.changes[-1][0] > 2:
        before, now = ranking.changes[-2], ranking.changes[-1]
        found.append(f"{phase_words(before[1])} led until step {now[0]:,}; {phase_words(now[1])} since then")
    return found


def _standing_sentence(ranking: PeakRanking) -> str:
    first, following = ranking.first, ranking.next
    text = f"highest peak: {gib(first.bytes)} in {phase_words(first.phase)}, step {first.step:,}"
    by = f"{gib(ranking.by)} below" if ranking.by else "as high"
    return text if following is None else f"{text}; next {phase_words(following.phase)}, {by}"


def _course(ranking: PeakRanking, phase: str) -> str:
    if ranking.slopes is None or phase not in ranking.slopes:
        return ""
    slope = ranking.slopes[phase]
    highest = next(mark.bytes for mark in ranking.standing if mark.phase == phase)
    return f" (flat at {gib(highest)})" if not slope else f" (+{_rate(slope)})"


def _rate(slope: float) -> str:
    return f"{gib(slope)} a token"


def _between(crossing: Crossing) -> bool:
    low, high = crossing.last_below.size, crossing.first_above.size
    return high - low > 0.02 * high and low < crossing.size < high


def _near(crossing: Crossing) -> str:
    low, high = crossing.last_below, crossing.first_above
    if len(low.shape) > 1 and low.shape[:-1] == high.shape[:-1]:
        return f"length {crossing.size * low.shape[-1] / low.size:,.0f}"
    return f"{crossing.size:,.0f} tokens"


def _namer(marks: Sequence[PeakMark]) -> Callable[[PeakMark], str]:
    if len({tuple(mark.shape[:-1]) for mark in marks}) == 1 and len(marks[0].shape) > 1:
        return lambda mark: f"length {mark.shape[-1]:,}"
    return lambda mark: "batches of " + " x ".join(f"{count:,}" for count in mark.shape)


class Change(msgspec.Struct, frozen=True):
    """A change of the run; bytes, seconds. A row of ``what_if`` of ``ftmon predict --json``."""

    name: str
    change: str
    fits: bool
    needed_bytes: int
    step_seconds: float = 0.0
    slower: float = 0.0  # GPU time per sample relative to the unchanged run
    refused: str = ""


class CurrentPoint(msgspec.Struct, frozen=True):
    """The unchanged run at one length: an entry of ``points``."""

    sequence_length: int
    needed_bytes: int = 0
    fits: bool | None = None
    fails_in: str = ""


class Answer(msgspec.Struct, frozen=True):
    """The used fields of the answer of ``ftmon predict --what-if --json``."""

    points: list[CurrentPoint]
    what_if: list[Change]
    capacity_bytes: int | None = None
    gpu: str = ""


@dataclass
class WhatIf:
    """The changes of one error's run."""

    state: str = "none"  # `none`, `running`, `done`, `cancelled` or `failed`
    since: float = 0.0  # start of the dry runs, `time.monotonic`
    done: list[str] = field(default_factory=list[str])
    """Names of the changes predicted so far; the last one is in progress."""
    text: str = ""
    answer: Answer | None = None


def capacity_of(oom: Oom) -> int:
    """Return the bytes that PyTorch could reserve on that GPU at that moment: reserved plus still available memory."""
    return oom.reserved_bytes + max(0, oom.room_bytes)


def length_of(oom: Oom) -> int:
    """Return the sequence length of the batch; 0 if unknown."""
    return oom.batch_shape[-1] if len(oom.batch_shape) > 1 and oom.batch_shape[-1] > 0 else 0
