"""A process of this host by its pid and start time, the output of ftmon's own processes, files of this user only."""

import contextlib
import io
import os
import shlex
import stat
import sys
import tempfile
from pathlib import Path

import msgspec

from ..errors import RunDirError


class ProcessId(msgspec.Struct, frozen=True):
    """A process; ``start_ticks`` is its start time in a unit of the platform."""

    pid: int
    start_ticks: int


def proc_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file of the kernel; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def proc_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of the kernel; empty if it cannot be read."""
    return proc_bytes(path).decode("utf-8", "replace")


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)).

    Without /proc, the unit is hundredths of a second since the epoch. None: there is no such process, or it is a
    zombie.
    """
    if sys.platform != "linux":
        return _start_elsewhere(pid)
    # Bytes: the name of a process may not be UTF-8, and may contain parentheses.
    fields = proc_bytes(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[19]) if fields and fields[0] not in b"ZX" else None


def _start_elsewhere(pid: int) -> int | None:
    """Return the start time from psutil. Not ``os.kill(pid, 0)``, which on Windows interrupts the process."""
    import psutil  # only without /proc: a rank on Linux does not need it

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except (psutil.Error, ValueError):
        return None


def this_process() -> ProcessId:
    """Return the identity of the calling process."""
    return ProcessId(os.getpid(), start_ticks(os.getpid()) or 0)


def is_alive(process: ProcessId) -> bool:
    """Return whether this process, and not a later one with its pid, is alive (zombies are not)."""
    return process.pid > 0 and start_ticks(process.pid) == process.start_ticks


class Unfailing(io.TextIOBase):
    """Text output that writes whole lines to a descriptor, and drops those that a full disk or closed pipe refuses."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._partial = ""

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Write the lines that are complete; return the text's length."""
        whole, newline, rest = (self._partial + text).rpartition("\n")
        self._partial = rest
        self._out(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Write the incomplete line as well."""
        text, self._partial = self._partial, ""
        self._out(text)

    def _out(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]


def never_fail() -> None:
    """Replace this process's standard output and error by ``Unfailing`` streams."""
    sys.stdout = Unfailing(1)
    sys.stderr = Unfailing(2)


def read_private(path: Path) -> bytes:
    """Return a secret file's content; raise ``OSError`` for a symbolic link, ``RunDirError`` if others can read it."""
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
