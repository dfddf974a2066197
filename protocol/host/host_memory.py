"""Memory that a process may use on this host: the host's memory, and the limits of the process's control groups.

Only Linux has the files that are read here; elsewhere everything is unknown.
"""

import platform
from collections.abc import Iterator
from pathlib import Path

from ..text import sanitize
from .control_groups import ROOT, own_groups

_UNLIMITED = 1 << 60
"""Cgroup version 1 reports "no limit" as a number near 2^63."""


def memory_group(root: Path = ROOT) -> Path | None:
    """Return the directory of the own cgroup or ancestor with the lowest memory limit; None without a limit."""
    return min(_limited_groups(root), default=(0, None), key=lambda found: found[0])[1]


def group_limit(group: Path) -> int | None:
    """Return the memory limit of a cgroup in bytes; None: there is none, or it cannot be read."""
    limit = _number(group / "memory.max")
    if limit is None:
        limit = _number(group / "memory.limit_in_bytes")
    return limit if limit is not None and limit < _UNLIMITED else None


def group_memory(group: Path) -> tuple[int, int] | None:
    """Return (used, limit) bytes of a cgroup; reclaimable file cache does not count as used."""
    limit = group_limit(group)
    if limit is None:
        return None
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes")
    if used is None:
        return None
    return max(0, used - _droppable(group)), limit


def memory_limit(root: Path = ROOT) -> int:
    """Return the bytes that this process may use: the host's, or a control group's lower limit; 0 if unknown."""
    found = [limit for limit, _ in _limited_groups(root)]
    total = _meminfo("MemTotal:", root)
    return min([*found, total] if total else found, default=0)


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can still allocate on the host and in its control groups; 0 if unknown."""
    found = [
        max(0, memory[1] - memory[0])
        for _, group in _limited_groups(root)
        if (memory := group_memory(group)) is not None
    ]
    available = _meminfo("MemAvailable:", root)
    return min([*found, available] if available else found, default=0)


def cpu_model(root: Path = ROOT) -> str:
    """Return the name of the host's processor, or of its architecture if /proc has none."""
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return sanitize(line.split(":", 1)[1].strip(), 80)
    except (OSError, IndexError):
        pass
    return platform.machine()


def _limited_groups(root: Path) -> Iterator[tuple[int, Path]]:
    for group in own_groups("memory", root):
        limit = group_limit(group)
        if limit is not None:
            yield limit, group


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


def _meminfo(field: str, root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
