"""Free TCP ports below the ephemeral range: no connection of anything else takes one before the test does."""

from ftmon.protocol.errors import UsageError
from ftmon.protocol.link.sockets import CHANNELS
from ftmon.trainer.host.sockets import check_free, parse_listen
from ftmon.trainer.recipe import hardware
from ftmon.trainer.recipe.hardware import free_port

__all__ = ["free_port", "listen_address"]


def listen_address() -> str:
    """Find a free ``HOST:PORT`` for ``--listen``, which takes a port for every channel."""
    while True:
        port = free_port()
        found = f"127.0.0.1:{port}"
        try:
            check_free(parse_listen(found))
        except UsageError:
            continue
        if all(hardware._claim(port + offset) for offset in range(1, len(CHANNELS))):
            return found
