"""The interface of sources of a run, live or replayed, for the screens.

A source has threads of its own that gather frames. The terminal's thread calls ``pump`` before it paints: that applies
new frames to ``model`` within a time budget. So the model is only ever touched by the thread that draws it, and needs
no lock. ``model`` may be another object after a seek: take it from the source at every paint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ...protocol.control import Accepted, Result
from ...protocol.verbs import Verb
from ..model.run import RunModel
from .transport import Transport

ConnectionState = Literal["connecting", "live", "hub-gone", "ended", "replay"]
"""``hub-gone``: the ranks train on unobserved; a new hub is awaited. ``ended``: the run is over, and its recording is
shown. ``replay``: a recording was opened.
"""


@dataclass(frozen=True, slots=True)
class Connection:
    """How a source stands with its run."""

    state: ConnectionState
    text: str = ""
    """One line for a person: what is the matter, or empty."""
    since: float = 0.0
    lost: int = 0
    """Frames of the stream that were missed here and are not in the recording either (heartbeats never are)."""


@dataclass(slots=True)
class CommandRecord:
    """A command that was sent, and its two answers as they come."""

    id: str
    verb: Verb
    sent: float = 0.0
    accepted: Accepted | None = None
    result: Result | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come: it was refused, or there is a result."""
        return self.result is not None or (self.accepted is not None and not self.accepted.ok)


class Source(Protocol):
    """Live or replayed, the same to the screens."""

    @property
    def model(self) -> RunModel:
        """The state to draw; another object after a seek."""
        ...

    @property
    def transport(self) -> Transport:
        """Play, pause, seek; the scrubber's figures."""
        ...

    @property
    def connection(self) -> Connection:
        """How things stand with the run."""
        ...

    @property
    def commands(self) -> dict[str, CommandRecord]:
        """Commands sent from here, by id, oldest first."""
        ...

    @property
    def folder(self) -> Path | None:
        """The run's directory, where it is on this host: what lies in it can be opened."""
        ...

    @property
    def can_command(self) -> bool:
        """Whether there is a hub to send commands to (never in a replay)."""
        ...

    def start(self) -> None:
        """Begin to gather; call once."""
        ...

    def pump(self, budget_s: float = 0.05) -> bool:
        """Apply new frames to the model, for at most ``budget_s``; True when something changed."""
        ...

    def send(self, verb: Verb) -> str:
        """Send a command to the hub and return its id; its answers appear in ``commands``.

        Where there is no hub the record is refused at once, in words.
        """
        ...

    def close(self) -> None:
        """End the threads and close what is open; safe to call twice."""
        ...
