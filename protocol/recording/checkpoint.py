"""Moves committed pages from the write-ahead log into the recording, in a thread of its own.

A commit only appends to the log, and waits for the disk only when it restarts the log. This thread makes the log
durable and moves it into the file about once a second: a crash of the machine loses at most that second.
"""

import contextlib
import sqlite3
import threading
from pathlib import Path

PERIOD_S = 1.0


class Checkpointer(threading.Thread):
    """Moves the log of ``path`` into the file after each ``poke``, at most once in ``PERIOD_S``, until ``stop``."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="checkpointer", daemon=True)
        self._path = path
        self._work = threading.Event()
        self._ending = threading.Event()

    def poke(self) -> None:
        """Signal that something was committed."""
        self._work.set()

    def stop(self) -> None:
        """End the thread; wait for it at most a minute."""
        self._ending.set()
        self._work.set()
        self.join(timeout=60)

    def run(self) -> None:
        """Checkpoint until stopped. Errors are ignored: the writer gets those of the same disk."""
        connection: sqlite3.Connection | None = None
        while not self._ending.wait(PERIOD_S if connection is not None else 0):
            self._work.wait()
            self._work.clear()
            if self._ending.is_set():
                break
            with contextlib.suppress(sqlite3.Error):
                if connection is None:
                    # mode=rw never creates the file: the run's directory may be being removed.
                    there = f"{self._path.absolute().as_uri()}?mode=rw"
                    connection = sqlite3.connect(there, isolation_level=None, timeout=0, uri=True)
                # PASSIVE takes no lock that a commit or a reader would wait for.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if connection is not None:
            connection.close()
