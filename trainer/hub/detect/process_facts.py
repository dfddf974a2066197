"""Collects facts about the run's processes: their ends, and the launcher's records of the job."""

import contextlib

from ....protocol.errors import FtmonError
from ....protocol.messages import verbs
from ....protocol.run.end_request import read_end_request
from ....protocol.run.rundir import LeftoversFile
from ...host.supervisor import Supervisor
from ..core import Core


class ProcessFacts:
    """Passes facts to the analysis, requests before deaths, so that a requested end is not blamed on a rank.

    Main loop only. ``supervisor`` watches the ranks' processes.
    """

    def __init__(self, core: Core, supervisor: Supervisor) -> None:
        self._core = core
        self._supervisor = supervisor
        self._signalled = False
        self._leftovers_noted = False

    def collect(self) -> None:
        """Collect the facts since the last call."""
        facts = self._supervisor.poll()
        # A death is polled only once, and its causes are written before it: a request to end, then what the job left
        # behind. They are read in the reverse order, so that neither is seen without what preceded it.
        left = self._leftovers()
        self._note_signal()
        if left is not None:
            self._leftovers_noted = True
            self._core.analysis.job_ended_first(left)
        for fact in facts:
            self._core.analysis.fact(fact)

    def _note_signal(self) -> None:
        """Append a message if the launcher received a signal to end the run: then no rank is the cause."""
        end_request = None if self._signalled else read_end_request(self._core.run)
        if end_request is not None and end_request.by_signal:
            self._signalled = True
            self._core.emit(verbs.Stop(reason=end_request.text()).command("launcher"))

    def _leftovers(self) -> LeftoversFile | None:
        """Return what the job's command left behind, once: the launcher ends it, and no rank is the cause."""
        if self._leftovers_noted:
            return None
        with contextlib.suppress(FtmonError):  # unreadable for a moment
            return self._core.run.read_leftovers()
        return None
