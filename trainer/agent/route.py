"""Finds an address at which the hub answers, in a thread, because connecting takes seconds."""

import socket
import threading
from collections.abc import Callable

_TRY_SECONDS = 2.0
_PAUSE_SECONDS = 1.0


class Route(threading.Thread):
    """Tries the hub's addresses on request, until one answers.

    ``addresses`` are in order of preference; ``found`` is called, in this thread, with one that accepted a connection.
    """

    def __init__(self, addresses: list[str], port: int, found: Callable[[str], object]) -> None:
        super().__init__(name="route", daemon=True)
        self._addresses = list(dict.fromkeys(addresses))
        self._port = port
        self._found = found
        self._wanted = threading.Event()
        self._ending = threading.Event()

    def search(self) -> None:
        """Start a search for an address; ``found`` is called once it succeeds."""
        self._wanted.set()

    def avoid(self, address: str) -> None:
        """Try this address last: it accepted a connection, but no hub of this run answered."""
        if address in self._addresses:
            self._addresses.remove(address)
            self._addresses.append(address)

    def stop(self) -> None:
        """End the thread within a few seconds."""
        self._ending.set()
        self._wanted.set()

    def run(self) -> None:
        """Search on request until stopped."""
        while True:
            self._wanted.wait()
            if self._ending.is_set():
                return
            answers = next((address for address in list(self._addresses) if self._answers(address)), None)
            if answers is None:
                self._ending.wait(_PAUSE_SECONDS)
                continue
            self._wanted.clear()
            self._found(answers)

    def _answers(self, address: str) -> bool:
        try:
            with socket.create_connection((address, self._port), timeout=_TRY_SECONDS):
                return True
        except OSError:
            return False
