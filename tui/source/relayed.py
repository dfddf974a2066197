"""Connects to a run on another host through the pipes of a relay program, ``ssh HOST ftmon relay RUN``.

Local sockets represent the hub's; each connection to them is forwarded to the hub's socket (``tunnel``). If the program
ends, it is started again, so that a dropped ssh connection is only an interruption.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...protocol import wire
from ...protocol.errors import FtmonError, HubError, RecordingError
from ...protocol.text import sanitize
from ..model.run import RunInfo
from .endpoint import Endpoint, Hub
from .history import History
from .tunnel import Tunnel

CHANNELS = ("stream", "control", "query")
"""The hub's channels that an app needs."""
RETRY_SECONDS = 3.0
HELLO_SECONDS = 20.0
_GREETING_LIMIT = 64 << 10
"""Maximum bytes that a login shell may print before the relay's first line."""


class Greeting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The relay's first line, in JSON; then the tunnel's frames follow."""

    ftmon: str
    """Version of ftmon there."""
    protocol: tuple[int, int]
    id: str
    name: str = ""
    kind: str = ""
    command: list[str] = []
    created: float = 0.0
    host: str = ""
    read_only: bool = False


class RelayError(FtmonError):
    """The relay program ended before its greeting."""

    def __init__(self, text: str, status: int = 1) -> None:
        """Keep the program's own words, and its exit status."""
        super().__init__(text)
        self.status = status


class Relay:
    """One running relay program.

    Args:
        command: its command line.
        listeners: the local sockets, by channel.
        patience: seconds to wait for its first line; None: no limit (the user may be typing a password).

    Raises:
        RelayError: it ended, or sent nothing in time; the text is its last output.
    """

    def __init__(self, command: Sequence[str], listeners: dict[str, socket.socket], patience: float | None) -> None:
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise RelayError(f"{command[0]}: {error.strerror}", 127) from None
        self._errors = bytearray()
        self._reading = threading.Thread(target=self._read_errors, name="relay-errors", daemon=True)
        self._reading.start()
        timer = threading.Timer(patience, self._process.kill) if patience is not None else None
        try:
            if timer is not None:
                timer.start()
            self.greeting = self._read_greeting()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        source, sink = os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())
        self._process.stdout.close()
        self._process.stdin.close()
        self._tunnel = Tunnel(source, sink, listeners)
        self._tunnel.start()

    @property
    def alive(self) -> bool:
        """Whether it forwards connections."""
        return self._tunnel.is_alive() and self._process.poll() is None

    @property
    def ended_in_order(self) -> bool:
        """Whether it ended because the run is over."""
        return self._process.poll() == 0

    @property
    def last_words(self) -> str:
        """The last line that it printed as an error."""
        return _last_line(self._errors)

    def close(self) -> None:
        """End it."""
        self._tunnel.stop()
        if self._tunnel.is_alive():
            self._tunnel.join(timeout=2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)  # its input is closed: it ends by itself
            return
        self._process.kill()
        self._process.wait()

    def _read_greeting(self) -> Greeting:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        line, total = bytearray(), 0
        while total < _GREETING_LIMIT:
            byte = os.read(descriptor, 1)
            if not byte:
                break
            total += 1
            line += byte
            if byte == b"\n":
                if line.startswith(b'{"ftmon":'):
                    return _decode_greeting(bytes(line))
                line.clear()  # what a login shell printed
        self._process.kill() if total >= _GREETING_LIMIT else None
        status = self._process.wait()
        self._reading.join(timeout=1)
        raise RelayError(_last_line(self._errors), status)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stderr.fileno(), 4096):
                self._errors = (self._errors + data)[-16_384:]


class RelayedEndpoint(Endpoint):
    """Locates a run's hub through a relay program. Create it, then call ``open``.

    Args:
        command: the program's command line.
        again: the command line of later attempts, when no password can be typed.
    """

    def __init__(self, command: Sequence[str], again: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ftmon-relay-"))  # mkdtemp makes it 0700
        self._sockets: dict[str, socket.socket] = {}
        for channel in CHANNELS:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self._folder / f"{channel}.sock"))
            listener.listen(64)
            self._sockets[channel] = listener
        super().__init__(addresses={channel: f"ipc://{self._folder / f'{channel}.sock'}" for channel in CHANNELS})
        self._command = list(command)
        self._again = list(again)
        self._relay: Relay | None = None
        self._hub: Hub | None = None
        self._next = 0.0
        self._closed = False
        self._trouble = ""
        self.greeting: Greeting | None = None

    def open(self) -> Greeting:
        """Start the program and wait for its greeting.

        Raises:
            RelayError: it ended instead.
            HubError: it speaks another protocol.
        """
        return self._start(self._command, None)

    @property
    def info(self) -> RunInfo:
        """The run's information from the greeting."""
        found = self.greeting
        if found is None:
            return RunInfo()
        return RunInfo(found.id, found.name, found.kind, found.command, found.created, found.host)

    @property
    def trouble(self) -> str:
        """Why there is no relay; empty if there is one."""
        if self._relay is None or self._relay.alive:
            return self._trouble
        words = self._relay.last_words
        return f"the connection is gone{f' ({words})' if words else ''}; another is tried"

    def hub(self) -> Hub | None:
        """Return the hub behind the relay; restart the relay, at intervals, if it is gone."""
        if self._relay is not None and self._relay.alive:
            return self._hub
        if self._closed or self.ended() or time.monotonic() < self._next:
            return None
        if self._relay is not None:
            self._trouble = self.trouble
            self._relay.close()
            self._relay = None
        self._next = time.monotonic() + RETRY_SECONDS
        try:
            self._start(self._again, HELLO_SECONDS)
        except FtmonError as error:
            self._trouble = f"no connection: {error}; it is tried again"
            return None
        return self._hub

    def is_alive(self, hub: Hub) -> bool:
        """Return whether the relay to this hub works."""
        return hub is self._hub and self._relay is not None and self._relay.alive

    def ended(self) -> bool:
        """Return whether the relay reported the run's end."""
        return self._relay is not None and self._relay.ended_in_order

    def open_recording(self) -> History:
        """Refuse: it is on the other host."""
        where = self.greeting.host if self.greeting is not None else "another host"
        raise RecordingError(f"the recording is on {where}")

    def close(self) -> None:
        """End the program and remove the sockets."""
        self._closed = True
        if self._relay is not None:
            self._relay.close()
        for listener in self._sockets.values():
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, command: Sequence[str], patience: float | None) -> Greeting:
        relay = Relay(command, self._sockets, patience)
        found = relay.greeting
        if found.protocol[0] != wire.VERSION[0]:
            relay.close()
            raise HubError(
                f"ftmon {found.ftmon} there speaks protocol {found.protocol[0]}.{found.protocol[1]}, this one "
                f"{wire.VERSION[0]}.{wire.VERSION[1]}: install the same version on both sides"
            )
        self._relay, self.greeting, self._trouble = relay, found, ""
        self._hub = Hub(self._addresses or {}, read_only=found.read_only)
        return found


def _decode_greeting(line: bytes) -> Greeting:
    try:
        return msgspec.json.decode(line, type=Greeting)
    except (msgspec.MsgspecError, ValueError):
        raise RelayError(
            "what answers there is no ftmon of this kind: install the same version on both sides"
        ) from None


def _last_line(errors: bytes | bytearray | Any) -> str:
    lines = [line.strip() for line in bytes(errors).decode("utf-8", "replace").splitlines() if line.strip()]
    return sanitize(lines[-1], 300) if lines else ""
