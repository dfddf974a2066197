"""Runs checks that may block in a thread: statvfs of a dead network disk must not delay the hub or GPU samples."""

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ....protocol.messages.health import DiskSpace, Xid
from .disks import Disks
from .xids import Xids

INTERVAL_S = 2.0
_KEPT = 1024


class HostWatch(threading.Thread):
    """Watches this host's disks and the GPU driver's errors; ``start`` it, ``poll`` it, ``close`` it.

    ``rank_pids`` is called from this thread.
    """

    def __init__(self, host: str, run: Path, rank_pids: Callable[[], dict[int, int]]) -> None:
        super().__init__(name="host-watch", daemon=True)
        self._host = host
        self.disks = Disks(host, run, rank_pids)
        self._found: deque[DiskSpace | Xid] = deque(maxlen=_KEPT)
        self._ending = threading.Event()

    def poll(self) -> list[DiskSpace | Xid]:
        """Return the messages since the last call, oldest first; never waits."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        """End the thread; waits half a second at most (it is a daemon)."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout=0.5)

    def run(self) -> None:
        """Watch until closed."""
        xids = Xids(self._host)
        failures = 0
        while not self._ending.is_set():
            try:
                self._found.extend(xids.poll())
                space = self.disks.measure()
                if space is not None:
                    self._found.append(space)
            except Exception:
                failures += 1
                if failures < 5:
                    traceback.print_exc(file=sys.stderr)
            self._ending.wait(INTERVAL_S)
        xids.close()
