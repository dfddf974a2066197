"""Finds the process that holds a master port, when a launcher or a rank reports that the port is in use."""

import re
import threading
from collections.abc import Callable

from ....protocol.analysis.deaths.tracebacks import address_in_use
from ....protocol.analysis.findings import Finding
from ....protocol.analysis.hub_facts import PortFacts
from ....protocol.messages.telemetry import Failure, LogLine
from ...host.port_holders import PortHolder, holder_of

_UNCAUGHT = re.compile(r"^(?:\[rank\d+\]: ?)?(?:[\w.]+\.)?\w*(?:Error|Exception): ")
"""The line of a traceback with the exception. PyTorch's warning before it falls back to IPv4 has no such line."""
SEARCH_SECONDS = 10.0


class PortWatch:
    """Makes one finding per port. ``post`` schedules a call in the main loop, where ``put`` receives the finding."""

    def __init__(self, post: Callable[[Callable[[], object]], None], put: Callable[[Finding], object]) -> None:
        self._post = post
        self._put = put
        self._reported: set[int] = set()
        self._threads: list[threading.Thread] = []

    def begin_job(self) -> None:
        """Forget reported ports, so that a later job's failure is reported again."""
        self._reported.clear()

    def note(self, message: Failure | LogLine) -> None:
        """Check a rank's failure, or a line of output; a thread finds the process that holds the port."""
        text = message.error if isinstance(message, Failure) else message.text
        if isinstance(message, LogLine) and not _UNCAUGHT.match(text):
            return
        port = address_in_use(text)
        if port is None or port in self._reported:
            return
        self._reported.add(port)
        thread = threading.Thread(target=self._find_holder, args=(port, message.rank, text), name="port", daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait, at the end of the run, for searches under way; report their results at once."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(SEARCH_SECONDS)

    def _find_holder(self, port: int, rank: int, error: str) -> None:
        holder = holder_of(port) if port else None
        self._post(lambda: self._raise(port, rank, error, holder))

    def _raise(self, port: int, rank: int, error: str, holder: PortHolder | None) -> None:
        facts = PortFacts(port, rank, error)
        if holder is not None:
            facts = PortFacts(port, rank, error, holder.pid, holder.user, holder.command)
        self._put(Finding("port_taken", facts, severity="error", key=str(port)))
