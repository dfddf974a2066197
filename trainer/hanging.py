"""The options that say what is done about a hang in an unattended run: the same for every way to start one."""

import argparse
import math
from typing import Any, Literal, get_args

from ..protocol.errors import UsageError

OnHang = Literal["warn", "stacks", "stop", "kill"]
GRACE_SECONDS = 30.0
"""How long a hang must have stood before something is done about it."""


def add_hang_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--on-hang``, ``--hang-grace`` and ``--exit-timeout``."""
    parser.add_argument("--on-hang", choices=get_args(OnHang), default="warn", help="what to do about a hang")
    parser.add_argument("--hang-grace", type=float, default=GRACE_SECONDS, help="seconds a hang must have stood")
    parser.add_argument("--exit-timeout", type=float, default=0.0, help="seconds for the rest once a rank has finished")


def hang_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the run's options for it; empty where a warning is enough.

    Raises:
        UsageError: a time is none, or the run may not be acted on.
    """
    grace, exit_timeout = float(arguments.hang_grace), float(arguments.exit_timeout)
    for name, seconds in (("--hang-grace", grace), ("--exit-timeout", exit_timeout)):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"{name} must be seconds, 0 or more")
    acts = arguments.on_hang in ("stop", "kill") or exit_timeout
    if acts and arguments.read_only:
        raise UsageError("--on-hang stop, --on-hang kill and --exit-timeout need a run that is not --read-only")
    found: dict[str, Any] = {}
    if arguments.on_hang != "warn":
        found |= {"on_hang": arguments.on_hang, "hang_grace": grace}
    if exit_timeout:
        found["exit_timeout"] = exit_timeout
    return found
