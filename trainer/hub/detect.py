"""Detects what a run's host shows beside the telemetry: missing ranks, taken ports, processes that no probe is in."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ...protocol.analysis.deaths.logs import address_in_use
from ...protocol.analysis.findings.finding import Condition, Finding, Resolution, resolved
from ...protocol.analysis.hub_facts import LeftoverFacts, LeftProcess, MissingRanksFacts, PortFacts, UnhookedFacts
from ...protocol.errors import FtmonError
from ...protocol.messages import control
from ...protocol.messages.telemetry import Failure, LogLine
from ...protocol.run.end import read_end_request
from ...protocol.run.rundir import LeftoversFile, RunDir
from ..host import processes
from ..host.hardware.gpus import gpu_use
from ..host.inspection import inspect
from ..host.processes import Process, find_unhooked
from ..host.sockets import holder_of
from ..host.supervisor import Supervisor
from .analyses import Analysis
from .core import Core
from .ranks import RankHosts

STAY_SECONDS = 600.0
_POLL_SECONDS = 1.0


class Leftovers:
    """Reports processes that a kill could not end, until they are gone. ``find`` lists the run's living processes.

    A process in uninterruptible sleep (state D) waits for the kernel, a dead disk or a file server, and receives no
    signal until that call returns. The hub stays for ``STAY_SECONDS`` after the run's end to report their end; ``ftmon
    cleanup`` finds them later. Main loop only.
    """

    def __init__(self, analysis: Analysis, find: Callable[[], Iterable[Process]], on_gpu: Callable[[], bool]) -> None:
        self._analysis = analysis
        self._find = find
        self._on_gpu = on_gpu
        self._left: dict[tuple[int, int], Process] = {}
        self._since = 0.0
        self._next = 0.0
        self._searched = False

    def note(self, pids: Sequence[int]) -> None:
        """Watch processes that a kill could not end."""
        found = [process for pid in pids if (process := processes.read(pid)) is not None]
        self._add([process for process in found if process.state == "D"])

    def find_at_end(self) -> None:
        """Find, once, the processes left over at the run's end."""
        if not self._searched:
            self._searched = True
            self._add(self._find())

    def waiting(self, now: float) -> bool:
        """Return whether the hub should stay for them; ``now`` is ``time.monotonic``."""
        return bool(self._left) and now - self._since < STAY_SECONDS

    def tick(self, now: float) -> None:
        """Check whether they are gone; ``now`` is ``time.monotonic``."""
        if not self._left or now < self._next:
            return
        self._next = now + _POLL_SECONDS
        before = len(self._left)
        for key, process in list(self._left.items()):
            current = processes.same(process)
            if current is None or not current.alive:
                del self._left[key]
        if not self._left:
            self._analysis.put(resolved(Condition("leftover_processes"), Resolution("calm")))
        elif len(self._left) != before:
            self._report()

    def _add(self, found: Iterable[Process]) -> None:
        new = {(process.pid, process.start_ticks): process for process in found}
        if new.keys() - self._left.keys():
            self._left |= new
            self._since = time.monotonic()
            self._report()

    def _report(self) -> None:
        left = list(self._left.values())
        held = gpu_use([process.pid for process in left]) if self._on_gpu() else None
        facts = LeftoverFacts([facts_of(process) for process in left], held.held if held else {})
        self._analysis.put(Finding("leftover_processes", facts, severity="error"))


def facts_of(process: Process) -> LeftProcess:
    """Return the current state of a process that did not end."""
    current = processes.same(process) or process
    function = inspect.wchan(current.pid, current.pid) if current.state == "D" else ""
    return LeftProcess(current.pid, current.name, current.state, function)


PATIENCE_SECONDS = 60.0  # Maximum delay between the first and the last rank's report; hosts start at different speeds


class MissingRanks:
    """Raises a note while ranks have not reported, if the hub does ``listen`` for other hosts. Main loop only.

    The usual cause is an agent without a connection.
    """

    def __init__(self, analysis: Analysis, rank_hosts: RankHosts, listen: str) -> None:
        self._analysis = analysis
        self._rank_hosts = rank_hosts
        self._listen = listen
        self._since: float | None = None
        self._reported = False

    def tick(self, now: float) -> None:
        """Check whether all have reported; ``now`` is ``time.monotonic``."""
        heard, world = len(self._rank_hosts.ranks), self._rank_hosts.world_size
        if not self._listen or not heard:
            return
        if self._since is None:
            self._since = now
        missing = [rank for rank in range(world) if rank not in self._rank_hosts.ranks] if heard < world else []
        if missing and not self._reported and now - self._since > PATIENCE_SECONDS:
            self._reported = True
            self._analysis.put(Finding("missing_ranks", MissingRanksFacts(missing, world, self._listen)))
        elif self._reported and not missing:
            self._reported = False
            self._analysis.put(resolved(Condition("missing_ranks"), Resolution("resumed")))


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
        known = (holder.pid, holder.user, holder.command) if holder is not None else (None, None, None)
        facts = PortFacts(port, rank, error, *known)
        self._post(lambda: self._put(Finding("port_taken", facts, severity="error", key=str(port))))


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
            self._core.emit(control.Stop(reason=end_request.text()).command("launcher"))

    def _leftovers(self) -> LeftoversFile | None:
        """Return what the job's command left behind, once: the launcher ends it, and no rank is the cause."""
        if self._leftovers_noted:
            return None
        with contextlib.suppress(FtmonError):  # unreadable for a moment
            return self._core.run.read_leftovers()
        return None


class Unhooked:
    """Searches this host, until a rank has reported, for a process that trains unmonitored. Main loop only.

    Its command has replaced ``PYTHONPATH``, which has the import hook. Without a ``launcher`` (its pid) no search.
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
