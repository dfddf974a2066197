"""Play, pause, speed and seek: the controls of a recording and of the past of a live run.

A transport has the figures to draw and turns keys into requests, which ``Playback`` executes in its own thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...protocol.messages.control import AlertKind, Severity

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Playing speeds, times real time."""

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
    """The controls' figures and keys. Figures are written by ``pump``, on the terminal's thread."""

    def __init__(self, mode: Mode, request: Callable[[Request], None]) -> None:
        self.mode: Mode = mode
        """``live``: at the live end; ``rewound``: in the past of a live run; ``replay``: in a recording."""
        self.playing = mode == "live"
        self.speed = 1.0
        self.position = 0.0
        """The displayed time, seconds since the epoch."""
        self.first = 0.0
        """The first time of the recording."""
        self.last = 0.0
        """The last time; grows while live."""
        self.marks: list[AlertMark] = []
        """All alerts of the recording, by time (of a live run: up to now)."""
        self.message = ""
        """Reason why the latest request had no effect (``no step 99999: the last is 812``); empty if it had one."""
        self.seeking = False
        """Whether a request is in progress."""
        self._request = request

    @property
    def at_end(self) -> bool:
        """Whether there is nothing after the position."""
        return self.position >= self.last

    def toggle(self) -> None:
        """Play or pause. Pausing a live view freezes it while the run continues; playing resumes from there."""
        self.pause() if self.playing else self.play()

    def play(self) -> None:
        """Play at the current speed; from the beginning if at a recording's end."""
        self._ask(Request("play"))

    def pause(self) -> None:
        """Pause the view at its position."""
        self._ask(Request("pause"))

    def faster(self) -> None:
        """Select the next higher speed, at most 64x."""
        self._ask(Request("faster", 1))

    def slower(self) -> None:
        """Select the next lower speed, at least 0.25x."""
        self._ask(Request("faster", -1))

    def step(self, count: int = 1) -> None:
        """Move ``count`` steps forward (back if negative), and pause there."""
        self._ask(Request("step", count))

    def skip(self, seconds: float) -> None:
        """Move seconds forward (back if negative), without pausing or resuming."""
        self._ask(Request("skip", seconds))

    def next_alert(self) -> None:
        """Move to the next alert, and pause there."""
        self._ask(Request("alert", 1))

    def previous_alert(self) -> None:
        """Move to the previous alert, and pause there."""
        self._ask(Request("alert", -1))

    def first_alert(self, kind: AlertKind | None = None) -> AlertMark | None:
        """Return the first alert of a kind, None: the first error, or without errors the first alert."""
        if kind is not None:
            return next((mark for mark in self.marks if mark.kind == kind), None)
        errors = (mark for mark in self.marks if mark.severity == "error")
        return next(errors, self.marks[0] if self.marks else None)

    def to_alert(self, alert_id: int) -> None:
        """Move to the moment when an alert was raised, and pause there."""
        self._ask(Request("mark", alert_id))

    def goto(self, text: str) -> None:
        """Move to a typed position: a step (``812``), a time (``12:03:10``), a jump (``+90s``) or a share (``50%``)."""
        self._ask(Request("goto", text=text))

    def live(self) -> None:
        """Return to the live end; no effect in a replay."""
        self._ask(Request("live"))

    def _ask(self, request: Request) -> None:
        self.message = ""
        self._request(request)
