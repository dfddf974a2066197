"""The main loop of a hub or an agent, coroutines that wait for replies in it, and calls by other threads."""

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Flow = Coroutine["Reply[Any]", None, T]  # A coroutine that awaits replies, and other flows
Post = Callable[[Callable[[], object]], None]  # Schedules a call in the main loop; any thread


class Reply(Generic[T]):
    """A value that is set once. Main loop only. Either one coroutine awaits it, or one function is called with it.

    A coroutine runs until it awaits a reply, and resumes in the call that sets it: an answer of a rank (``RankLink``)
    or the end of a thread's work (``in_thread``). The main loop makes these calls, so no lock is needed, and telemetry
    is received in between.
    """

    def __init__(self) -> None:
        self._arrived = False
        self._value: Any = None
        self._next: Callable[[T], object] | None = None

    def arrive(self, value: T) -> None:
        """Set the value and resume the coroutine that awaits it."""
        self._arrived, self._value = True, value
        if self._next is not None:
            self._next(value)

    def then(self, call: Callable[[T], object]) -> None:
        """Call a function with the value once it is set."""
        self._next = call
        if self._arrived:
            call(self._value)

    def __await__(self) -> Generator["Reply[Any]", None, T]:
        if not self._arrived:
            yield self
        return self._value


def start(flow: Flow[object]) -> None:
    """Run a coroutine until it first waits; the rest runs as its replies arrive.

    Raises what the coroutine raises before it first waits; later exceptions are raised where the reply is set.
    """
    try:
        reply = flow.send(None)
    except StopIteration:
        return
    reply.then(lambda _: start(flow))


def in_thread(work: Callable[[], T], post: Post, name: str, otherwise: T) -> Reply[T]:
    """Do blocking work in a new thread; return the reply for its result.

    The result is ``otherwise`` if the work fails, or if no thread can be started.
    """
    reply: Reply[T] = Reply()

    def run() -> None:
        try:
            found = work()
        except Exception:  # such as a process table that changes while it is read
            found = otherwise
        post(lambda: reply.arrive(found))

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        post(lambda: reply.arrive(otherwise))
    return reply


class Mailbox:
    """Calls by other threads, with a descriptor that becomes readable when one waits; only the loop uses sockets."""

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


TICK_SECONDS = 0.25
_MOST, _SECONDS = 100, 30.0
"""Maximum number of exceptions within this many seconds: a tick that always fails, four times a second, exceeds it."""


def serve(turn: Callable[[int], None], tick: Callable[[float], None], ended: Callable[[], bool]) -> None:
    """Run a main loop until it has ``ended``.

    ``turn`` reads what arrives within that many milliseconds; ``tick`` is called every ``TICK_SECONDS`` with
    ``time.monotonic``. Raises one of their exceptions after too many in a short time, so that another process takes
    over.
    """
    next_tick, since, count = time.monotonic(), 0.0, 0
    while not ended():
        now = time.monotonic()
        try:
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                turn(0)  # a tick judges: what arrived in time is read before
                tick(now)
            turn(max(0, int((next_tick - now) * 1000) + 1))
        except Exception:  # one bad message or file must not end the process
            traceback.print_exc(file=sys.stderr)
            since, count = (now, 1) if now - since > _SECONDS else (since, count + 1)
            if count > _MOST:
                raise
