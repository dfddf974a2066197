"""Reports processes that a kill could not end, and watches them until they are gone.

A process in uninterruptible sleep (state D) waits for the kernel, a dead disk or a file server, and receives no signal
until that call returns. The hub stays for ``STAY_SECONDS`` after the run's end to report their end; ``ftmon cleanup``
finds them later.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from ....protocol.analysis.findings import Finding
from ....protocol.analysis.findings.finding import Condition, Resolution, resolved
from ....protocol.analysis.hub_facts import LeftoverFacts, LeftProcess
from ...host import processes
from ...host.hardware.gpu_memory import gpu_use
from ...host.inspection import activity
from ...host.processes import Process
from ..analyses.analysis import Analysis

STAY_SECONDS = 600.0
_POLL_SECONDS = 1.0


class Leftovers:
    """Watches the leftover processes. Main loop only.

    Args:
        analysis: raises and resolves the alert.
        find: lists the living processes of the run.
        on_gpu: whether the run computes on GPUs.
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
    function = activity.wchan(current.pid, current.pid) if current.state == "D" else ""
    return LeftProcess(current.pid, current.name, current.state, function)
