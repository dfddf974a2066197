"""Samples the host itself as a device: memory under its cgroup's limit, busy CPU, and the ranks' resident memory."""

import os
import platform
from pathlib import Path

import psutil

from ...protocol.telemetry import DeviceSample, ProcessMemory
from ...protocol.text import sanitize
from .cgroups import memory_hierarchies

_UNLIMITED = 1 << 60
"""Cgroup version 1 writes a number near 2^63 for "no limit"."""


class HostLoad:
    """Samples this host. Not thread-safe; use it from one thread.

    Args:
        root: Directory of the kernel's files; differs only in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._name = _cpu_name(root)
        self._group = memory_group(root)
        psutil.cpu_percent(None)  # the first call only starts the measurement

    def sample(self, host: str, now: float, rank_of: dict[int, int]) -> DeviceSample:
        """Sample the host.

        Args:
            host: Name of this host, for the sample.
            now: Seconds since the epoch, for the sample.
            rank_of: The run's ranks by pid; their resident memory is listed.
        """
        memory = psutil.virtual_memory()
        used, total = int(memory.total - memory.available), int(memory.total)
        limited = group_memory(self._group) if self._group is not None else None
        if limited is not None and limited[1] < total:
            used, total = limited
        return DeviceSample(
            host=host,
            kind="host",
            index=0,
            name=self._name,
            time=now,
            used_bytes=used,
            total_bytes=total,
            utilization_percent=psutil.cpu_percent(None),
            processes=[found for pid, rank in rank_of.items() if (found := _resident(pid, rank)) is not None],
        )


def memory_group(root: Path) -> Path | None:
    """Return the directory of our cgroup, or its ancestor, with the lowest memory limit; None without a limit."""
    tightest: tuple[int, Path] | None = None
    for own, mount in memory_hierarchies("self", root):
        for group in [own, *own.parents]:
            limit = _limit(group)
            if limit is not None and (tightest is None or limit < tightest[0]):
                tightest = limit, group
            if group == mount:
                break
    return tightest[1] if tightest is not None else None


def group_memory(group: Path) -> tuple[int, int] | None:
    """Return (used, limit) bytes of a cgroup; file cache that can be dropped at once does not count as used."""
    limit = _limit(group)
    if limit is None:
        return None
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes")
    if used is None:
        return None
    return max(0, used - _droppable(group)), limit


def _limit(group: Path) -> int | None:
    limit = _number(group / "memory.max")
    if limit is None:
        limit = _number(group / "memory.limit_in_bytes")
    return limit if limit is not None and limit < _UNLIMITED else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _droppable(group: Path) -> int:
    """Return bytes of ``inactive_file`` (``total_inactive_file`` in version 1, which includes child groups)."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    figures = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)


def _resident(pid: int, rank: int) -> ProcessMemory | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, IndexError, ValueError):
        return None
    return ProcessMemory(pid, pages * os.sysconf("SC_PAGE_SIZE"), rank, sanitize(name, 32))


def _cpu_name(root: Path) -> str:
    count = os.cpu_count() or 1
    name = platform.machine()
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{sanitize(name, 80)}, {count} CPUs"
