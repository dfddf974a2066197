"""A running run as a source: its live end and, with the same controls, its past."""

import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from ...protocol.errors import FtmonError, ProtocolError
from ...protocol.link.sockets import peer_socket
from ...protocol.messages import wire
from ...protocol.messages.control import Accepted, Command, HubStats, Result, Verb
from ...protocol.messages.wire import RESTART_LEAP, Frame, is_leap
from ...protocol.run.rundir import RunDir
from ..model.oom import CommandRecord
from ..model.run import RunInfo, RunModel
from .base import Connection, ConnectionState, Request, Transport
from .load import TAIL_FRAMES, Endpoint, History, Hub, Overview, adopt, load, read_overview
from .replay import Playback, marks
from .ssh import RemoteReader

_CHECK_S = 0.5
_SILENCE_S = 15.0  # seconds of silence after which a hub counts as gone, if its process cannot be checked
_FETCH = 2000
_MAX_FETCHED = 40_000  # a gap of more frames is not fetched: the state is reloaded
_GONE = "the hub is gone; the ranks train on, and a new hub is awaited"
_MAX_BATCH = 500
_MOST_WAITING = 40
"""Maximum number of batches not yet folded. Further messages stay in ZeroMQ's queue; if it overflows, the gap is
fetched or the state reloaded."""
_PAUSE_S = 0.02
_CONNECT_MS = 5000


@dataclass(slots=True)
class Arrival:
    """A batch that the feed passes to the screen's thread."""

    frames: list[Frame] = field(default_factory=list[Frame])
    model: RunModel | None = None
    overview: Overview | None = None
    connection: Connection | None = None
    answer: Accepted | Result | None = None


class Feed(threading.Thread):
    """Receives a live run's frames into ``arrivals``: subscribes, fetches missing frames, reconnects to a new hub.

    Joining: subscribe first, then query the recorded state. The hub commits before it answers, so everything published
    before the query is in the answer, and everything after it in the subscription; the model drops duplicates. Gaps in
    the numbering (before the subscription takes effect, or after a queue overflow) are fetched with queries.
    """

    def __init__(self, context: "zmq.Context[Any]", endpoint: Endpoint, info: RunInfo) -> None:
        super().__init__(name="feed", daemon=True)
        self.arrivals: deque[Arrival] = deque()
        self.hub: Hub | None = None
        self._context = context
        self._endpoint = endpoint
        self._info = info
        self._closing = threading.Event()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._last_seq = 0
        self._joined = False
        self._reported: tuple[ConnectionState, str, int] | None = None
        self._lost = 0
        self._unrecorded = False  # whether the hub last reported that it could not record
        self._pooled = False  # whether only a part of the stream was loaded, so that older history must be read pooled

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._closing.set()
        self._nudge()
        if self.is_alive():
            self.join(timeout=5)

    def send(self, command: Command) -> None:
        """Send a command to the hub; its answers are arrivals. Any thread."""
        self._commands.put(command)
        self._nudge()

    def run(self) -> None:
        """Follow the run, also across hub restarts, until it is over or the source is closed."""
        try:
            self._follow_all()
        except Exception as error:  # otherwise the thread would end unnoticed: the screen must show the error
            if not self._closing.is_set():
                self._report("hub-gone", f"the run cannot be followed any more: {type(error).__name__}: {error}")

    def _follow_all(self) -> None:
        self._report("connecting", "waiting for the run's hub")
        while not self._closing.is_set():
            hub = self._endpoint.hub()
            if hub is not None:
                self._follow(hub)
            elif self._endpoint.ended():
                self._finish()
                return
            elif self._joined:
                self._report_gone(self._endpoint.trouble or _GONE)
            self._refuse_commands()
            self._closing.wait(_CHECK_S)

    def _nudge(self) -> None:
        with suppress(OSError):
            self._wake.send(b"!")

    def _report(self, state: ConnectionState, text: str = "") -> None:
        if (state, text, self._lost) != self._reported:
            self._reported = (state, text, self._lost)
            self.arrivals.append(Arrival(connection=Connection(state, text, time.time(), self._lost)))

    def _report_gone(self, text: str) -> None:
        self.hub = None
        if not self._closing.is_set() and not self._endpoint.ended():
            self._report("hub-gone" if self._joined else "connecting", text)

    def _follow(self, hub: Hub) -> None:
        stream = peer_socket(self._context, "stream")
        control = peer_socket(self._context, "control")
        # A kill command for a hub that is gone must not be queued and reach the next one.
        control.setsockopt(zmq.IMMEDIATE, 1)
        history = self._reader(hub)
        try:
            stream.connect(hub.addresses["stream"])
            control.connect(hub.addresses["control"])
            self._join(history)
            self.hub = hub
            self._report("live")
            self._read_older(hub)
            self._listen(hub, stream, control, history)
        except FtmonError as error:
            self._report_gone(str(error))
        finally:
            self.hub = None
            for each in (stream, control, history):
                each.close()

    def _reader(self, hub: Hub) -> RemoteReader:
        return RemoteReader(self._context, hub.addresses["query"], cancelled=lambda: self._is_over(hub))

    def _is_over(self, hub: Hub) -> bool:
        return self._closing.is_set() or not self._endpoint.is_alive(hub)

    def _join(self, history: History) -> None:
        """Load the run's recorded state, or only the new part if a hub was followed before."""
        if self._joined:
            self._fetch(history, None)
        else:
            self._load(history)
            self._joined = True

    def _load(self, history: History) -> None:
        info = history.info()
        model = load(history, info.last_t, self._info)
        self._pooled = info.last_seq > TAIL_FRAMES
        self._last_seq = max(model.last_seq, info.last_seq)
        self.arrivals.append(Arrival(model=model))
        if self.hub is not None:  # reloaded after a long gap
            self._read_older(self.hub)

    def _read_older(self, hub: Hub) -> None:
        if not self._pooled:
            return

        def read() -> None:
            # After an error the next hub is asked again; without it only older history is missing from the graphs.
            with suppress(FtmonError), closing(self._reader(hub)) as history:
                overview = read_overview(history, history.info(), lambda: self._is_over(hub))
                self.arrivals.append(Arrival(overview=overview))

        threading.Thread(target=read, name="overview", daemon=True).start()

    def _listen(self, hub: Hub, stream: "zmq.Socket[Any]", control: "zmq.Socket[Any]", history: History) -> None:
        poller = zmq.Poller()
        for each in (stream, control, self._woken):
            poller.register(each, zmq.POLLIN)
        checked = received = time.monotonic()
        while not self._closing.is_set():
            ready = dict(poller.poll(round(_CHECK_S * 1000)))
            now = time.monotonic()
            if stream in ready:
                received = now
                if len(self.arrivals) < _MOST_WAITING:
                    self._receive(stream, history)
                else:
                    self._closing.wait(_PAUSE_S)
            if control in ready:
                self._receive_answer(control)
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                self._send_commands(control)
            if now - checked > _CHECK_S:
                checked = now
                silent = not self._endpoint.local and now - received > _SILENCE_S
                if silent or not self._endpoint.is_alive(hub):
                    while stream.poll(0):  # the last messages of the hub
                        self._receive(stream, history)
                    self._report_gone(self._endpoint.trouble or _GONE)
                    return

    def _receive(self, stream: "zmq.Socket[Any]", history: History) -> None:
        frames: list[Frame] = []
        while len(frames) < _MAX_BATCH:
            try:
                parts = stream.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) != 2:
                continue
            header = wire.decode_header(parts[0])
            if header.seq <= self._last_seq:
                continue
            missed = header.seq - self._last_seq - 1
            if missed:
                self._flush(frames)
                frames = []
                self._fill(history, self._last_seq, header.seq, missed)
            # Advance only after the gap is filled, so that the next hub can be queried if this one dies.
            self._last_seq = max(self._last_seq, header.seq)
            try:
                message = wire.decode_body(parts[1])
            except ProtocolError:
                continue  # one damaged message does not end the view of a run
            if message is not None:
                frames.append(Frame(header.seq, header.t, message))
        self._flush(frames)

    def _flush(self, frames: list[Frame]) -> None:
        if frames:
            self.arrivals.append(Arrival(frames=frames))
        for frame in frames:
            if isinstance(frame.message, HubStats):
                self._unrecorded = bool(frame.message.recording_error)

    def _fill(self, history: History, after: int, before: int, missed: int) -> None:
        missed = max(0, missed - RESTART_LEAP) if is_leap(missed) else missed
        if missed > _MAX_FETCHED:
            self._load(history)
            return
        unrecorded = self._unrecorded
        left = missed - self._fetch(history, before, after)
        # The only frames missing from a recording are heartbeats, which are not needed later.
        if left > 0 and (unrecorded or self._unrecorded):
            self._lost += left
            self._report("live")

    def _fetch(self, history: History, before: int | None, after: int | None = None) -> int:
        last = self._last_seq if after is None else after
        count = 0
        while frames := history.frames(last, _FETCH):
            last = frames[-1].seq
            wanted = frames if before is None else [frame for frame in frames if frame.seq < before]
            count += len(wanted)
            self._flush(wanted)
            if before is None:
                self._last_seq = last
            elif last >= before:
                break
            if count > _MAX_FETCHED:  # loading the present state is faster than folding all frames before it
                self._load(history)
                break
        return count

    def _send_commands(self, control: "zmq.Socket[Any]") -> None:
        while not self._commands.empty():
            command = self._commands.get()
            try:
                control.poll(_CONNECT_MS, zmq.POLLOUT)
                control.send_multipart(wire.encode("app", 0, time.time(), command), zmq.NOBLOCK)
            except zmq.ZMQError:
                self._refuse(command)

    def _receive_answer(self, control: "zmq.Socket[Any]") -> None:
        answer = wire.decode_answer(control.recv_multipart())
        if isinstance(answer, Accepted | Result):
            self.arrivals.append(Arrival(answer=answer))

    def _refuse_commands(self) -> None:
        while not self._commands.empty():
            self._refuse(self._commands.get())

    def _refuse(self, command: Command) -> None:
        text = "the hub is gone: commands fail until a new hub starts; retry in a few seconds"
        self.arrivals.append(Arrival(answer=Accepted(command.id, False, text)))

    def _finish(self) -> None:
        """Complete the shown state from the recording after the run and its hub have ended."""
        text = ""
        try:
            with closing(self._endpoint.open_recording()) as history:
                self._join(history)
                if self._pooled:
                    overview = read_overview(history, history.info(), self._closing.is_set)
                    self.arrivals.append(Arrival(overview=overview))
        except FtmonError as error:
            text = str(error)
        self._refuse_commands()
        self._report("ended", text)
        while not self._closing.wait(_CHECK_S):
            self._refuse_commands()


ANSWER_S = 10.0  # seconds after which a command that the hub has not accepted counts as failed


class LiveSource:
    """Follows a run.

    Live messages are applied continuously, also while the past is shown, so that returning to the end is immediate.
    The hub is found by the run's directory on this host, by ``addresses`` of its channels (``sockets.CHANNELS``), or by
    another ``endpoint``; ``info`` describes the run if there is no directory.
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
            if self._apply_frames(arrival, deadline):
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
        else:
            self._playback.request(request)

    def _to_live(self) -> None:
        if self._playback is not None:
            self._playback.close(wait=False)
        self._playback = None

    def _open_history(self, cancelled: Callable[[], bool]) -> History:
        hub = self._feed.hub
        if hub is None:
            return self._endpoint.open_recording()
        return RemoteReader(self._context, hub.addresses["query"], cancelled=cancelled)


def _info(run: RunDir | None) -> RunInfo:
    if run is None:
        return RunInfo()
    try:
        return RunInfo.of(run.read_run())
    except FtmonError:
        return RunInfo(id=run.id, name=run.id)
