"""``ftmon relay [RUN]``: prints the paths of a run's sockets, and waits for its end; for ``attach ssh://``."""

import os
import select
from argparse import Namespace

import msgspec

from .... import __version__
from ....protocol.errors import FtmonError, UsageError
from ....protocol.messages import wire
from ....protocol.run import run_store
from ....protocol.run.rundir import RunDir
from ...source.ssh import APP_CHANNELS, Greeting
from ..access.trainer_process import living_hub

_POLL_SECONDS = 0.5


def relay(arguments: Namespace) -> int:
    """Print the greeting; return 0 when the run has ended, 1 when the other side has disconnected."""
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
        sockets={channel: run.ipc_address(channel).removeprefix("ipc://") for channel in APP_CHANNELS},
    )
    print(msgspec.json.encode(greeting).decode(), flush=True)
    while not _is_over(run):
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        if readable and not os.read(0, 4096):
            return 1
    return 0


def _is_over(run: RunDir) -> bool:
    """Return whether the job has ended and its hub has sent its last message."""
    try:
        return run.read_exit() is not None and run.living_hub() is None
    except FtmonError:
        return True
