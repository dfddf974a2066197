"""Detects a process that trains unmonitored because its command replaced ``PYTHONPATH``, which has the import hook."""

from ....protocol.analysis.findings import Finding
from ....protocol.analysis.findings.finding import Condition, Resolution, resolved
from ....protocol.analysis.hub_facts import UnhookedFacts
from ....protocol.run.rundir import RunDir
from ...host.import_hook import find_unhooked
from ..analyses.analysis import Analysis

_POLL_SECONDS = 1.0


class Unhooked:
    """Searches this host for such a process until a rank has reported. Main loop only.

    Args:
        run: the run.
        launcher: pid of its launcher; None: none, then there is no search.
        analysis: raises and resolves the note.
    """

    def __init__(self, run: RunDir, launcher: int | None, analysis: Analysis) -> None:
        self._run = run
        self._launcher = launcher
        self._analysis = analysis
        self._next = 0.0
        self.found: UnhookedFacts | None = None

    def tick(self, now: float, reported: bool) -> None:
        """Search if due; ``now`` is ``time.monotonic``, ``reported``: whether some rank has reported."""
        if reported:
            if self.found is not None:
                self.found = None
                self._analysis.put(resolved(Condition("unhooked"), Resolution("resumed")))
            return
        if self._launcher is None or self.found is not None or now < self._next:
            return
        self._next = now + _POLL_SECONDS
        self.found = find_unhooked(self._run.path, self._launcher)
        if self.found is not None:
            self._analysis.put(Finding("unhooked", self.found))
