"""Finds the process that holds a master port, when a launcher or a rank reports that the port is in use."""

import re
import threading
from collections.abc import Callable

from ...protocol.analysis.deaths.tracebacks import address_in_use
from ...protocol.telemetry import Failure, LogLine
from ...protocol.text import sanitize
from ..host.port_holders import PortHolder, holder_of

_UNCAUGHT = re.compile(r"^(?:\[rank\d+\]: ?)?(?:[\w.]+\.)?\w*(?:Error|Exception): ")
"""The line of a traceback with the exception. PyTorch's warning before it falls back to IPv4 has no such line."""
DEFAULT_PORT = 29500
SEARCH_SECONDS = 2.0


class PortWatch:
    """Raises one alert for each port. ``post`` makes a call in the main loop, ``alert`` raises an alert there."""

    def __init__(self, post: Callable[[Callable[[], object]], None], alert: Callable[..., None]) -> None:
        self._post = post
        self._alert = alert
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
        who = sanitize(holder.words) if holder is not None else ""
        name = f"port {port}" if port else "a port"
        by = "the launcher" if rank < 0 else f"rank {rank}"
        title = f"{name} is taken" + (f" by {who}" if who else ", no process holds it any more" if port else "")
        fix = (
            "Give the job another port: 'deepspeed --master_port PORT', 'torchrun --master-port PORT' (or torchrun "
            "--standalone, which finds a free one), 'accelerate launch --main_process_port PORT'"
        )
        end = f", or end that process: kill {holder.pid}" if holder is not None and holder.pid else ""
        default = (
            f" {port} is the launchers' default: another training of this host has it." if port == DEFAULT_PORT else ""
        )
        self._alert(
            *("failure", "error", title[:240], f"port {port}"),
            f"{by.capitalize()} could not listen there: {sanitize(error)[:500]}.{default} {fix}{end}.",
            port=port,
            pid=holder.pid if holder is not None else None,
            user=holder.user if holder is not None else None,
            command=sanitize(holder.command) if holder is not None else None,
        )
