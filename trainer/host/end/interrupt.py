"""Interrupts the ranks of this host, or their whole job, like ctrl-c, for scripts that have no command to stop."""

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from pathlib import Path

from .. import processes
from .kill import Target


def interrupt_ranks(targets: Iterable[Target]) -> list[Target]:
    """Send INT to each living target; return those that received it."""
    return [target for target in targets if _interrupt(target)]


def interrupt_job(run: Path, roots: list[int], spared: Collection[int]) -> list[int]:
    """Send INT to all process groups of the run on this host; return them.

    ``roots`` are pids whose descendants all belong to the run; their own groups and ``spared`` pids are not touched.
    """
    groups: list[int] = []
    for process in processes.of_run(run, roots, spared):
        if process.group not in groups and process.group not in (os.getpgid(0), *roots):
            groups.append(process.group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGINT)
    return groups


def _interrupt(target: Target) -> bool:
    process = processes.read(target.pid)
    if process is None or process.start_ticks != target.start_ticks or not process.alive:
        return False
    try:
        return processes.send_signal(process, signal.SIGINT)
    except PermissionError:
        return False
