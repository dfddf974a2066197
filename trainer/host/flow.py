"""Coroutines of a main loop (the hub's, an agent's) that wait for replies, without a second loop.

A coroutine runs until it awaits a ``Reply``, and resumes in the call that sets the reply: an answer of a rank
(``RankLink``) or the end of a thread's work (``in_thread``). The main loop makes these calls, so no lock is needed, and
telemetry is received in between.
"""

import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Flow = Coroutine["Reply[Any]", None, T]
"""A coroutine that awaits replies, and other flows."""
Post = Callable[[Callable[[], object]], None]
"""Schedules a call in the main loop; any thread."""


class Reply(Generic[T]):
    """A value that is set once. Main loop only. Either one coroutine awaits it, or one function is called with it."""

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
        """Wait for the value, and return it."""
        if not self._arrived:
            yield self
        return self._value


def start(flow: Flow[object]) -> None:
    """Run a coroutine until it first waits; the rest runs as its replies arrive.

    Raises:
        Exception: raised by the coroutine before it first waits; later ones are raised in the call that sets the reply.
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
