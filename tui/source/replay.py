"""A recorded run as a source."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from ...protocol.messages.control import Accepted
from ...protocol.messages.telemetry import Hello, Step
from ...protocol.messages.verbs import Verb
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import RecordingInfo
from ..model.run import RunModel
from .base import CommandRecord, Connection
from .load import describe
from .playback import Playback
from .transport import Request, Transport

AT_ITS_END = "this run failed: its end is shown; N: alert before, space: play from the start"
"""Shown when a replay begins at a run's end."""

_LOOKED_AT = 64
"""Messages per read when searching for the first ranks' messages."""

_TOGETHER_S = 1.0
"""Ranks whose first messages are within this of each other started together."""


def first_ranks_time(reader: Reader, info: RecordingInfo) -> float:
    """Return the time by which the first ranks had all sent messages; without any, the beginning of the recording."""
    after, found = 0, 0.0
    while info.ranks and (frames := reader.frames(after, _LOOKED_AT)):
        for frame in frames:
            if found and frame.t > found + _TOGETHER_S:
                return found
            if isinstance(frame.message, Hello):
                found = frame.t
            elif isinstance(frame.message, Step):
                return found or frame.t
        after = frames[-1].seq
    return found or info.first_t


def begin_of(reader: Reader, info: RecordingInfo) -> float:
    """Return the time at which a replay begins: the end of a run that failed, else when its first ranks reported."""
    return info.last_t if ended_badly(info) else first_ranks_time(reader, info)


def ended_badly(info: RecordingInfo) -> bool:
    """Return whether a recorded run failed, or ended with unresolved errors."""
    return info.state == "failed" or bool(info.open_errors and not info.live)


class ReplaySource:
    """Plays a recording.

    Args:
        path: the recording file.
        start: start position, seconds since the epoch; None for the end of a run that failed, else for the first ranks'
            first messages (nothing is shown before them; seeking to the beginning remains possible).
        at_end: start at its end instead.
        play: start playing at once.

    Raises:
        RecordingError: the file is missing, or is not a recording this version can read.
    """

    can_command: bool = False

    def __init__(
        self, path: str | os.PathLike[str], *, start: float | None = None, at_end: bool = False, play: bool = False
    ) -> None:
        self._path = Path(path)
        self.folder: Path | None = self._path.parent
        reader = Reader(self._path)
        try:
            info = reader.info()
            begin = begin_of(reader, info) if start is None and not at_end else info.last_t
        finally:
            reader.close()
        self.transport = Transport("replay", self._request)
        self.transport.first, self.transport.last = info.first_t, info.last_t
        self.transport.position = begin if start is None else start
        if start is None and not at_end and ended_badly(info):
            self.transport.message = AT_ITS_END
        self._readers: list[Reader] = []
        self._playback = Playback(self._open, describe(info), self.transport, self.transport.position)
        self._play = play
        self.commands: dict[str, CommandRecord] = {}
        self._since = time.time()
        self._missing = info.missing

    @property
    def model(self) -> RunModel:
        return self._playback.model

    @property
    def connection(self) -> Connection:
        left_out = next((reader.left_out for reader in self._readers if reader.left_out), "")
        return Connection("replay", self._playback.error or self._missing or left_out, self._since)

    def start(self) -> None:
        self._playback.start()
        if self._play:
            self.transport.play()

    def pump(self, budget_s: float = 0.05) -> bool:
        return self._playback.pump(budget_s)

    def send(self, verb: Verb) -> str:
        number = f"replay-{len(self.commands) + 1}"
        refusal = Accepted(number, False, "this is a recording: there is nothing to act on")
        self.commands[number] = CommandRecord(number, verb, time.time(), refusal)
        return number

    def close(self) -> None:
        self._playback.close()

    def _open(self, _cancelled: Callable[[], bool]) -> Reader:
        reader = Reader(self._path)
        self._readers.append(reader)
        return reader

    def _request(self, request: Request) -> None:
        if request.kind != "live":
            self._playback.request(request)
