"""A running run as a source: its live end and, with the same controls, its past."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from ...protocol.errors import FtmonError
from ...protocol.messages.control import Accepted, Result
from ...protocol.messages.verbs import Verb
from ...protocol.run.rundir import RunDir
from ..model.run import RunInfo, RunModel
from .base import CommandRecord, Connection
from .endpoint import Endpoint
from .feed import Arrival, Feed
from .history import History
from .load import adopt
from .playback import Playback
from .remote import RemoteReader
from .seek import marks
from .transport import Request, Transport

ANSWER_S = 10.0
"""Seconds after which a command that the hub has not accepted counts as failed."""


class LiveSource:
    """Follows a run.

    Live messages are applied continuously, also while the past is shown, so that returning to the end is immediate.

    Args:
        run: the run's directory on this host; or
        addresses: the hub's channels (``sockets.CHANNELS``), when it is elsewhere; or
        endpoint: another way to locate the hub.
        info: information about the run, if there is no directory.
    """

    def __init__(
        self,
        run: RunDir | None = None,
        addresses: Mapping[str, str] | None = None,
        *,
        endpoint: Endpoint | None = None,
        info: RunInfo | None = None,
    ) -> None:
        self._endpoint = endpoint or Endpoint(run, addresses)
        self.folder = run.path if run is not None else None
        self._context: zmq.Context[Any] = zmq.Context()
        self._live = RunModel(info or _info(run))
        self._feed = Feed(self._context, self._endpoint, info or _info(run))
        self.transport = Transport("live", self._request)
        self._playback: Playback | None = None
        self.connection = Connection("connecting", "waiting for the run's hub", time.time())
        self.commands: dict[str, CommandRecord] = {}
        self._showing: Arrival | None = None
        self._marks_version = -1
        self._closed = False

    @property
    def model(self) -> RunModel:
        return self._live if self._playback is None else self._playback.model

    @property
    def live_model(self) -> RunModel:
        """The state at the live end, also while rewound."""
        return self._live

    @property
    def can_command(self) -> bool:
        hub = self._feed.hub
        return hub is not None and not hub.read_only

    def start(self) -> None:
        self._feed.start()

    def pump(self, budget_s: float = 0.05) -> bool:
        deadline = time.monotonic() + budget_s
        changed = False
        arrivals = self._feed.arrivals
        while self._showing is not None or arrivals:
            arrival = self._showing = self._showing or arrivals.popleft()
            changed = True
            self._apply_arrival(arrival)
            if not self._apply_frames(arrival, deadline):
                break
            self._showing = None
            if time.monotonic() > deadline:
                break
        changed = self._settle_commands() or changed
        if self._playback is not None:
            changed = self._playback.pump(max(0.005, deadline - time.monotonic())) or changed
            if self._playback.reached_live or self._playback.error:
                self.transport.message = self._playback.error
                self._to_live()
        self._update_transport()
        return changed

    def send(self, verb: Verb) -> str:
        command = verb.command(secrets.token_hex(8))
        self.commands[command.id] = CommandRecord(command.id, verb, time.time())
        self._feed.send(command)
        return command.id

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._playback is not None:
            self._playback.close()
        self._feed.close()
        # Ends once every thread has closed its sockets; a thread that waits for a hub does so within a second.
        ending = threading.Thread(target=self._context.term, name="sockets", daemon=True)
        ending.start()
        ending.join(timeout=2)

    def _apply_arrival(self, arrival: Arrival) -> None:
        if arrival.model is not None:
            self._live, arrival.model = arrival.model, None
        if arrival.overview is not None:
            adopt(self._live, arrival.overview)
            arrival.overview = None
        if arrival.connection is not None:
            self.connection = arrival.connection
        answer = arrival.answer
        record = self.commands.get(answer.id) if answer is not None else None
        if record is not None and isinstance(answer, Accepted):
            record.accepted = answer
        elif record is not None and isinstance(answer, Result):
            record.result = answer

    def _apply_frames(self, arrival: Arrival, deadline: float) -> bool:
        """Fold the frames of an arrival; False if time ran out and frames are left in it."""
        for done, frame in enumerate(arrival.frames, 1):
            self._live.apply(frame)
            message = frame.message
            if isinstance(message, Result) and message.id in self.commands:
                self.commands[message.id].result = message
            if done % 64 == 0 and time.monotonic() > deadline:
                del arrival.frames[:done]
                return False
        return True

    def _settle_commands(self) -> bool:
        """Fail commands that were not accepted in time."""
        now = time.time()
        changed = False
        for record in self.commands.values():
            if record.accepted is None and record.result is None and now - record.sent > ANSWER_S:
                record.accepted = Accepted(record.id, False, f"the hub gave no answer in {ANSWER_S:.0f} s")
                changed = True
        return changed

    def _update_transport(self) -> None:
        transport, live = self.transport, self._live
        if self.connection.state in ("live", "hub-gone") and not live.ended:
            live.tick(time.time())
        transport.last = max(live.now, live.last_t)
        if not transport.first or live.first_t < transport.first:
            transport.first = live.first_t
        if self._playback is None:
            transport.mode, transport.playing, transport.speed = "live", not live.ended, 1.0
            transport.position = transport.last
        if self._marks_version != live.alerts.version:
            self._marks_version = live.alerts.version
            transport.marks = marks(live.alerts)

    def _request(self, request: Request) -> None:
        """Execute a request of the transport; all except ``play`` leave the live end."""
        if request.kind == "live":
            self._to_live()
            return
        if self._playback is None:
            ended = self.connection.state == "ended"
            forward = request.kind in ("step", "skip", "alert") and request.number > 0
            if forward or (request.kind in ("play", "faster") and not ended):
                self.transport.message = "this is the live end"
                return
            self.transport.mode = "rewound"
            self._playback = Playback(
                self._open_history,
                self._live.info,
                self.transport,
                start=self.transport.position,
                live_end=None if ended else lambda: self._live.last_t,
                model=self._live,
            )
            self._playback.request(request)  # before the thread starts, so that it seeks once and not twice
            self._playback.start()
            return
        self._playback.request(request)

    def _to_live(self) -> None:
        playback, self._playback = self._playback, None
        if playback is not None:
            playback.close(wait=False)

    def _open_history(self, cancelled: Callable[[], bool]) -> History:
        hub = self._feed.hub
        if hub is None:
            return self._endpoint.open_recording()
        return RemoteReader(self._context, hub.addresses["query"], cancelled=cancelled)


def _info(run: RunDir | None) -> RunInfo:
    """Return the run's information from its directory."""
    if run is None:
        return RunInfo()
    try:
        content = run.read_run()
    except FtmonError:
        return RunInfo(id=run.id, name=run.id)
    return RunInfo(content.id, content.name, content.kind, content.command, content.created, content.host)
