"""Explanations of one rank's memory: composition of its peaks, causes of spikes, and the phase with the peak."""

from collections.abc import Sequence

from ...protocol.messages.memory import Cause, Composition
from ...protocol.messages.telemetry import Step
from ...protocol.recording.phase_peaks import PeakMark, PhasePeaks
from .peak_phase import PeakRanking, rank_phases


class RankMemory:
    """The explanations of one rank's memory. ``version`` is incremented with every visible change."""

    __slots__ = ("_lead", "_past", "_peaks", "_step", "causes", "highest", "latest", "version")

    def __init__(self) -> None:
        self.latest: Composition | None = None
        """The last analysed step."""
        self.highest: Composition | None = None
        """The analysed step with the highest peak so far."""
        self.causes: dict[str, Cause] = {}
        """The last cause found for each phase."""
        self.version = 0
        self._peaks = PhasePeaks()
        self._past: Sequence[PeakMark] = ()
        """Marks of the whole run, also those after this state; filtered when used."""
        self._step = 0
        self._lead: tuple[int, PeakRanking | None] = (-1, None)

    def on_step(self, step: Step) -> None:
        """Fold a finished step."""
        if step.step > self._step:
            self._step = step.step
        if self._peaks.see(step):
            self.version += 1

    def on_composition(self, composition: Composition) -> None:
        """Fold a composition; after a seek they arrive in any order."""
        if self.latest is None or composition.step >= self.latest.step:
            self.latest = composition
        if self.highest is None or highest_bytes(composition) > highest_bytes(self.highest):
            self.highest = composition
        self.version += 1

    def on_cause(self, cause: Cause) -> None:
        """Fold the cause of a transient."""
        known = self.causes.get(cause.phase)
        if known is None or cause.step >= known.step:
            self.causes[cause.phase] = cause
        self.version += 1

    def adopt(self, marks: Sequence[PeakMark]) -> None:
        """Add the marks of the whole run, in order, from before the steps that were applied here."""
        self._past = marks
        self.version += 1

    @property
    def marks(self) -> list[PeakMark]:
        """All marks up to this state."""
        return [*(mark for mark in self._past if mark.step <= self._step), *self._peaks.marks]

    @property
    def ranking(self) -> PeakRanking | None:
        """Ranking of the phases by their peaks so far; None before the first step."""
        if self._lead[0] != self.version:
            self._lead = (self.version, rank_phases(self.marks))
        return self._lead[1]

    @property
    def cause(self) -> Cause | None:
        """The cause of the largest transient with a known cause."""
        return max(self.causes.values(), key=lambda cause: cause.transient_bytes, default=None)


def highest_bytes(composition: Composition) -> int:
    """Return the highest peak of an analysed step."""
    top = composition.peak_phase
    return top.peak_bytes if top is not None else 0
