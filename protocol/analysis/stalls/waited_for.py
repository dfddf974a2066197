"""Ranks that others wait for, early and without an action: a rank that stands at one line of its script.

A rank that polls for a lock file, or retries a download, keeps waking up, which counts as work: a hang is raised only
after minutes. Which ranks wait, and for which rank, is known after seconds and reported then: as ``info``, and as a
warning after ``LONG_S``. A verdict on a hang replaces it.
"""

from collections.abc import Iterable, Sequence

import msgspec

from ...messages.control import Severity
from ...text import duration, ranks_in_words
from ..findings.finding import Condition, Finding, Kind, Resolution, ResolvedWhy, Shown, resolved
from ..words import Words
from .collectives import RankView

EARLY_S = 15.0
LONG_S = 60.0
ORDINARY = frozenset(("eval", "checkpoint", "generate"))
"""Phases in which one rank may work while the others wait."""


class WaitedFor(msgspec.Struct, frozen=True):
    """Ranks that wait for others, and where those are."""

    waiting: tuple[int, ...]
    waited_for: tuple[int, ...]
    place: str
    """Of the first of them: ``write_cache in cache.py:6``."""
    seconds: float
    polls: bool
    """Whether it keeps waking up there."""


def _words(finding: Finding) -> Words:
    facts: WaitedFor = finding.facts
    has = "has" if len(facts.waited_for) == 1 else "have"
    does = f"{has} polled" if facts.polls else f"{has} been"
    return Words(
        f"{ranks_in_words(facts.waiting)} wait{'s' if len(facts.waiting) == 1 else ''} for "
        f"{ranks_in_words(facts.waited_for)}: {facts.place}",
        f"{ranks_in_words(facts.waited_for).capitalize()} {does} at that line for {duration(facts.seconds)}, and the "
        "others cannot go on. Nothing is ended for it.",
        "If it waits for a lock file, see whether the process that made it still lives (ftmon stacks).",
        "It has gone on.",
    )


KINDS = (
    Kind(
        "waited_for",
        WaitedFor,
        _words,
        resolved={"resumed": "It has gone on.", "superseded": "It is a hang."},
        shown={"polls": Shown("keeps waking up"), "place": Shown("at"), "waited_for": Shown("waited for")},
        limits={"at one line, others waiting": f"{EARLY_S:g} s; a warning after {LONG_S:g} s"},
    ),
)
_CONDITION = Condition("waited_for")


class WaitDetector:
    """Finds ranks at one line for which all others wait."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, float]] = {}
        """The line of each rank that others wait for, and since when it stands there."""
        self._raised: tuple[tuple[int, ...], Severity] | None = None

    def tick(self, now: float, views: Sequence[RankView], is_hang: bool) -> list[Finding]:
        """Look at all ranks; ``is_hang``: a verdict on a hang stands."""
        late = [] if is_hang else _waited_for(views)
        places = {view.rank: view.evidence.place.line or view.evidence.place.at for view in late if view.evidence}
        self._places = {
            rank: self._places[rank] if rank in self._places and self._places[rank][0] == place else (place, now)
            for rank, place in places.items()
        }
        stood = min((now - since for _, since in self._places.values()), default=0.0)
        if not late or stood < EARLY_S:
            return self._end("superseded" if is_hang else "resumed") if not late else []
        first, ranks = late[0].evidence, tuple(sorted(places))
        severity: Severity = "warning" if stood >= LONG_S else "info"
        if first is None or self._raised == (ranks, severity):
            return []
        self._raised = ranks, severity
        waiting = tuple(sorted(view.rank for view in views if not view.finished and view.rank not in places))
        facts = WaitedFor(waiting, ranks, first.place.text, stood, first.restless or first.work == "works")
        return [Finding("waited_for", facts, "raised", severity, ranks)]

    def _end(self, why: ResolvedWhy) -> list[Finding]:
        raised, self._raised = self._raised, None
        return [resolved(_CONDITION, Resolution(why))] if raised is not None else []


def _waited_for(views: Iterable[RankView]) -> list[RankView]:
    """Return the ranks that all others wait for; empty: some rank does neither, or its place is not known."""
    living = [view for view in views if not view.finished]
    waiting = [view for view in living if _waits(view)]
    late = [view for view in living if not _waits(view)]
    if not waiting or not late or any(view.absent or view.phase in ORDINARY for view in living):
        return []
    for view in late:
        found = view.evidence
        if found is None or not found.place.at or found.place.doing in ("compiling", "collective"):
            return []
        if view.step <= 1 and not found.restless:
            return []  # one rank prepares the data, or loads the model, for all
    return late


def _waits(view: RankView) -> bool:
    found = view.evidence
    return bool(view.inside) or view.blocked or (found is not None and found.place.doing in ("collective", "backward"))
