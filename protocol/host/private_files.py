"""Files and directories that only their owner may read."""

import os
import shlex
import stat
import tempfile
from pathlib import Path

from ..errors import RunDirError


def read_private(path: Path) -> bytes:
    """Return the content of a secret file.

    Raises:
        OSError: it cannot be read, or is a symbolic link.
        RunDirError: it belongs to another user, or others can read it.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if hasattr(os, "getuid") and (info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077):
            raise RunDirError(f"{path}: others can read or own this secret; run: chmod 600 {shlex.quote(str(path))}")
        return file.read()


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, mode 0600."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_private(path: Path) -> None:
    """Create a directory and its parent if missing, both with mode 0700; ancestors get the umask's mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
