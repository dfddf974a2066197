"""Redirects a rank's output under ``ftmon run`` into the run's log files. Standard library only."""

import os
import sys

from ..guard import log_error
from .options import read_raw
from .run_files import folder
from .steady_output import make_steady


def redirect_output(rank: int) -> bool:
    """Point descriptors 1 and 2 at the rank's log files; return False without a run, or if it keeps no logs.

    Output of native code and child processes goes to the files, too. No reader blocks a file, and no crash loses it.
    """
    run = folder()
    if not run or read_raw().get("logs", True) is False:
        return False
    try:
        for descriptor, stream in ((1, "out"), (2, "err")):
            path = os.path.join(run, "logs", f"rank-{rank}.{stream}")  # RunDir.rank_log, without its imports
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            make_steady(stream, descriptor)
    except (OSError, ValueError) as error:
        log_error("redirecting output", error)
        return False
    return True
