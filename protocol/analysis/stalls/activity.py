"""Determines whether a process tree worked between two observations: CPU time, reads, writes, network, new processes.

Every figure is a running total, so the difference of two observations is the work in between. Rates have thresholds,
because library threads wake up and exchange keep-alives in an otherwise idle process.
"""

from typing import Literal, NamedTuple

BUSY_SHARE = 0.03
"""CPU time above this share of one core is work."""
BUSY_SECONDS = 0.03
"""Minimum CPU time that counts as work; the clock has a resolution of 0.01 s."""
CHARS_PER_SECOND = 8192.0
"""Bytes/s through read(2) and write(2) above this are work; a logging service that reads /proc does less."""
TRAFFIC_PER_SECOND = 1024.0
"""Bytes/s sent and received above this are work; keep-alives are less."""
SPARE_BYTES = 4096.0
SPARE_WAKES = 0.5
POLLS_PER_SECOND, SPARE_POLLS = 0.4, 3.5
"""Wake-ups up to this are not work while PyTorch's dataloader waits: every five seconds it checks whether its worker
lives, which takes a thread off the processor once or twice."""

Work = Literal["", "computes", "device", "disk", "works"]
"""Empty: no work. ``computes``: only the rank's own CPU time. ``device``: its device computes, for no collective.
``disk``: a thread waits for a disk that transfers nothing. ``works``: reads, writes, network, child processes, or
wake-ups of the training thread."""


class Activity(NamedTuple):
    """Totals of one process with all its descendants at one moment."""

    time: float
    """``time.monotonic``."""
    state: str
    """The training thread's state letter of proc(5); empty: gone."""
    wchan: str
    """The kernel function in which the training thread waits; empty: not readable, or it runs."""
    cpu_seconds: float
    """CPU time of the process itself, without threads of the monitor and of communication libraries."""
    io_bytes: int
    """Bytes written to and read from disks."""
    on_disk: bool
    """Whether a thread is in uninterruptible sleep (D), usually waiting for a disk."""
    switches: int = 0
    """Context switches of the training thread."""
    below_seconds: float = 0.0
    """CPU time of the descendants."""
    chars: int = 0
    """Bytes passed to read(2) and write(2), including pipes and files in memory."""
    traffic: int = 0
    """Bytes acknowledged and received on the TCP connections of the tree."""
    processes: int = 1
    """Number of living processes of the tree."""
    newest: int = 0
    """Start time of its youngest process, in ticks since boot."""
    worker_naps: int = 0
    """Context switches of dataloader workers that sleep for a set time."""
    training_seconds: float = 0.0
    """CPU time of the training thread alone."""

    @property
    def naps(self) -> bool:
        """Whether the training thread sleeps for a set time, as in ``time.sleep``."""
        return "nanosleep" in self.wchan

    def computes_besides(self, before: "Activity") -> bool:
        """Return whether threads other than the training thread computed since an earlier observation.

        A wait for a CUDA device, and for other ranks under NCCL, spins in the training thread and uses nothing else.
        """
        busy = max(BUSY_SECONDS, BUSY_SHARE * max(0.0, self.time - before.time))
        spent = self.cpu_seconds - before.cpu_seconds
        return spent - (self.training_seconds - before.training_seconds) > busy

    def work_since(self, before: "Activity", *, polls: bool = False) -> Work:
        """Return the kind of work done between an earlier observation and this one.

        Args:
            polls: whether the training thread waits for a dataloader's worker, and wakes up regularly by itself.
        """
        passed = max(0.0, self.time - before.time)
        wakes = self.switches - before.switches
        busy = max(BUSY_SECONDS, BUSY_SHARE * passed)
        if (
            self.io_bytes != before.io_bytes
            or self.chars - before.chars > CHARS_PER_SECOND * passed + SPARE_BYTES
            or self.traffic - before.traffic > TRAFFIC_PER_SECOND * passed + SPARE_BYTES
            or self.below_seconds - before.below_seconds > busy
            or (self.processes, self.newest) != (before.processes, before.newest)
            or self.worker_naps != before.worker_naps
        ):
            return "works"
        if self.cpu_seconds - before.cpu_seconds > busy:
            return "computes"
        if self.on_disk or before.on_disk:
            return "disk"
        return "works" if wakes > (SPARE_POLLS + POLLS_PER_SECOND * passed if polls else SPARE_WAKES) else ""
