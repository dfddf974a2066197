"""Keeps a hub running during a job: starts it, and starts another one if it dies."""

import os
import subprocess
import time
from typing import BinaryIO

from ...protocol.run.endings import ending_in_words
from ...protocol.run.job_log import print_own
from ...protocol.run.rundir import RunDir
from ...protocol.run.spawn import spawn_hub

_FIRST_DELAY_SECONDS = 0.2
_LONGEST_DELAY_SECONDS = 30.0
_HEALTHY_SECONDS = 60.0
"""After a hub has run this long, the delay before the next start is reset."""


class HubKeeper:
    """Owns the hub process of one run. A hub that ends with status 0 ended on request and is not replaced."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._delay = _FIRST_DELAY_SECONDS
        self._next_start = 0.0
        self._failed = False
        """Whether the last start failed."""
        self.dismissed = False

    @property
    def pid(self) -> int | None:
        """The hub's pid, dead or alive; None before the first start."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the hub's process is running."""
        return not self._failed and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start a hub in a new session, with its output in ``logs/hub.log``."""
        self._started = time.monotonic()
        self._failed = False
        try:
            with self._log() as log:
                self._process = spawn_hub(self._run, log)
        except OSError as error:  # memory or processes are exhausted; the job continues without a hub
            self._failed = True
            print_own(f"the hub cannot be started: {error.strerror}; retrying")

    def tend(self) -> float | None:
        """Replace a dead hub when due; return the seconds until the next call (None: not before a signal arrives)."""
        if self.dismissed or (self._process is None and not self._failed):
            return None
        status = -1 if self._failed or self._process is None else self._process.poll()
        if status is None:
            return None
        now = time.monotonic()
        if status == 0:
            self.dismissed = True
            return None
        if self._next_start <= self._started:  # first poll since this hub died
            if now - self._started >= _HEALTHY_SECONDS:
                self._delay = _FIRST_DELAY_SECONDS
            self._next_start = now + self._delay
            self._delay = min(self._delay * 2, _LONGEST_DELAY_SECONDS)
            if not self._failed:
                print_own(f"the hub ended ({ending_in_words(status, None)}); starting another")
        if now < self._next_start:
            return self._next_start - now
        self.start()
        return self.tend() if self._failed else None

    def _log(self) -> BinaryIO:
        try:
            return (self._run.logs / "hub.log").open("ab")
        except OSError:  # the run directory was removed, or the disk is full: the job continues without a log
            return open(os.devnull, "ab")

    def note_reaped(self, pid: int, status: int) -> bool:
        """Record that the launcher reaped the hub; return False if ``pid`` is not the hub."""
        if self._process is None or self._process.pid != pid:
            return False
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return True

    def wait(self, timeout: float) -> None:
        """Wait until the hub has ended, for ``timeout`` seconds at most."""
        if self._process is not None:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                print_own("the hub has not ended yet; leaving it")
