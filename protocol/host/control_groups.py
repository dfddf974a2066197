"""The control groups that a process is in, of cgroup version 2 and 1.

A limit applies to a group and all groups below it, so a process's own group and its ancestors all count: under SLURM
without a cgroup namespace, only the job's group has a limit, and not the mounted root. Only Linux has these files.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def hierarchies(controller: str, pid: int | str, root: Path = ROOT) -> Iterator[tuple[Path, Path]]:
    """Yield (directory, mount point) of each cgroup of a process in which a controller may limit it.

    In a container the group's path may be that on the host, which does not exist here: then the mount is the group.

    Args:
        controller: ``memory`` or ``cpu``.
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
        if controller in controllers.split(","):
            mount = mounts / controller
        elif number == "0" and not controllers:
            mount = mounts
        else:
            continue
        yield mount / path.lstrip("/"), mount


def own_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the directories of this process's cgroups and of their ancestors, up to the mount points."""
    for own, mount in hierarchies(controller, "self", root):
        for group in [own, *own.parents]:
            yield group
            if group == mount:
                break


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU time per wall-clock time that this process's cgroups allow; None: no limit, or unknown."""
    found = (_quota_of(group) for group in own_groups("cpu", root))
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """Return a group's quota per period: ``cpu.max`` in version 2, ``cpu.cfs_*_us`` (-1: no limit) in version 1."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None
