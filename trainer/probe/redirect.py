"""A rank's output under ``ftmon run``: straight into the run's log files. Standard library only."""

import json
import os
from typing import Any
from urllib.parse import unquote

from .guard import log_error
from .place import folder


def read_options() -> dict[str, Any]:
    """Read the run's options for probes (``FTMON_OPTIONS``); empty when there are none or they cannot be read."""
    try:
        # Percent-encoded where it came through a launcher that would break its quotes (``trainer.environment``).
        found = json.loads(unquote(os.environ.get("FTMON_OPTIONS") or "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def redirect_output(rank: int) -> bool:
    """Point descriptors 1 and 2 at the rank's log files; False when there is no run, or it keeps no logs.

    Whatever writes to them, native code and child processes included, ends up in the files, which no reader can block
    and no crash can lose.
    """
    run = folder()
    if not run or read_options().get("logs", True) is False:
        return False
    try:
        for descriptor, stream in ((1, "out"), (2, "err")):
            path = os.path.join(run, "logs", f"rank-{rank}.{stream}")  # RunDir.rank_log, without its imports
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
    except OSError as error:
        log_error("redirecting output", error)
        return False
    return True
