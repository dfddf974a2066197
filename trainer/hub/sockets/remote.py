"""The hub's TCP sockets (``--listen``): a second, encrypted socket for each channel that other hosts use.

CURVE is a property of a socket, not of an address, so each channel needs a second socket. Apps and agents have
different keys: an agent's key opens only the agents' channels, an app's key all others.
"""

from typing import Any

import zmq

from ....protocol.errors import FtmonError
from ....protocol.link import keys, sockets
from ....protocol.run.rundir import RunDir
from ...host.listen import parse_listen


class RemoteSockets:
    """TCP sockets of a hub. If it cannot listen, ``problem`` has the reason, and the run continues without."""

    def __init__(self, context: "zmq.Context[Any]", run: RunDir, listen: str) -> None:
        self.sockets: dict[str, zmq.Socket[Any]] = {}
        self.addresses: dict[str, str] = {}
        self.server_key = ""
        self.problem = ""
        self._authenticator: Any = None
        if listen:
            try:
                self._open(context, run, listen)
            except FtmonError as error:
                self.close()
                self.problem = str(error)

    def close(self) -> None:
        """Close the open sockets (the history thread closes its own)."""
        for socket in self.sockets.values():
            if not socket.closed:
                socket.close()
        self.sockets.clear()
        self.addresses.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def _open(self, context: "zmq.Context[Any]", run: RunDir, listen: str) -> None:
        addresses = parse_listen(listen).addresses()
        pair = keys.server_pair(run)
        self._authenticator = keys.start_authenticator(context, keys.agent_pair(run).public)
        for channel, address in addresses.items():
            socket = sockets.hub_socket(context, channel)
            self.sockets[channel] = socket
            # An app must not be able to send messages for a rank.
            domain = keys.AGENT_DOMAIN if channel in sockets.AGENT_CHANNELS else keys.ZAP_DOMAIN
            sockets.secure_server(socket, pair, domain)
            sockets.bind(socket, address)
        self.addresses = addresses
        self.server_key = pair.public
