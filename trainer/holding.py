"""The options that hold a rank at an out-of-memory error: the same for every way to start a run."""

import argparse
from typing import Any

from ..protocol.errors import UsageError


def add_hold_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--on-oom``, ``--allow-console`` and ``--hold-timeout``."""
    parser.add_argument("--on-oom", choices=("raise", "hold"), default="raise", help="hold: wait in the failing frame")
    parser.add_argument("--allow-console", action="store_true", help="let a console run code in a rank that is held")
    parser.add_argument("--hold-timeout", type=float, default=0.0, help="seconds after which it lets go; 0: never")


def hold_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the run's options for it; empty where nothing is to be held.

    Raises:
        UsageError: the options do not fit together.
    """
    if arguments.on_oom != "hold":
        if arguments.allow_console or arguments.hold_timeout:
            raise UsageError("--allow-console and --hold-timeout need --on-oom hold")
        return {}
    if not 0 <= arguments.hold_timeout < float("inf"):
        raise UsageError("--hold-timeout must be seconds, 0 or more")
    if arguments.allow_console and arguments.read_only:
        raise UsageError("--allow-console and --read-only: a read-only run runs nobody's code")
    return {
        "on_oom": "hold",
        "allow_console": bool(arguments.allow_console),
        "hold_timeout": float(arguments.hold_timeout),
    }
