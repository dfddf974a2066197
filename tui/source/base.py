"""The interface of sources of a run, live or replayed, for the screens.

A source receives frames in its own threads. The terminal's thread calls ``pump`` before it paints, which applies new
frames to ``model`` within a time budget. Thus only the drawing thread uses the model, and no lock is needed. ``model``
may be another object after a seek: read it from the source at every paint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Literal, Protocol

from ...protocol.messages.control import AlertKind, Severity, Verb
from ..model.oom import CommandRecord
from ..model.run import RunModel

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

Mode = Literal["live", "rewound", "replay"]

RequestKind = Literal["play", "pause", "faster", "step", "skip", "goto", "alert", "mark", "live", "overview"]
"""``mark``: to the alert with that id. ``overview`` is sent by the playback itself: older history was read."""


def next_speed(speed: float, *, up: bool) -> float:
    """Return the next higher or lower playing speed; unchanged at the limits."""
    if up:
        return next((each for each in SPEEDS if each > speed), SPEEDS[-1])
    return next((each for each in reversed(SPEEDS) if each < speed), SPEEDS[0])


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request to the transport; the use of ``number`` and ``text`` depends on the kind."""

    kind: RequestKind
    number: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class AlertMark:
    """An alert on the scrubber."""

    time: float
    severity: Severity
    kind: AlertKind
    alert_id: int
    title: str


class Transport:
    """The controls of a recording and of the past of a live run: play, pause, speed and seek.

    It has the figures to draw, which ``pump`` writes on the terminal's thread, and turns keys into requests, which
    ``Playback`` executes in its own thread.
    """

    def __init__(self, mode: Mode, request: Callable[[Request], None]) -> None:
        self.mode: Mode = mode
        """``live``: at the live end; ``rewound``: in the past of a live run; ``replay``: in a recording."""
        self.playing = mode == "live"
        self.speed = 1.0
        self.position = 0.0
        self.first = 0.0
        self.last = 0.0  # the last time; grows while live
        self.marks: list[AlertMark] = []  # all alerts of the recording, by time (of a live run: up to now)
        self.message = ""
        """Reason why the latest request had no effect (``no step 99999: the last is 812``); empty if it had one."""
        self.seeking = False
        self._request = request

    @property
    def at_end(self) -> bool:
        """Whether there is nothing after the position."""
        return self.position >= self.last

    def _ask(self, kind: RequestKind, number: float = 0.0, text: str = "") -> None:
        self.message = ""
        self._request(Request(kind, number, text))

    play = partialmethod(_ask, "play")  # at the current speed; from the beginning if at a recording's end
    pause = partialmethod(_ask, "pause")  # the view at its position
    faster = partialmethod(_ask, "faster", 1)  # select the next higher speed, at most 64x
    slower = partialmethod(_ask, "faster", -1)  # select the next lower speed, at least 0.25x
    skip = partialmethod(_ask, "skip")  # move seconds forward (back if negative), without pausing or resuming
    next_alert = partialmethod(_ask, "alert", 1)  # move to the next alert, and pause there
    previous_alert = partialmethod(_ask, "alert", -1)  # move to the previous alert, and pause there
    to_alert = partialmethod(_ask, "mark")  # move to the moment when an alert (its id) was raised, and pause there
    live = partialmethod(_ask, "live")  # return to the live end; no effect in a replay

    def toggle(self) -> None:
        """Play or pause. Pausing a live view freezes it while the run continues; playing resumes from there."""
        self.pause() if self.playing else self.play()

    def step(self, count: int = 1) -> None:
        """Move ``count`` steps forward (back if negative), and pause there."""
        self._ask("step", count)

    def goto(self, text: str) -> None:
        """Move to a typed position: a step (``812``), a time (``12:03:10``), a jump (``+90s``) or a share (``50%``)."""
        self._ask("goto", text=text)

    def first_alert(self, kind: AlertKind | None = None) -> AlertMark | None:
        """Return the first alert of a kind, None: the first error, or without errors the first alert."""
        if kind is not None:
            return next((mark for mark in self.marks if mark.kind == kind), None)
        errors = (mark for mark in self.marks if mark.severity == "error")
        return next(errors, self.marks[0] if self.marks else None)


ConnectionState = Literal["connecting", "live", "hub-gone", "ended", "replay"]
"""``hub-gone``: the ranks continue unwatched, and a new hub is awaited. ``ended``: the run is over, and its recording
is shown. ``replay``: a recording was opened.
"""


@dataclass(frozen=True, slots=True)
class Connection:
    """State of a source's connection to its run."""

    state: ConnectionState
    text: str = ""
    since: float = 0.0
    lost: int = 0  # number of frames missed here that are not in the recording either (heartbeats never are)


class Source(Protocol):
    """A live or replayed run; the screens do not distinguish them."""

    transport: Transport  # play, pause, seek; the scrubber's figures
    commands: dict[str, CommandRecord]  # commands sent from here, by id, oldest first
    folder: Path | None  # the run's directory if it is on this host, so that its files can be opened; else None

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
