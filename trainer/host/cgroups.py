"""Finds the mounted control groups that count a process's memory."""

from collections.abc import Iterator
from pathlib import Path


def memory_hierarchies(pid: int | str, root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (a process's memory control group, the mount it is below), for either version of control groups.

    In a container the group's path may be the host's, which does not exist here: the mount itself is then the group.

    Args:
        pid: the process, or ``self``.
        root: where the kernel's files are; another place only in tests.
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
