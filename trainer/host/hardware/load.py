"""Samples the host itself as a device: memory under its cgroup's limit, busy CPU, and the ranks' resident memory."""

import os
from pathlib import Path

import psutil

from ....protocol.host.host_memory import cpu_model, group_memory, memory_group
from ....protocol.messages.telemetry import DeviceSample, ProcessMemory
from ....protocol.text import sanitize


class HostLoad:
    """Samples this host. Not thread-safe; use it from one thread. ``root`` differs only in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._name = f"{cpu_model(root)}, {os.cpu_count() or 1} CPUs"
        self._group = memory_group(root)
        psutil.cpu_percent(None)  # the first call only starts the measurement

    def sample(self, host: str, now: float, rank_of: dict[int, int]) -> DeviceSample:
        """Sample the host."""
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


def _resident(pid: int, rank: int) -> ProcessMemory | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, IndexError, ValueError):
        return None
    return ProcessMemory(pid, pages * os.sysconf("SC_PAGE_SIZE"), rank, sanitize(name, 32))
