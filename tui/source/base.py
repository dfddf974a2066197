"""The interface of sources of a run, live or replayed, for the screens.

A source receives frames in its own threads. The terminal's thread calls ``pump`` before it paints, which applies new
frames to ``model`` within a time budget. Thus only the drawing thread uses the model, and no lock is needed. ``model``
may be another object after a seek: read it from the source at every paint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ...protocol.messages.control import Accepted, Result
from ...protocol.messages.verbs import Verb
from ..model.run import RunModel
from .transport import Transport

ConnectionState = Literal["connecting", "live", "hub-gone", "ended", "replay"]
"""``hub-gone``: the ranks continue unwatched, and a new hub is awaited. ``ended``: the run is over, and its recording
is shown. ``replay``: a recording was opened.
"""


@dataclass(frozen=True, slots=True)
class Connection:
    """State of a source's connection to its run."""

    state: ConnectionState
    text: str = ""
    """A problem in one line, or empty."""
    since: float = 0.0
    lost: int = 0
    """Number of frames missed here that are not in the recording either (heartbeats never are)."""


@dataclass(slots=True)
class CommandRecord:
    """A sent command and its two answers, once received."""

    id: str
    verb: Verb
    sent: float = 0.0
    accepted: Accepted | None = None
    result: Result | None = None

    @property
    def done(self) -> bool:
        """Whether it is complete: it was refused, or its result was received."""
        return self.result is not None or (self.accepted is not None and not self.accepted.ok)


class Source(Protocol):
    """A live or replayed run; the screens do not distinguish them."""

    transport: Transport
    """Play, pause, seek; the scrubber's figures."""
    commands: dict[str, CommandRecord]
    """Commands sent from here, by id, oldest first."""
    folder: Path | None
    """The run's directory if it is on this host, so that its files can be opened; else None."""

    @property
    def model(self) -> RunModel:
        """The state to draw; another object after a seek."""
        ...

    @property
    def connection(self) -> Connection:
        """State of the connection to the run."""
        ...

    @property
    def can_command(self) -> bool:
        """Whether there is a hub to send commands to (never in a replay)."""
        ...

    def start(self) -> None:
        """Start to receive; call once."""
        ...

    def pump(self, budget_s: float = 0.05) -> bool:
        """Apply new frames to the model, for at most ``budget_s``; True when something changed."""
        ...

    def send(self, verb: Verb) -> str:
        """Send a command to the hub and return its id; its answers appear in ``commands``.

        Without a hub the record is refused at once, with the reason.
        """
        ...

    def close(self) -> None:
        """End the threads and close what is open; safe to call twice."""
        ...
