"""Passes calls from helper threads to the main loop, because only the main loop uses the stream and the sockets."""

import os
from collections import deque
from collections.abc import Callable


class Mailbox:
    """A queue of calls with a descriptor that becomes readable when one is waiting."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._descriptor

    def post(self, call: Callable[[], object]) -> None:
        """Schedule ``call`` in the main loop; any thread."""
        self._calls.append(call)
        os.eventfd_write(self._descriptor, 1)

    def drain(self) -> None:
        """Make every waiting call. Main loop only."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return
        try:
            for _ in range(len(self._calls)):
                self._calls.popleft()()
        finally:
            if self._calls:  # calls queued after one that failed
                os.eventfd_write(self._descriptor, 1)
