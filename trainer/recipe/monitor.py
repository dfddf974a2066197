"""The recipe's reports to this rank's probe, or to nobody in a process that is not watched."""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

from ..probe import active
from ..probe.probe import Probe

SEND_SECONDS = 0.5  # minimum interval of an activity's progress reports


class Unwatched:
    """Null object in place of a ``Probe``: reports go nowhere, and nobody asks to stop."""

    rank = -1

    def phase(self, _name: str = "") -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    rehearsal = phase

    def stop_requested(self) -> bool:
        """Return False."""
        return False

    def stop_is_asked(self) -> bool:
        """Return False."""
        return False

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_UNWATCHED = cast(Probe, Unwatched())


def probe() -> Probe:
    """Return this process's probe; a null object if there is none, or once it has switched itself off."""
    return active.current() or _UNWATCHED


class Progress:
    """Progress of an activity; ``report`` is cheap and may be called often."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._text = ""
        self._begun = self._sent_at = time.monotonic()

    def report(self, done: int = 0, text: str = "") -> None:
        """Report the number of finished parts; sent at most twice a second."""
        if time.monotonic() - self._sent_at >= SEND_SECONDS:
            self.send(done, text)

    def send(self, done: int = 0, text: str = "", over: bool = False) -> None:
        """Report at once; an empty ``text`` keeps the previous one."""
        self._text = text or self._text
        if probe().rank == 0:
            self._sent_at = time.monotonic()
            probe().activity(self._name, self._text, done, self._total, over, self._sent_at - self._begun)


@contextmanager
def activity(name: str, text: str = "", total: int = 0) -> Generator[Progress]:
    """Report an activity besides the steps for the length of a ``with`` block; only rank 0 sends it.

    ``name`` is ``rehearsal``, ``evaluation``, ``checkpoint``, ``export``, ``data`` ...; ``total`` is the number of its
    parts, which the block may report as they finish (0: not known).
    """
    progress = Progress(name, total)
    progress.send(0, text)
    try:
        yield progress
    finally:
        progress.send(total, text, over=True)


def announce(name: str, text: str, log: Callable[[str], None]) -> None:
    """Log a line of rank 0 that a person should read at the start, and report it to whoever watches."""
    log(f"{name}: {text}")
    with activity(name, text):
        pass
