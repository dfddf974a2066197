"""Finds the mounted control groups that count a process's memory."""

from collections.abc import Iterator
from pathlib import Path


def memory_hierarchies(pid: int | str, root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (directory of a process's memory cgroup, its mount point), for cgroup version 2 and 1.

    In a container the group's path may be that on the host, which does not exist here: then the mount is the group.

    Args:
        pid: the process, or ``self``.
        root: directory of the kernel's files; differs only in tests.
    """
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            mount = mounts / "memory"
        elif number == "0" and not controllers:
            mount = mounts
        else:
            continue
        yield mount / path.lstrip("/"), mount
