"""The line between the command that started a run and the run's launcher: a socket pair that only these two hold.

It needs no disk, so the command receives the job's end even if the run directory is full, read-only or removed; and
either end detects at once that the other process is gone, also after SIGKILL.

- launcher to command: JSON lines, one ``LauncherMessage`` each.
- command to launcher: ``UNTIE``, once, when the run may outlive the command. Until then, the loss of the connection
  counts as a request to end the run.
"""

import contextlib
import socket

import msgspec

from ..host.process import ProcessId
from .rundir import ExitFile

UNTIE = b"u"


class LauncherMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a launcher to the command that started it."""

    launcher: ProcessId | None = None
    end: ExitFile | None = None


class CommandEnd:
    """The command's end of the line. No method raises or blocks."""

    def __init__(self) -> None:
        self._socket, self._other = socket.socketpair()
        self._socket.setblocking(False)
        self._text = b""
        self.launcher: ProcessId | None = None
        """The launcher's process; None: not reported yet."""
        self.end: ExitFile | None = None
        """How the job ended; None: not reported yet."""
        self.closed = False
        """The launcher is gone."""

    @property
    def launchers_end(self) -> int:
        """The descriptor for the launcher to inherit."""
        return self._other.fileno()

    def fileno(self) -> int:
        """Return the command's own descriptor, for ``select``."""
        return self._socket.fileno()

    def handed_over(self) -> None:
        """Close this process's copy of the launcher's end."""
        self._other.close()

    def untie(self) -> None:
        """Let the run outlive this process."""
        with contextlib.suppress(OSError):
            self._socket.send(UNTIE)

    def read(self) -> None:
        """Read the launcher's messages."""
        while not self.closed:
            try:
                data = self._socket.recv(65_536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self.closed = not data
            self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                word = msgspec.json.decode(line, type=LauncherMessage)
                self.launcher = word.launcher or self.launcher
                self.end = word.end or self.end


class LauncherEnd:
    """The launcher's end of the line."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.setblocking(False)
        self._untied = False
        self.open = True

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self._socket.fileno()

    def send(self, word: LauncherMessage) -> None:
        """Send a message; it is dropped if the command is gone."""
        with contextlib.suppress(OSError):
            self._socket.send(msgspec.json.encode(word) + b"\n", socket.MSG_NOSIGNAL)

    def lost(self) -> bool:
        """Read the line; return whether the command that the run was tied to is gone."""
        try:
            data = self._socket.recv(4096)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        self._untied = self._untied or UNTIE in data
        self.open = bool(data)
        return not self.open and not self._untied
