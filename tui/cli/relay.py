"""``ftmon relay [RUN]``: pass a run's sockets on over standard input and output; what ``attach ssh://`` runs there."""

import os
import socket
import time
from argparse import Namespace

import msgspec

from ... import __version__
from ...protocol import run_store, wire
from ...protocol.errors import FtmonError, UsageError
from ...protocol.rundir import RunDir
from ..source.relayed import CHANNELS, Greeting
from ..source.tunnel import Tunnel
from .trainer_process import living_hub

_POLL_SECONDS = 0.5


def relay(arguments: Namespace) -> int:
    """Relay a run until the other side leaves (status 1) or the run is over (status 0)."""
    run = run_store.find(arguments.run)
    end = run.read_exit()
    if end is not None:
        raise UsageError(f"{run.id} has {end.state}; copy {run.recording} and 'ftmon replay' it")
    hub = living_hub(run)
    content = run.read_run()
    greeting = Greeting(
        ftmon=__version__,
        protocol=wire.VERSION,
        id=content.id,
        name=content.name,
        kind=content.kind,
        command=content.command,
        created=content.created,
        host=content.host,
        read_only=hub.read_only,
    )
    # A descriptor of its own, and standard output to nowhere: nothing that is printed may get between the frames.
    sink, source = os.dup(1), os.dup(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.write(sink, msgspec.json.encode(greeting) + b"\n")
    tunnel = Tunnel(source, sink, opener=lambda channel: _connect(run, channel))
    tunnel.start()
    while tunnel.is_alive():
        tunnel.join(_POLL_SECONDS)
        if _is_over(run):
            time.sleep(_POLL_SECONDS)  # what the hub sent last is still on its way
            tunnel.stop()
            tunnel.join()
            return 0
    return 1


def _connect(run: RunDir, channel: str) -> socket.socket:
    """Connect to a channel of the run's hub.

    Raises:
        OSError: there is none now, or no such channel.
    """
    if channel not in CHANNELS:
        raise OSError(f"{channel} is not relayed")
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        near.connect(run.ipc_address(channel).removeprefix("ipc://"))
    except OSError:
        near.close()
        raise
    return near


def _is_over(run: RunDir) -> bool:
    """Return whether the job has ended and its hub has sent its last message."""
    try:
        return run.read_exit() is not None and run.living_hub() is None
    except FtmonError:
        return True
