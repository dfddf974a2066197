"""Writes the stream to disk in a separate thread, so that a slow disk never blocks the hub.

SQLite waits for the disk from time to time, even if a commit only appends to the write-ahead log: the first write after
a checkpoint restarts the log, and syncs its header first. A network file system, or a disk under other load, may delay
any write.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable

from ....protocol.recording.batch import Batch
from ....protocol.recording.writer import Writer

_STUCK_SECONDS = 5.0
"""A commit that takes longer than this is reported."""
_CLOSE_SECONDS = 90.0
"""Time limit at the end for writing the remaining messages."""


class Recorder(threading.Thread):
    """Thread in which ``writer`` writes the appended messages at each ``commit``.

    While the disk accepts no writes, rows are held and thinned out (``Batch.let_go``), as after disk errors.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__(name="recorder", daemon=True)
        self.writer = writer
        self._lock = threading.Lock()
        self._next = Batch()
        self._then: list[Callable[[], object]] = []
        self._last = False
        self._work = threading.Event()
        self._since: float | None = None
        """Start of the current commit, ``time.monotonic``."""
        self.agent_numbers: Callable[[], dict[str, int]] = dict
        """Called at each commit for the numbers of ``Writer.note_agent_numbers``."""
        self.received: Callable[[], dict[str, int]] = dict
        """Called at each commit for the numbers of ``Writer.note_received``."""
        self.bytes = 0
        """Size of the recording on disk."""
        self.start()

    @property
    def error(self) -> str:
        """Why nothing is being recorded; empty if there is no error."""
        since = self._since
        waits = 0.0 if since is None else time.monotonic() - since
        if waits > _STUCK_SECONDS:
            return f"{self.writer.path}: the disk has accepted no writes for {waits:.0f} s; recording resumes by itself"
        return self.writer.error

    def commit(self, then: Callable[[], object] | None = None) -> None:
        """Write the appended messages. Returns at once.

        ``then`` is called in the recorder's thread once they are on disk, or held back because of a disk error.
        """
        self._hand_over(then, last=False)

    def close(self) -> None:
        """Write the appended messages and close the file cleanly; wait at most 90 s for a stuck disk."""
        self._hand_over(None, last=True)
        self.join(_CLOSE_SECONDS)
        if self.is_alive():
            print(f"left before all was on disk: {self.error}", file=sys.stderr)

    def run(self) -> None:
        """Write until closed."""
        last = False
        while not last:
            self._work.wait()
            self._work.clear()
            with self._lock:
                last = self._last
                batch, self._next = self._next, Batch()
                then, self._then = self._then, []
            self._since = time.monotonic()
            try:
                self.writer.write(batch)
                self.bytes = self.writer.bytes
            except Exception:  # an error here loses one batch, not the recording
                traceback.print_exc(file=sys.stderr)
            self._since = None
            for call in then:
                call()
        self.writer.close()

    def _hand_over(self, then: Callable[[], object] | None, *, last: bool) -> None:
        self.writer.note_agent_numbers(self.agent_numbers())
        self.writer.note_received(self.received())
        batch = self.writer.drain()
        with self._lock:
            self._next.add(batch)
            self._next.let_go("the disk accepted no writes for long")
            if then is not None:
                self._then.append(then)
            self._last = last
        self._work.set()
