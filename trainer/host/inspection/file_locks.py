"""Finds processes blocked on a file lock, and the lock's holder: /proc/locks of proc(5)."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..processes import Process

_LINE = re.compile(r"(\d+): (->)?\s*\S+\s+\S+\s+\S+\s+(-?\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)\s")


class LockWaiter(NamedTuple):
    """A process that waits for a file lock."""

    pid: int
    holder: int
    """Pid of the holder; 0 or less if the kernel does not name one."""
    path: str
    """The locked file; empty if it was not found among the process's descriptors."""


def blocked(table: Mapping[int, Process], locks: str | None = None) -> dict[int, LockWaiter]:
    """Return, by pid, the processes that wait for a lock held by another process."""
    if locks is None:
        try:
            locks = Path("/proc/locks").read_text()
        except OSError:
            return {}
    holders: dict[str, int] = {}
    found: dict[int, LockWaiter] = {}
    for line in locks.splitlines():
        read = _LINE.match(line)
        if read is None:
            continue
        number, waits, pid, major, minor, inode = read.groups()
        if not waits:
            holders[number] = int(pid)
        elif int(pid) in table:
            device = os.makedev(int(major, 16), int(minor, 16))
            found[int(pid)] = LockWaiter(int(pid), holders.get(number, 0), _path(int(pid), device, int(inode)))
    return found


def _path(pid: int, device: int, inode: int) -> str:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    status = os.stat(entry.path)
                except OSError:
                    continue
                if (status.st_dev, status.st_ino) == (device, inode):
                    return os.readlink(entry.path)
    except OSError:
        pass
    return ""
