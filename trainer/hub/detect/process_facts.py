"""Collects facts about the run's processes: their ends, and the launcher's records of the job."""

import contextlib
from collections.abc import Callable

from ....protocol.errors import FtmonError
from ....protocol.messages import verbs
from ....protocol.messages.wire import Message
from ....protocol.run.end_request import read_end_request
from ....protocol.run.rundir import RunDir
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
        # First: a dead process may have been ended on request. The files are read after the deaths, which they precede.
        self._note_signal()
        with contextlib.suppress(FtmonError):  # unreadable for a moment; a death is polled only once
            self._note_leftovers()
        for fact in facts:
            self._analysis.fact(fact)

    def _note_signal(self) -> None:
        """Append a message if the launcher received a signal to end the run: then no rank is the cause."""
        end_request = None if self._signalled else read_end_request(self._run)
        if end_request is not None and end_request.by_signal:
            self._signalled = True
            self._emit(verbs.Stop(reason=end_request.text()).command("launcher"))

    def _note_leftovers(self) -> None:
        """Report that the job's command ended before its ranks: the launcher ends them, and no rank is the cause."""
        left = None if self._leftovers_noted else self._run.read_leftovers()
        if left is not None:
            self._leftovers_noted = True
            self._analysis.job_ended_first(left)
