"""Runs one configuration of a sweep: starts it, waits for it, ends it at its time limit, checks that it is gone."""

import contextlib
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from ...protocol.host.process import is_alive
from ...protocol.run.rundir import ExitFile, RunDir
from ...protocol.run.start_request import spawn_start, started_run
from ...protocol.run.starter import CommandEnd
from ..host import processes
from ..host.end.terminate import sweep
from .jobs import STOP_GRACE_SECONDS, Job

_START_SECONDS = 180.0
_POLL_SECONDS = 0.5
_CLOSING_SECONDS = 90.0
"""Slightly more than a launcher's wait for its hub to finish the recording."""
_END_SECONDS = 30.0


class RefusedError(Exception):
    """The run was not started; the text is the starter's output, one line."""


class Ending(NamedTuple):
    """How a run ended."""

    run: RunDir
    exit: ExitFile | None
    """The recorded end, or None."""
    ended_for: str
    """Reason why the sweep ended it: ``timeout``, ``hang``, ``steps``, ``interrupt``, ``budget``; empty: it ended by
    itself, or the monitor ended it."""
    left: list[int]
    """Pids of the run's processes that could not be ended."""
    asked: float = math.inf
    """When the sweep began to end it, seconds since the epoch; infinity: it ended by itself."""


class Running:
    """A run that depends on this process: if this process dies, its launcher ends it.

    Raises:
        RefusedError: it was not started.
    """

    def __init__(self, job: Job) -> None:
        self._line = CommandEnd()
        process, request = spawn_start(job.request, self._line, environ=job.environment)
        try:
            output, errors = process.communicate(request, timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise RefusedError(f"its start took more than {_START_SECONDS:.0f} s") from None
        if process.returncode:
            words = errors.decode(errors="replace").strip().splitlines()
            raise RefusedError(words[-1] if words else f"its start ended with status {process.returncode}")
        run = started_run(output)
        if run is None:
            raise RefusedError("its start did not say which run it is")
        self.run = run

    def wait(self, deadline: float, ended: Callable[[], str]) -> Ending:
        """Wait for the run's end.

        Args:
            deadline: time at which to end it (``time.monotonic``).
            ended: called twice a second; returns the reason to end the run now, or empty.
        """
        why = ""
        while not why and not self._over():
            self._wait(_POLL_SECONDS)
            if not self._over():  # else it ended by itself meanwhile
                why = "timeout" if time.monotonic() >= deadline else ended()
        asked = math.inf
        if why:
            asked = time.time()
            self._end()
        closing = time.monotonic() + _CLOSING_SECONDS
        while not self._line.closed and time.monotonic() < closing:
            self._wait(_POLL_SECONDS)
        return Ending(self.run, self._exit(), why, self._clear(), asked)

    def _over(self) -> bool:
        """Return whether the run has ended, or its launcher is gone."""
        return self._exit() is not None or self._line.closed

    def _exit(self) -> ExitFile | None:
        self._line.read()
        return self._line.end or self.run.read_exit()

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(InterruptedError):
            select.select([self._line.fileno()], [], [], seconds)
        self._line.read()

    def _end(self) -> None:
        """Make the launcher end the run; it kills the remaining processes after the run's grace time."""
        asked = False
        deadline = time.monotonic() + STOP_GRACE_SECONDS + _END_SECONDS
        while not self._over() and time.monotonic() < deadline:
            launcher = self._line.launcher or self.run.read_run().launcher
            if not asked and launcher is not None and is_alive(launcher):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(launcher.pid, signal.SIGTERM)
                asked = True
            self._wait(_POLL_SECONDS / 5)

    def _clear(self) -> list[int]:
        """End the run's remaining processes; return those that could not be ended."""
        return [process.pid for process in sweep(lambda: processes.of_run(self.run.path, (), {os.getpid()}))]


def clear_lost(run: RunDir) -> None:
    """End the run of a killed sweep; its launcher does that itself unless it was killed too."""
    deadline = time.monotonic() + STOP_GRACE_SECONDS + _END_SECONDS
    while run.path.exists() and run.read_exit() is None and time.monotonic() < deadline:
        launcher = run.read_run().launcher
        if launcher is None or not is_alive(launcher):
            break
        time.sleep(_POLL_SECONDS / 5)
    sweep(lambda: processes.of_run(run.path, (), {os.getpid()}))
