"""Connects to a run of another host over ssh: forwards its hub's UNIX sockets through one connection.

``ssh HOST ftmon relay RUN`` reports the paths of the sockets, and ends when the run ends. Through the same connection
(OpenSSH's ``ControlMaster``), ``ssh -O forward -L`` forwards them. A lost connection is replaced by another.
"""

import contextlib
import inspect
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec
import zmq

from ...protocol.errors import FtmonError, HubError, RecordingError
from ...protocol.link.sockets import peer_socket
from ...protocol.messages import wire
from ...protocol.messages.control import Answer, Query
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import decode_answer
from ...protocol.run import exits
from ...protocol.text import sanitize
from ..model.run import RunInfo
from .load import Endpoint, History, Hub

APP_CHANNELS = ("stream", "control", "query")
RETRY_SECONDS = 3.0
HELLO_SECONDS = 20.0
_FORWARD_SECONDS = 5.0  # time limit of the hub's first byte through a forwarded socket
_EXIT_SECONDS = 3.0
_GREETING_LIMIT = 64 << 10  # limit of a login shell's output before the relay's first line
_ERRORS_LIMIT = 16 << 10
_CHANNEL = "channel "  # prefix of ssh's messages about a forwarded connection, which occur whenever the hub is gone
_ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
_OWN_MASTER = ("-o", "ControlPersist=no")
"""Overrides the user's configuration, which may keep connections open: this one must end with ftmon."""
_UNATTENDED = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


class Greeting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of ``ftmon relay``, in JSON."""

    ftmon: str
    protocol: tuple[int, int]
    id: str
    name: str = ""
    kind: str = ""
    command: list[str] = []
    created: float = 0.0
    host: str = ""
    read_only: bool = False
    sockets: dict[str, str] = {}  # path of the hub's socket by channel


class SshError(FtmonError):
    """Connecting failed: ssh or the program on the other host ended, or sockets are not forwarded."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class SshCommand(NamedTuple):
    """Words of an ssh command."""

    program: list[str]  # OpenSSH's client and the user's options
    target: list[str]  # options and the host
    relay: str  # the command on the other host, without the run
    run: str = ""  # the run; empty: the newest one there

    def session(self, control: Path, unattended: bool) -> list[str]:
        """Return the words that connect; unless ``unattended``, ssh may ask for a password."""
        options = (*_OWN_MASTER, *_ALIVE, *(_UNATTENDED if unattended else ()))
        remote = " ".join(filter(None, (self.relay, shlex.quote(self.run) if self.run else "")))
        return [*self.program, "-T", "-M", "-S", str(control), *options, *self.target, remote]

    def forward(self, control: Path, pairs: Iterable[tuple[Path, str]]) -> list[str]:
        """Return the words that forward local sockets to remote ones through a session."""
        forwards = [word for near, far in pairs for word in ("-L", f"{near}:{far}")]
        return [*self.program, "-S", str(control), "-O", "forward", *forwards, *self.target]


class Session:
    """One ssh connection; ``unattended``: it stops after ``HELLO_SECONDS``, and asks for no password.

    Raises ``SshError``, whose text is the last printed line, if connecting failed.
    """

    def __init__(self, command: SshCommand, folder: Path, unattended: bool) -> None:
        self.sockets = {channel: folder / f"{channel}.sock" for channel in APP_CHANNELS}
        control = folder / "control"
        for path in (*self.sockets.values(), control):
            path.unlink(missing_ok=True)  # from an earlier session
        words = command.session(control, unattended)
        try:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise SshError(f"{words[0]}: {error.strerror}", 127) from None
        self._errors = bytearray()
        self._over = threading.Event()
        self._reading = threading.Thread(target=self._read_errors, name="ssh-errors", daemon=True)
        self._reading.start()
        try:
            self.greeting = self._greet(unattended)
            self._forward(command.forward(control, self._pairs()))
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        threading.Thread(target=self._await_end, name="ssh", daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    @property
    def ended_in_order(self) -> bool:
        """Whether it ended because the run has ended."""
        return not self.alive and self._process.poll() == 0

    @property
    def last_line(self) -> str:
        return _last(line for line in _lines(self._errors) if not line.startswith(_CHANNEL))

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_SECONDS)
            return
        self._process.kill()
        self._process.wait()

    def _pairs(self) -> list[tuple[Path, str]]:
        far = self.greeting.sockets
        if not far.keys() >= self.sockets.keys():
            raise _other_version()
        return [(near, far[channel]) for channel, near in self.sockets.items()]

    def _greet(self, unattended: bool) -> Greeting:
        timer = threading.Timer(HELLO_SECONDS, self._process.kill)
        if unattended:
            timer.start()
        try:
            return self._read_greeting()
        finally:
            timer.cancel()

    def _read_greeting(self) -> Greeting:
        assert self._process.stdout is not None
        line = b""
        for _ in range(_GREETING_LIMIT):
            byte = os.read(self._process.stdout.fileno(), 1)
            if not byte:
                break
            line += byte
            if byte == b"\n":
                if line.startswith(b'{"ftmon":'):
                    return _decode_greeting(line)
                line = b""  # output of a login shell
        else:
            self._process.kill()
        status = self._process.wait()
        self._reading.join(timeout=10)
        raise SshError(self.last_line, status)

    def _forward(self, words: Sequence[str]) -> None:
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=HELLO_SECONDS)
        except subprocess.TimeoutExpired:
            raise SshError("ssh does not forward the hub's sockets: it gave no answer") from None
        if done.returncode:
            raise SshError(f"ssh does not forward the hub's sockets: {_last(_lines(done.stderr))}")
        began = time.monotonic()
        while not _answers(self.sockets["query"]):
            why = _last(line for line in _lines(self._errors) if line.startswith(_CHANNEL))
            if time.monotonic() - began > (_FORWARD_SECONDS if why else HELLO_SECONDS):
                raise SshError(
                    "its SSH server does not forward UNIX sockets; set 'AllowStreamLocalForwarding yes' in its "
                    f"sshd_config, or attach to tcp:// ({why or 'no answer'})"
                )
            time.sleep(0.2)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stderr.fileno(), 4096):
                self._errors = (self._errors + data)[-_ERRORS_LIMIT:]

    def _await_end(self) -> None:
        """Record the end of the program on the other host; ssh itself stays while a connection is forwarded."""
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while os.read(self._process.stdout.fileno(), 4096):
                pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_SECONDS)
        self._over.set()


class SshEndpoint(Endpoint):
    """Finds a run's hub over ssh; call ``open`` first."""

    def __init__(self, command: SshCommand) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ftmon-ssh-"))  # mkdtemp makes it 0700
        super().__init__(addresses={})
        self._command = command
        self._session: Session | None = None
        self._hub: Hub | None = None
        self._next = 0.0
        self._closed = False
        self._trouble = ""
        self._refusal = ""
        """Reason why the other side refuses the run permanently: it ended while there was no connection."""
        self.greeting: Greeting | None = None

    def open(self, unattended: bool = False) -> Greeting:
        """Connect, and return the greeting; unless ``unattended``, ssh may ask for a password.

        Raises ``SshError`` if there is no connection, ``HubError`` if the other side uses another protocol version.
        """
        session = Session(self._command, self._folder, unattended)
        if self._closed:  # meanwhile, by another thread
            session.close()
            raise HubError("no longer wanted")
        found = session.greeting
        self._session, self.greeting, self._trouble = session, found, ""
        self._command = self._command._replace(run=found.id)  # another run may be the newest at a reconnect
        self._hub = Hub({name: f"ipc://{path}" for name, path in session.sockets.items()}, read_only=found.read_only)
        return found

    @property
    def info(self) -> RunInfo:
        return RunInfo.of(self.greeting) if self.greeting is not None else RunInfo()

    @property
    def trouble(self) -> str:
        """Reason why there is no connection now; empty while there is one."""
        if self._session is None or self._session.alive:
            return self._trouble
        words = self._session.last_line
        return f"the connection is gone{f' ({words})' if words else ''}; another is tried"

    def hub(self) -> Hub | None:
        """Return the hub behind the connection; if that is lost, reconnect from time to time."""
        if self._session is not None and self._session.alive:
            return self._hub
        if self._closed or self.ended() or time.monotonic() < self._next:
            return None
        if self._session is not None:
            self._trouble = self.trouble
            self._session.close()
            self._session = None
        self._next = time.monotonic() + RETRY_SECONDS
        try:
            self.open(unattended=True)
        except FtmonError as error:
            if isinstance(error, SshError) and error.status == exits.WRONG_USAGE:
                self._refusal = str(error).removeprefix("ftmon: ")
            self._trouble = f"no connection: {error}; it is tried again"
            return None
        return self._hub

    def is_alive(self, hub: Hub) -> bool:
        """Return whether the connection to that hub is alive."""
        return hub is self._hub and self._session is not None and self._session.alive

    def ended(self) -> bool:
        """Return whether the run was reported as ended, or is refused because it has ended."""
        return bool(self._refusal) or (self._session is not None and self._session.ended_in_order)

    def open_recording(self) -> History:
        """Refuse: it is on the other host."""
        where = self.greeting.host if self.greeting is not None else "another host"
        raise RecordingError(f"{where}: {self._refusal}" if self._refusal else f"the recording is on {where}")

    def close(self) -> None:
        self._closed = True
        if self._session is not None:
            self._session.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _answers(path: Path) -> bool:
    """Return whether a hub sends its first byte, as ZeroMQ does unprompted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as near:
        near.settimeout(_FORWARD_SECONDS)
        try:
            near.connect(str(path))
            return bool(near.recv(1))
        except OSError:
            return False


def _decode_greeting(line: bytes) -> Greeting:
    try:
        found = msgspec.json.decode(line, type=Greeting)
    except (msgspec.MsgspecError, ValueError):
        raise _other_version() from None
    if found.protocol[0] != wire.VERSION[0]:
        raise HubError(
            f"ftmon {found.ftmon} there speaks protocol {found.protocol[0]}.{found.protocol[1]}, this one "
            f"{wire.VERSION[0]}.{wire.VERSION[1]}: install the same version on both sides"
        )
    return found


def _other_version() -> SshError:
    return SshError("the ftmon there is of another version: install the same on both sides")


def _lines(errors: bytes | bytearray) -> list[str]:
    return [line.strip() for line in bytes(errors).decode("utf-8", "replace").splitlines() if line.strip()]


def _last(lines: Iterable[str]) -> str:
    found = [*lines]
    return sanitize(found[-1], 300) if found else ""


TIMEOUT_S = 10.0  # time limit of an answer, seconds; a hub on a slow disk needs that long
_POLL_MS = 50

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _asked(method: Callable[Concatenate[Reader, _P], _T]) -> Callable[Concatenate["RemoteReader", _P], _T]:
    """Return a method of the recording's reader as a query of its name with its arguments."""
    signature = inspect.signature(method)

    def ask(reader: "RemoteReader", *args: _P.args, **kwargs: _P.kwargs) -> _T:
        given = signature.bind(None, *args, **kwargs)
        given.apply_defaults()
        return reader._ask(method.__name__, **{name: each for name, each in given.arguments.items() if name != "self"})

    return ask


class RemoteReader:
    """A ``Reader`` at the other end of a query socket. Use it from one thread.

    ``cancelled`` is polled while waiting; True cancels the query. Queries raise ``HubError`` without an answer in time,
    ``RecordingError`` for an error of the hub, and ``ProtocolError`` for an invalid answer.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        address: str,
        timeout_s: float = TIMEOUT_S,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context, self._address = context, address
        self._timeout_s, self._cancelled = timeout_s, cancelled
        self._socket: zmq.Socket[Any] | None = None
        self._asked = 0

    info = _asked(Reader.info)
    frames = _asked(Reader.frames)
    state_at = _asked(Reader.state_at)
    memory = _asked(Reader.memory)
    training = _asked(Reader.training)
    alerts = _asked(Reader.alerts)
    logs = _asked(Reader.logs)
    marks = _asked(Reader.marks)
    sampled = _asked(Reader.sampled)
    jobs = _asked(Reader.jobs)
    step_time = _asked(Reader.step_time)
    seq_at = _asked(Reader.seq_at)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, name: str, **args: Any) -> Any:
        """Send a query and return the decoded answer."""
        self._asked += 1
        query = Query(f"{secrets.token_hex(4)}-{self._asked}", name, args)
        try:
            answer = self._exchange(query)
        except zmq.ZMQError as error:  # the context ends, and its users with it
            self.close()
            raise HubError(f"the hub cannot be asked: {error.strerror}") from None
        except HubError:
            self.close()  # a late answer must not be mistaken for that of a later query
            raise
        if not answer.ok:
            raise RecordingError(answer.error)
        return decode_answer(name, answer.data)

    def _connected(self) -> "zmq.Socket[Any]":
        if self._socket is None:
            self._socket = peer_socket(self._context, "query")
            # A query to a hub that is gone must not be queued and reach the next hub.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.connect(self._address)
        return self._socket

    def _exchange(self, query: Query) -> Answer:
        socket, deadline = self._connected(), time.monotonic() + self._timeout_s
        self._await(socket, zmq.POLLOUT, deadline)
        socket.send_multipart(wire.encode("app", self._asked, time.time(), query), zmq.NOBLOCK)
        while True:
            self._await(socket, zmq.POLLIN, deadline)
            answer = wire.decode_answer(socket.recv_multipart())
            if isinstance(answer, Answer) and answer.id == query.id:
                return answer

    def _await(self, socket: "zmq.Socket[Any]", event: int, deadline: float) -> None:
        while not socket.poll(_POLL_MS, event):
            if self._cancelled():
                raise HubError("no longer asked")
            if time.monotonic() > deadline:
                raise HubError(f"the hub did not answer within {self._timeout_s:.0f} s")
