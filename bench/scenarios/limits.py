"""What some scenes need of the machine: a memory cgroup, a small disk, or two hosts; or why it cannot be had."""

import contextlib
import os
import subprocess
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path

from .. import hosts

MEMORY_LIMIT = 192 << 20
DISK_BYTES = 128 << 20


def why_not(needs: str) -> str:
    """Say why scenes with this need cannot be played here; empty when they can."""
    if needs == "cgroup":
        try:
            folder = _make_cgroup()
        except OSError as error:
            return f"no memory cgroup can be made here ({error})"
        folder.rmdir()
        return ""
    if needs == "netns":
        return hosts.why_not()
    if needs == "tmpfs":
        with tempfile.TemporaryDirectory() as folder:
            disk = Path(folder)
            if not _mount(disk):
                return "no tmpfs can be mounted here"
            _unmount(disk)
    return ""


@contextlib.contextmanager
def allowed(
    needs: str, environment: dict[str, str], folder: Path, culprit: int | None
) -> Generator[hosts.Hosts | None]:
    """Provide what is needed, for the length of a scene; where two hosts are, those, the culprit's rank on the other.

    Raises:
        RuntimeError: two hosts cannot be made.
    """
    if needs == "netns":
        with hosts.made(folder, environment, culprit or 0) as made:
            yield made
    elif needs == "cgroup":
        group = _make_cgroup()
        environment["SCENE_CGROUP"] = str(group)
        try:
            yield None
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    elif needs == "tmpfs":
        disk = folder / "scene-disk"
        disk.mkdir()
        if not _mount(disk):
            raise RuntimeError("no tmpfs can be mounted here")
        environment["SCENE_DISK"] = str(disk)
        try:
            yield None
        finally:
            _unmount(disk)
    else:
        yield None


def _mount(folder: Path) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _make_cgroup() -> Path:
    """Make a cgroup whose processes may hold ``MEMORY_LIMIT`` bytes; version 1 or 2 of the kernel's interface."""
    name = f"ftmon-scene-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    old = Path("/sys/fs/cgroup/memory")
    if old.is_dir():
        folder = old / name
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(MEMORY_LIMIT))
        with contextlib.suppress(OSError):
            (folder / "memory.swappiness").write_text("0")
        return folder
    folder = Path("/sys/fs/cgroup") / name
    folder.mkdir()
    try:
        (folder / "memory.max").write_text(str(MEMORY_LIMIT))
        with contextlib.suppress(OSError):
            (folder / "memory.swap.max").write_text("0")
    except OSError:
        folder.rmdir()
        raise
    return folder
