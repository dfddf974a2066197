"""Ends a run through its launcher, and waits for a run's end."""

import os
import signal
import time

from ....protocol.host.process import is_alive
from ....protocol.run.rundir import RunDir

_END_SECONDS = 60.0
_POLL_SECONDS = 0.1


def end_at_once(run: RunDir) -> None:
    """End a run through its launcher, which needs no hub, by INT, TERM, then KILL; wait for the end."""
    # The launcher escalates: the second INT ends the whole run by TERM, the third by KILL.
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGINT):
        launcher = run.read_run().launcher
        if launcher is None or not is_alive(launcher):
            return
        os.kill(launcher.pid, number)
        if wait_for_end(run, _END_SECONDS / 6):
            return


def wait_for_end(run: RunDir, seconds: float) -> bool:
    """Wait until the launcher has written the job's end; return False at the time limit."""
    deadline = time.monotonic() + seconds
    while run.read_exit() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
