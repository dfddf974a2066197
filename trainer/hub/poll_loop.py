"""The hub's main loop: handles readable sockets, control before data, and ticks four times a second.

All handlers are plain function calls of this loop; telemetry reaches 20,000 messages a second.
"""

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from ..host.loop import Failures

TICK_SECONDS = 0.25


class PollLoop:
    """Polls sources and calls their handlers.

    ``tick`` is called every ``TICK_SECONDS`` with ``time.monotonic``; the others around each wait for the sources.
    """

    def __init__(
        self, tick: Callable[[float], None], before_wait: Callable[[], None], after_read: Callable[[], None]
    ) -> None:
        self._tick = tick
        self._before_wait = before_wait
        self._after_read = after_read
        self._handlers: dict[Any, Callable[[], object]] = {}
        self._failures = Failures()
        self._stopped = False

    def add(self, source: Any, handler: Callable[[], object]) -> None:
        """Call ``handler`` when ``source`` (a socket or a descriptor) is readable; sources added first come first."""
        self._handlers[source] = handler

    def stop(self) -> None:
        """End ``run`` after the current round."""
        self._stopped = True

    def run(self) -> None:
        """Serve until stopped.

        Raises:
            Exception: a handler's exception, after too many of them in a short time.
        """
        poller = zmq.Poller()
        for source in self._handlers:
            poller.register(source, zmq.POLLIN)
        next_tick = time.monotonic()
        while not self._stopped:
            now = time.monotonic()
            try:
                if now >= next_tick:
                    next_tick = now + TICK_SECONDS
                    self._round(poller, 0)  # a tick judges: what arrived in time is read before
                    self._tick(now)
                self._round(poller, max(0, int((next_tick - now) * 1000) + 1))
            except Exception:  # one bad message or file must not end the hub; a repeated failure does
                traceback.print_exc(file=sys.stderr)
                if self._failures.too_many(now):
                    raise

    def _round(self, poller: zmq.Poller, timeout_ms: int) -> None:
        self._before_wait()
        ready = dict(poller.poll(timeout_ms))
        for source, handler in self._handlers.items():
            if source in ready:
                handler()
        self._after_read()
