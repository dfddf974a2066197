"""Whether a process tree worked between two observations: processor time, reads, writes, network, new processes.

Every figure is a running total, so the difference of two observations is what happened in between. Rates have
thresholds, because threads of libraries wake up and exchange keep-alives in a process that otherwise does nothing.
"""

from typing import Literal, NamedTuple

BUSY_SHARE = 0.03
"""More processor time than this share of one core is work."""
BUSY_SECONDS = 0.03
"""And more than this: the clock ticks in hundredths."""
CHARS_PER_SECOND = 8192.0
"""More than this through read(2) and write(2) is work; a logging service that reads /proc does less."""
TRAFFIC_PER_SECOND = 1024.0
"""More than this sent and received is work; keep-alives are less."""
SPARE_BYTES = 4096.0
POLLS_PER_SECOND = 0.25
"""PyTorch's dataloader wakes up every five seconds to see whether its worker lives: that is no work."""
SPARE_WAKES = 0.5

Work = Literal["", "computes", "disk", "works"]
"""Nothing; only the rank's own processor time; a thread waits for a disk, which moves nothing; reads, writes, network,
processes below it or the training thread's wake-ups."""


class Activity(NamedTuple):
    """Totals of one process with all its descendants at one moment."""

    time: float
    """``time.monotonic``."""
    state: str
    """The training thread's state letter of proc(5); empty: gone."""
    wchan: str
    """The kernel function the training thread waits in; empty: it may not be read, or it runs."""
    cpu_seconds: float
    """Of the process itself, without the threads of monitor and communication libraries."""
    io_bytes: int
    """Bytes that went to or came from disks."""
    on_disk: bool
    """A thread is in uninterruptible sleep (D), most likely for a disk."""
    switches: int = 0
    """Context switches of the training thread: it woke up and went to sleep again."""
    below_seconds: float = 0.0
    """Processor time of the descendants."""
    chars: int = 0
    """Bytes passed to read(2) and write(2), pipes and files in memory included."""
    traffic: int = 0
    """Bytes that TCP connections of the tree have had acknowledged and received."""
    processes: int = 1
    """Living processes of the tree."""
    newest: int = 0
    """Start time of its youngest process, in ticks since boot."""

    def work_since(self, before: "Activity", *, polls: bool = False) -> Work:
        """Return what was done between an earlier observation and this one.

        Args:
            before: the earlier one.
            polls: the training thread waits in a library call that wakes up regularly by itself.
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
        ):
            return "works"
        if self.cpu_seconds - before.cpu_seconds > busy:
            return "computes"
        if self.on_disk or before.on_disk:
            return "disk"
        return "works" if wakes > SPARE_WAKES + (POLLS_PER_SECOND * passed if polls else 0.0) else ""
