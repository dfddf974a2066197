"""``ftmon attach tcp://HOST:PORT --key KEY``: watches a run of another host, over TCP with CURVE; ``ftmon keys``."""

import re
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from ....protocol.errors import UsageError
from ....protocol.link import keys
from ....protocol.link.sockets import CHANNELS
from ....protocol.run import exits
from ....protocol.run.rundir import RunDir
from ....protocol.text import sanitize
from ...source.live import LiveSource
from ..foreground.follow import POLL_SECONDS, Outages, counted_interrupts
from ..foreground.narrate import Narrator
from ..foreground.outcome import attach_line
from ..output import terminal

CONNECT_SECONDS = 30.0
"""Time limit of the first answer; a hub that does not allow this user never answers."""

_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\s]+):(\d{1,5})/?")
_KEY = re.compile(r"(?<![^\s\"'])[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}(?![^\s\"',])")


class RemoteSource(LiveSource):
    """Follows a run whose hub listens on TCP, as a local one, with CURVE on every socket."""

    def __init__(self, addresses: dict[str, str], server_key: str) -> None:
        """Use the hub's channels and public key; the client's key pair is this user's."""
        super().__init__(addresses=addresses)
        pair = keys.client_pair()
        for option, value in (
            (zmq.CURVE_SERVERKEY, server_key),
            (zmq.CURVE_PUBLICKEY, pair.public),
            (zmq.CURVE_SECRETKEY, pair.secret),
        ):
            self._context.setsockopt(option, value.encode())


def parse_address(text: str) -> dict[str, str]:
    """Parse ``tcp://HOST:PORT``, the first of a hub's consecutive ports, one for each channel.

    Raises:
        UsageError: it is not of that form.
    """
    found = _ADDRESS.fullmatch(text)
    first = int(found[2]) if found else 0
    if found is None or not 0 < first <= 65535 - len(CHANNELS) + 1:
        raise UsageError(f"{text}: must be tcp://HOST:PORT, as given to --listen")
    return {channel: f"tcp://{found[1]}:{first + offset}" for offset, channel in enumerate(CHANNELS)}


def read_server_key(text: str | None) -> str:
    """Return the hub's public key, given as text or as a file with it, such as a copy of the run's ``hub.json``.

    Raises:
        UsageError: there is no key.
    """
    if text is None:
        raise UsageError("tcp:// needs --key: the hub's public key, which 'ftmon run --listen' printed")
    if _KEY.fullmatch(text):
        return text
    try:
        content = Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--key {text}: is neither a public key of 40 characters nor a readable file: {error}"
        ) from None
    found = _KEY.search(content)
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

    Args:
        source: source of the run; started here.
        arguments: ``plain``, ``ascii`` and ``read_only`` as given.
        again: the words after ``ftmon attach`` that attach to it again.
        no_answer: makes the error to raise without an answer within ``CONNECT_SECONDS``.
    """
    if not (arguments.plain or terminal.why_no_app()):
        from ...app import run_app

        status = run_app(source, ascii_only=terminal.draws_ascii(arguments), read_only=arguments.read_only)
    else:
        status = _print_lines(source, arguments, no_answer)
    model = source.live_model
    if model.last_seq and not model.ended and source.connection.state != "ended":
        print(attach_line(model.info.id or "the run", again))
    return status


def _print_lines(source: LiveSource, arguments: Namespace, no_answer: Callable[[], UsageError]) -> int:
    """Print a run's lines until it ends or the person leaves; return the training's status, 1 where it is unknown."""
    narrator, outages = Narrator(ascii_only=terminal.draws_ascii(arguments)), Outages()
    deadline = time.monotonic() + CONNECT_SECONDS
    with counted_interrupts() as interrupts:
        source.start()
        try:
            while not source.model.ended and source.connection.state != "ended":
                source.pump(POLL_SECONDS)
                for line in [*narrator.new_lines(source.model), *outages.new_lines(source.connection)]:
                    print(line, flush=True)
                if interrupts.count:
                    return exits.INTERRUPTED
                if not source.model.last_seq and time.monotonic() > deadline:
                    raise no_answer()
                time.sleep(POLL_SECONDS)
        finally:
            source.close()
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
