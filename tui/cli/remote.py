"""Runs of other hosts: ``ftmon attach`` over tcp:// (CURVE) and ssh:// (no open ports), ``relay`` and ``keys``."""

import os
import re
import select
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from ... import __version__
from ...protocol.errors import FtmonError, UsageError
from ...protocol.link import keys
from ...protocol.link.sockets import CHANNELS
from ...protocol.messages import wire
from ...protocol.run import exits, rundir
from ...protocol.run.rundir import RunDir
from ...protocol.text import sanitize
from ..source.live import LiveSource
from ..source.ssh import APP_CHANNELS, Greeting, SshCommand, SshEndpoint, SshError
from . import output
from .access import living_hub
from .follow import Outages, pumped
from .narrate import Narrator, attach_line

_POLL_SECONDS = 0.5


def relay(arguments: Namespace) -> int:
    """Print the greeting; return 0 when the run has ended, 1 when the other side has disconnected."""
    run = rundir.find(arguments.run)
    end = run.read_exit()
    if end is not None:
        raise UsageError(f"{run.id} has {end.state}; copy {run.recording} and 'ftmon replay' it")
    hub = living_hub(run)
    content = run.read_run()
    greeting = Greeting(
        ftmon=__version__,
        protocol=wire.VERSION,
        read_only=hub.read_only,
        sockets={channel: run.ipc_address(channel).removeprefix("ipc://") for channel in APP_CHANNELS},
        **{name: getattr(content, name) for name in ("id", "name", "kind", "command", "created", "host")},
    )
    print(msgspec.json.encode(greeting).decode(), flush=True)
    while not _is_over(run):
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        if readable and not os.read(0, 4096):
            return 1
    return 0


def _is_over(run: RunDir) -> bool:
    try:
        return run.read_exit() is not None and run.living_hub() is None
    except FtmonError:
        return True


CONNECT_SECONDS = 30.0  # time limit of the first answer; a hub that does not allow this user never answers
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\s]+):(\d{1,5})/?")
_KEY = re.compile(r"(?<![^\s\"'])[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}(?![^\s\"',])")


class RemoteSource(LiveSource):
    """Follows a run whose hub listens on TCP, as a local one, with CURVE on every socket."""

    def __init__(self, addresses: dict[str, str], server_key: str) -> None:
        super().__init__(addresses=addresses)
        pair = keys.client_pair()
        options = {zmq.CURVE_SERVERKEY: server_key, zmq.CURVE_PUBLICKEY: pair.public, zmq.CURVE_SECRETKEY: pair.secret}
        for option, value in options.items():
            self._context.setsockopt(option, value.encode())


def parse_address(text: str) -> dict[str, str]:
    """Parse ``tcp://HOST:PORT``, the first of a hub's ports, one for each channel, or raise ``UsageError``."""
    found = _ADDRESS.fullmatch(text)
    first = int(found[2]) if found else 0
    if found is None or not 0 < first <= 65535 - len(CHANNELS) + 1:
        raise UsageError(f"{text}: must be tcp://HOST:PORT, as given to --listen")
    return {channel: f"tcp://{found[1]}:{first + offset}" for offset, channel in enumerate(CHANNELS)}


def read_server_key(text: str | None) -> str:
    """Return the hub's public key, given as text or as a file with it, such as a copy of the run's ``hub.json``.

    Raises ``UsageError`` if there is no key.
    """
    if text is None:
        raise UsageError("tcp:// needs --key: the hub's public key, which 'ftmon run --listen' printed")
    if _KEY.fullmatch(text):
        return text
    try:
        found = _KEY.search(Path(text).read_text())
    except (OSError, UnicodeDecodeError) as error:
        what = "is neither a public key of 40 characters nor a readable file"
        raise UsageError(f"--key {text}: {what}: {error}") from None
    if found is None:
        raise UsageError(f"--key {text}: no public key of 40 characters in it")
    return found[0]


def attach_remote(arguments: Namespace) -> int:
    """Watch a run of another host, in the app or in plain lines."""
    source = RemoteSource(parse_address(arguments.run), read_server_key(arguments.key))
    again = [arguments.run, "--key", arguments.key]
    return watch_remote(source, arguments, again, lambda: _no_answer(arguments.run))


def watch_remote(
    source: LiveSource, arguments: Namespace, again: Sequence[str], no_answer: Callable[[], UsageError]
) -> int:
    """Watch a run of another host, in the app or in plain lines.

    ``again``: the words after ``ftmon attach`` that attach to it again; ``no_answer`` makes the error to raise without
    an answer within ``CONNECT_SECONDS``.
    """
    if not (arguments.plain or output.why_no_app()):
        from ..app import run_app

        status = run_app(source, ascii_only=output.draws_ascii(arguments), read_only=arguments.read_only)
    else:
        status = _print_lines(source, arguments, no_answer)
    model = source.live_model
    if model.last_seq and not model.ended and source.connection.state != "ended":
        print(attach_line(model.info.id or "the run", again))
    return status


def _print_lines(source: LiveSource, arguments: Namespace, no_answer: Callable[[], UsageError]) -> int:
    narrator, outages = Narrator(ascii_only=output.draws_ascii(arguments)), Outages()
    deadline = time.monotonic() + CONNECT_SECONDS
    with closing(pumped(source)) as pumping:
        for _ in pumping:
            for line in [*narrator.new_lines(source.model), *outages.new_lines(source.connection)]:
                print(line, flush=True)
            if source.model.ended or source.connection.state == "ended":
                break
            if not source.model.last_seq and time.monotonic() > deadline:
                raise no_answer()
        else:
            return exits.INTERRUPTED
    if not source.model.ended:  # the run ended without a connection
        print(source.connection.text or "the run has ended; how is unknown here")
        return 1
    return exits.of_training(source.model.exit_code or 0)


def _no_answer(address: str) -> UsageError:
    own = keys.client_pair().public
    return UsageError(
        f"{address}: no answer in {CONNECT_SECONDS:.0f} s: check the address and the hub's key; your own key must be "
        f"allowed on that host: ftmon keys --allow='{own}'"
    )


def listen_line(run: RunDir, listen: str) -> str:
    """Return a line about how other hosts attach to a run that listens."""
    host, _, port = listen.rpartition(":")
    host = host if host not in ("", "0.0.0.0", "[::]", "::") else run.read_run().host
    return f"from other hosts: ftmon attach tcp://{host}:{port} --key='{keys.server_pair(run).public}'"


def manage_keys(arguments: Namespace) -> int:
    """Print this user's public key and the keys that this user's hubs allow; add or remove an allowed key."""
    if arguments.allow is not None:
        keys.allow(arguments.allow, arguments.remark)
    if arguments.remove is not None:
        keys.disallow(arguments.remove)
        print(f"removed {sanitize(arguments.remove)}; open connections are not cut")
    own = keys.client_pair().public
    print(f"your public key, to be allowed on the host of a run:\n  {own}")
    others = {key: remark for key, remark in keys.allowed().items() if key != own}
    print("other keys allowed here:" if others else "no other key is allowed here")
    for key, remark in others.items():
        print(f"  {key}  {sanitize(remark)}".rstrip())
    return 0


SSH_ENV = "FTMON_SSH"  # OpenSSH client command with options, if not `ssh`
REMOTE_ENV = "FTMON_REMOTE"
"""Path of ftmon on the remote host, if it is not on the PATH of ssh commands: ``~/venv/bin/ftmon``."""

_URL = re.compile(
    r"ssh://(?:([^@/\s-][^@/\s]*)@)?(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]-][^\s:/@\[\]]*)(?::(\d{1,5}))?(?:/([^/\s]*))?/?"
)
_NOT_FOUND, _SSH_FAILED = 127, 255
_NO_COMMAND = "there is no command"


class Place(NamedTuple):
    """A run on another host; an empty ``run`` is its newest one."""

    host: str
    user: str
    port: str
    run: str


def parse_place(text: str) -> Place:
    """Parse ``ssh://[USER@]HOST[:PORT][/RUN]``, or raise ``UsageError``."""
    found = _URL.fullmatch(text)
    if found is None or (found[3] and not 0 < int(found[3]) <= 65535):
        raise UsageError(f"{text}: must be ssh://[USER@]HOST[:PORT][/RUN]")
    return Place(found[2].strip("[]"), found[1] or "", found[3] or "", found[4] or "")


def command(place: Place) -> SshCommand:
    """Return the words of the ssh command for a run."""
    relay = f"{os.environ.get(REMOTE_ENV) or 'ftmon'} relay"
    port, user = ("-p", place.port) if place.port else (), ("-l", place.user) if place.user else ()
    return SshCommand(shlex.split(os.environ.get(SSH_ENV) or "ssh"), [*port, *user, "--", place.host], relay, place.run)


def attach_ssh(arguments: Namespace) -> int:
    """Watch a run of another host, in the app or in plain lines."""
    place = parse_place(arguments.run)
    endpoint = SshEndpoint(command(place))
    with closing(endpoint):  # also after ctrl-c at the password prompt
        try:
            endpoint.open()
        except FtmonError as error:
            reason = _explain(error) if isinstance(error, SshError) else str(error)
            raise UsageError(f"{place.host}: {reason}") from None
        no_answer = UsageError(f"{arguments.run}: the hub there does not answer")
        with closing(LiveSource(endpoint=endpoint, info=endpoint.info)) as source:
            return watch_remote(source, arguments, [_address(place, endpoint.info.id)], lambda: no_answer)


def _address(place: Place, run_id: str) -> str:
    user, port = f"{place.user}@" if place.user else "", f":{place.port}" if place.port else ""
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"ssh://{user}{host}{port}/{run_id or place.run}"


def _explain(error: SshError) -> str:
    words = str(error).removeprefix("ftmon: ")
    if error.status == _NOT_FOUND:
        found = words or "not found"
        return f"no 'ftmon' there on the PATH of a command ({found}); name it: {REMOTE_ENV}='~/venv/bin/ftmon'"
    if error.status == exits.WRONG_USAGE and _NO_COMMAND in words:
        return "the ftmon there has no command 'relay'; install the same version on both sides"
    return words or ("ssh failed" if error.status == _SSH_FAILED else f"ftmon relay ended with status {error.status}")
