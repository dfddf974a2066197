"""Measures free space on the file systems that a run uses on this host, found from its ranks' open files.

Directories: the run's own, each rank's working directory, ``TMPDIR``, ``/dev/shm``, the output directory that a rank
announced, and those of files that a rank has open for writing (a checkpoint being saved). One directory is reported per
file system.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....protocol.messages.health import DiskSpace, Volume
from ....protocol.text import sanitize

SEARCH_SECONDS = 10.0
"""Seconds between searches for directories; free space is read at every call of ``measure``."""
SEND_SECONDS = 30.0
"""Seconds after which unchanged figures are sent again."""
CHANGED_SHARE = 0.0005
"""Share of a volume's size; smaller changes are not sent at once."""
MOST_VOLUMES = 16
MOST_FILES = 512
_NO_DISKS = ("/proc/", "/sys/", "/dev/")
SHM = "/dev/shm"

Place = tuple[str, str]
"""A directory, and its use by the run."""


class Disks:
    """Measures free space on this host's disks. Not thread-safe.

    ``root`` is the parent directory of ``proc``; it and ``statvfs`` differ only in tests.
    """

    def __init__(
        self,
        host: str,
        run: Path,
        rank_pids: Callable[[], dict[int, int]],
        statvfs: Callable[[str], Any] = os.statvfs,
        root: Path = Path("/"),
    ) -> None:
        self._host = host
        self._run = run
        self._rank_pids = rank_pids
        self._statvfs = statvfs
        self._root = root
        self._outputs: dict[int, str] = {}
        self._volumes: dict[int, Place] = {}
        """Directory and use, by device number."""
        self._searched = -SEARCH_SECONDS
        self._sent: dict[str, int] = {}
        self._sent_at = -SEND_SECONDS

    def note_output(self, rank: int, path: str) -> None:
        """Record the directory that a rank writes to; any thread."""
        if path:
            self._outputs[rank] = path

    def measure(self, now: float | None = None) -> DiskSpace | None:
        """Return free space; None if it has not changed enough since the last message."""
        now = time.monotonic() if now is None else now
        if now - self._searched >= SEARCH_SECONDS:
            self._searched = now
            self._find()
        volumes: list[Volume] = []
        for path, use in self._volumes.values():
            try:
                found = self._statvfs(path)
            except OSError:
                continue
            size = found.f_frsize or found.f_bsize
            if found.f_blocks:
                volumes.append(Volume(path, use, found.f_bavail * size, found.f_blocks * size))
        changed = any(
            abs(one.free_bytes - self._sent.get(one.path, -1)) >= max(1, CHANGED_SHARE * one.total_bytes)
            for one in volumes
        )
        if not volumes or (not changed and now - self._sent_at < SEND_SECONDS):
            return None
        self._sent = {one.path: one.free_bytes for one in volumes}
        self._sent_at = now
        return DiskSpace(self._host, time.time(), volumes)

    def _find(self) -> None:
        found: dict[int, Place] = {}
        for path, use in self._places():
            try:
                device = os.stat(path).st_dev
            except OSError:
                continue
            if device not in found and len(found) < MOST_VOLUMES:
                found[device] = self._volumes.get(device, (sanitize(path, 1024), use))
        self._volumes = found

    def _places(self) -> Iterator[Place]:
        try:
            pids = dict(self._rank_pids())
        except RuntimeError:  # the table changed while it was read
            pids = {}
        for rank, path in list(self._outputs.items()):
            cwd = self._link(pids.get(rank, 0), "cwd")
            if path.startswith("/") or cwd:
                yield _existing(os.path.join(cwd, path)), "output"
        yield str(self._run), "run directory"
        for pid in pids.values():
            for path in self._written(pid):
                yield path, "output"
            cwd = self._link(pid, "cwd")
            if cwd:
                yield cwd, "working directory"
        for pid in list(pids.values())[:1]:
            yield self._temporary(pid), "TMPDIR"
        yield SHM, SHM

    def _link(self, pid: int, name: str) -> str:
        try:
            return os.readlink(self._root / f"proc/{pid}/{name}") if pid else ""
        except OSError:
            return ""

    def _temporary(self, pid: int) -> str:
        try:
            environment = (self._root / f"proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            environment = []
        for entry in environment:
            if entry.startswith(b"TMPDIR=") and len(entry) > 7:
                return os.fsdecode(entry[7:])
        return "/tmp"

    def _written(self, pid: int) -> Iterator[str]:
        folder = self._root / f"proc/{pid}/fd"
        try:
            names = os.listdir(folder)[:MOST_FILES]
        except OSError:
            return
        for name in names:
            try:
                mode = os.lstat(folder / name).st_mode
                target = os.readlink(folder / name)
            except OSError:
                continue
            if mode & stat.S_IWUSR and target.startswith("/") and not target.startswith(_NO_DISKS):
                yield os.path.dirname(target)


def _existing(path: str) -> str:
    """Return the nearest existing parent: an output directory is created with the first checkpoint."""
    while not os.path.isdir(path) and len(path) > 1:
        path = os.path.dirname(path)
    return path
