"""Collects facts about the run's processes: their ends, and the launcher's records of the job."""

import contextlib
from collections.abc import Callable

from ....protocol.errors import FtmonError
from ....protocol.messages import verbs
from ....protocol.messages.wire import Message
from ....protocol.run.end_request import read_end_request
from ....protocol.run.rundir import LeftoversFile, RunDir
from ...host.supervisor import Supervisor
from ..analyses.analysis import Analysis


class ProcessFacts:
    """Passes facts to the analysis, requests before deaths, so that a requested end is not blamed on a rank.

    Main loop only.

    Args:
        run: the run, with the launcher's files.
        supervisor: watches the ranks' processes.
        analysis: receives the facts.
        emit: appends a message to the stream, and analyses it.
    """

    def __init__(
        self, run: RunDir, supervisor: Supervisor, analysis: Analysis, emit: Callable[[Message], object]
    ) -> None:
        self._run = run
        self._supervisor = supervisor
        self._analysis = analysis
        self._emit = emit
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
            self._analysis.job_ended_first(left)
        for fact in facts:
            self._analysis.fact(fact)

    def _note_signal(self) -> None:
        """Append a message if the launcher received a signal to end the run: then no rank is the cause."""
        end_request = None if self._signalled else read_end_request(self._run)
        if end_request is not None and end_request.by_signal:
            self._signalled = True
            self._emit(verbs.Stop(reason=end_request.text()).command("launcher"))

    def _leftovers(self) -> LeftoversFile | None:
        """Return what the job's command left behind, once: the launcher ends it, and no rank is the cause."""
        if self._leftovers_noted:
            return None
        with contextlib.suppress(FtmonError):  # unreadable for a moment
            return self._run.read_leftovers()
        return None
