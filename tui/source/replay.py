"""A recorded run as a source: a thread reads ahead of the screen, and plays, seeks and steps on request."""

import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from ...protocol.errors import FtmonError, UsageError
from ...protocol.messages.control import Accepted, Alert, Verb
from ...protocol.messages.telemetry import Hello, Step
from ...protocol.messages.wire import Frame
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import RecordingInfo
from ..model.oom import CommandRecord
from ..model.run import RunInfo, RunModel
from .base import AlertMark, Connection, Request, Transport, next_speed
from .load import History, Overview, adopt, describe, load, read_overview

_LATEST_S = 60.0  # maximum seconds between an alert's own time and its first message
_FIRST_BATCH = 128  # frames searched at first; most alerts are raised within a second
_BATCH = 2048


def marks(alerts: Iterable[Alert]) -> list[AlertMark]:
    """Return the marks of alerts, by time."""
    found = [AlertMark(each.time, each.severity, each.kind, each.id, each.title) for each in alerts]
    return sorted(found, key=lambda mark: (mark.time, mark.alert_id))


def alert_time(history: History, mark: AlertMark) -> float:
    """Return the hub time of an alert's first message, which is later than the alert's own time."""
    after = max(history.seq_at(mark.time) - 1, 0)
    batch = _FIRST_BATCH
    while frames := history.frames(after, batch, mark.time + _LATEST_S):
        for frame in frames:
            if isinstance(frame.message, Alert) and frame.message.id == mark.alert_id:
                return frame.t
        after = frames[-1].seq
        batch = min(2 * batch, _BATCH)
    return mark.time


_STEP = re.compile(r"(?:step|#)?\s*(\d[\d,_]*)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_CLOCK = re.compile(r"(?:(\d{4})-(\d{1,2})-(\d{1,2})[ T])?(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?")
_JUMP = re.compile(r"([+-])((?:\d+(?:\.\d+)?[dhms]?\s*)+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

FIX = "type 812, 12:03:10, -2m or 50%"


@dataclass(frozen=True, slots=True)
class Position:
    """A position to seek to: a step, or a time in seconds since the epoch."""

    step: int | None = None
    time: float = 0.0


def parse(text: str, position: float, first: float, last: float) -> Position:
    """Parse a position from the "go to" dialog; ``position``, ``first``, ``last``: seconds since the epoch.

    ``step 812`` and ``#812`` are steps too. A time of day is local, on the day within the recording (``first`` to
    ``last``) that is nearest to the displayed ``position``. Raises ``UsageError``, which lists the forms, for another
    one.
    """
    typed = text.strip().lower()
    if step := _STEP.fullmatch(typed):
        return Position(step=int(re.sub("[,_]", "", step[1])))
    if share := _SHARE.fullmatch(typed):
        return Position(time=first + (last - first) * min(float(share[1]), 100.0) / 100.0)
    if jump := _JUMP.fullmatch(typed):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(jump[2]))
        at = position + (seconds if jump[1] == "+" else -seconds)
    elif clock := _CLOCK.fullmatch(text.strip()):
        at = _time_of_day(clock, text, position, first, last)
    else:
        raise UsageError(f"cannot go to {text!r}: {FIX}")
    return Position(time=min(max(at, first), last))


def _time_of_day(clock: re.Match[str], text: str, position: float, first: float, last: float) -> float:
    year, month, day, hour, minute, second = clock.groups()
    base = datetime.fromtimestamp(position)
    try:
        whole = float(second or 0)
        if year:
            base = datetime(int(year), int(month), int(day))
        at = base.replace(hour=int(hour), minute=int(minute), second=int(whole), microsecond=round(whole % 1 * 1e6))
    except ValueError:
        raise UsageError(f"cannot go to {text!r}: there is no such time; {FIX}") from None
    if year:
        return at.timestamp()
    days = [(at + timedelta(days=offset)).timestamp() for offset in (0, -1, 1)]
    inside = [candidate for candidate in days if first <= candidate <= last]
    return min(inside or days, key=lambda candidate: abs(candidate - position))


TICK_S = 0.1
MAX_FRAMES = 3000  # playing over more frames at once becomes a seek, because the screen could not fold them in time
SEEK_FRAMES = 1000  # a move over more frames becomes a seek, which is faster than reading and folding them
_MAX_WAITING = 4  # maximum number of batches not yet folded by the screen; then playing waits


@dataclass(slots=True)
class _Update:
    model: RunModel | None = None
    frames: list[Frame] = field(default_factory=list[Frame])
    overview: Overview | None = None
    marks: list[AlertMark] | None = None
    span: tuple[float, float] | None = None
    message: str | None = None
    ended_live: bool = False
    position: float = 0.0
    playing: bool = False
    speed: float = 1.0
    handled: int = 0


class Playback:
    """Plays a history into a model.

    ``open_history`` is called in the thread that uses the history; its argument returns True once the result is no
    longer needed. Requests of ``transport`` are passed to ``request``. ``start``: seconds since the epoch; None for the
    beginning. ``live_end``: for the past of a live run, the time of the live end; playing ends there (see
    ``reached_live``). ``model`` is shown until something was read.
    """

    def __init__(
        self,
        open_history: Callable[[Callable[[], bool]], History],
        info: RunInfo,
        transport: Transport,
        start: float | None = None,
        live_end: Callable[[], float] | None = None,
        model: RunModel | None = None,
    ) -> None:
        self.model = model or RunModel(info)
        self.reached_live = False  # whether a live run's past was played up to the live end
        self.error = ""
        self._open = open_history
        self._info = info
        self._transport = transport
        self._live_end = live_end
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._updates: deque[_Update] = deque()
        self._showing: _Update | None = None  # an update whose frames are not all applied yet
        self._sent = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="playback", daemon=True)
        # The attributes below are used by the playback's thread only.
        self._position = -1.0 if start is None else start
        self._playing = False
        self._speed = 1.0
        self._last_seq = 0
        self._step = model.leading_step if model else 0
        self._loaded = False
        self._first = self._last = 0.0
        self._overview: Overview | None = None
        self._new_overview: Overview | None = None
        self._marks: list[AlertMark] = []
        self._at_alert: int | None = None
        self._handled = 0

    def start(self) -> None:
        self._thread.start()

    def close(self, wait: bool = True) -> None:
        """End the thread, with ``wait`` after waiting for it; safe to call twice."""
        self._closing.set()
        self._requests.put(None)
        if wait and self._thread.is_alive():
            self._thread.join(timeout=5)

    def request(self, request: Request) -> None:
        self._sent += 1
        moves = request.kind not in ("faster", "pause") or not self._thread.is_alive()
        self._transport.seeking = self._transport.seeking or moves
        self._requests.put(request)

    def pump(self, budget_s: float) -> bool:
        """Apply the thread's updates, on the caller's thread; return whether something changed."""
        deadline = time.monotonic() + budget_s
        changed = False
        while self._showing is not None or self._updates:
            try:
                update = self._showing or self._updates.popleft()
            except IndexError:  # the thread has just dropped updates made stale by a seek
                break
            self._showing = update
            self._show(update)
            changed = True
            for done, frame in enumerate(update.frames, 1):
                self.model.apply(frame)
                if done % 64 == 0 and time.monotonic() > deadline:
                    del update.frames[:done]
                    return True
            self.model.tick(update.position)
            self._transport.seeking = self._transport.seeking and update.handled < self._sent
            self._showing = None
            if time.monotonic() > deadline:
                break
        return changed

    def _show(self, update: _Update) -> None:
        transport = self._transport
        transport.position, transport.playing, transport.speed = update.position, update.playing, update.speed
        if update.model is not None:
            self.model, update.model = update.model, None
        if update.overview is not None:
            adopt(self.model, update.overview, now=update.position)
            update.overview = None
        if update.marks is not None:
            transport.marks = update.marks
        if update.span is not None:
            transport.first, transport.last = update.span
        if update.message is not None:
            transport.message = update.message
        self.reached_live = self.reached_live or update.ended_live

    # The rest runs in the thread.

    def _run(self) -> None:
        try:
            with closing(self._open(self._closing.is_set)) as history:
                self._begin(history)
                self._loop(history)
        except Exception as error:  # a thread's error is not visible: the screen must show it
            known = isinstance(error, FtmonError)
            self.error = str(error) if known else f"the recording cannot be played: {type(error).__name__}: {error}"
            self._put(_Update(message=self.error))

    def _begin(self, history: History) -> None:
        info = history.info()
        self._first = info.first_t
        self._last = max(info.last_t, self._live_end() if self._live_end else 0.0)
        start = self._first if self._position < 0 else self._position
        if self._live_end is not None:  # the live end's clock is ahead of the last message
            self._last = max(self._last, start)
        self._position = min(max(start, self._first), self._last)
        if self._requests.empty():
            self._load(history)
        if self._live_end is None:  # the screen already has a live run's marks
            self._marks = marks(history.alerts())
            self._put(_Update(marks=self._marks))
        self._put(_Update(span=(self._first, self._last)))
        # On a long recording this takes a while; a seek must not wait for it.
        threading.Thread(target=self._read_overview, name="overview", daemon=True).start()

    def _read_overview(self) -> None:
        try:
            with closing(self._open(self._closing.is_set)) as history:
                self._new_overview = read_overview(history, history.info(), self._closing.is_set)
            self._requests.put(Request("overview"))
        except Exception as error:  # a thread's error is not visible
            words = str(error) if isinstance(error, FtmonError) else f"{type(error).__name__}: {error}"
            self._put(_Update(message=f"older history cannot be read: {words}"))

    def _loop(self, history: History) -> None:
        moved_at = time.monotonic()
        while not self._closing.is_set():
            wait = max(0.0, moved_at + TICK_S - time.monotonic()) if self._playing else None
            requests = self._wait_for_requests(wait)
            now = time.monotonic()
            try:
                if requests:
                    self._carry_out(history, requests)
                elif self._playing and len(self._updates) < _MAX_WAITING:
                    self._play_on(history, (now - moved_at) * self._speed)
            except FtmonError as error:
                self._playing = False
                self._put(_Update(message=str(error)))
            moved_at = time.monotonic() if requests else now  # the time of a seek is not played

    def _wait_for_requests(self, wait: float | None) -> list[Request]:
        """Wait for requests and return all that are waiting, so that a held key costs a single seek."""
        found: list[Request] = []
        with suppress(queue.Empty):
            request = self._requests.get(timeout=wait)
            while request is not None:
                found.append(request)
                request = self._requests.get_nowait()
        return found

    def _carry_out(self, history: History, requests: list[Request]) -> None:
        target: float | None = None
        message: str | None = None
        if self._live_end is not None:
            self._last = max(self._last, self._live_end())
            if any(request.kind in ("alert", "mark") for request in requests):
                self._marks = marks(history.alerts())
        for request in requests:
            message = message if request.kind == "overview" else ""
            try:
                found = self._target(history, request, self._position if target is None else target)
            except FtmonError as error:
                message = str(error)
                continue
            target = target if found is None else found
        self._handled += sum(request.kind != "overview" for request in requests)
        if target is not None or not self._loaded:
            target = min(max(self._position if target is None else target, self._first), self._last)
            if self._loaded and history.seq_at(target) - self._last_seq > SEEK_FRAMES:
                self._loaded = False  # without reading the frames in between
            self._go(history, target)
        self._put(_Update(span=(self._first, self._last), message=message))

    def _target(self, history: History, request: Request, position: float) -> float | None:
        if request.kind == "overview":
            if self._loaded:
                self._put(_Update(overview=self._new_overview))  # applied frames stay: they are finer than a load
            self._overview = self._new_overview
            return None
        if request.kind == "faster":  # from the speed requested last, which the screen may not have received yet
            self._speed = next_speed(self._speed, up=request.number > 0)
            return None
        if request.kind == "play":
            self._playing = True
            return self._first if position >= self._last and self._live_end is None else None
        if request.kind == "pause":
            self._playing = False
            return None
        alert, self._at_alert = self._at_alert, None
        if request.kind == "skip":
            return position + request.number
        if request.kind == "goto":
            place = parse(request.text, position, self._first, self._last)
            return place.time if place.step is None else self._step_time(history, place.step)
        self._playing = False
        if request.kind == "step":
            return self._step_time(history, max(self._step + int(request.number), 1))
        if request.kind == "mark":
            mark = next((mark for mark in self._marks if mark.alert_id == request.number), None)
        else:
            mark = _neighbour(self._marks, position, int(request.number), alert)
        if mark is None:
            self._at_alert = alert
            raise FtmonError("no alert after this" if request.number > 0 else "no alert before this")
        self._at_alert = mark.alert_id
        return alert_time(history, mark)

    def _step_time(self, history: History, step: int) -> float:
        found = history.step_time(step)
        if found is None:
            raise FtmonError(f"no step {step} in this recording")
        self._step = step  # so that a held key continues from here
        return found

    def _play_on(self, history: History, seconds: float) -> None:
        if self._live_end is not None:
            self._last = max(self._last, self._live_end())
        self._playing = self._position + seconds < self._last
        self._go(history, min(self._position + seconds, self._last))
        if not self._playing:
            self._put(_Update(ended_live=self._live_end is not None))

    def _go(self, history: History, target: float) -> None:
        """Move to a time, by folding the frames in between if they are few and ahead, else by a seek."""
        ahead = self._loaded and target >= self._position
        frames = history.frames(self._last_seq, MAX_FRAMES, target) if ahead else []
        self._position = target
        if not ahead or len(frames) == MAX_FRAMES:
            self._load(history)
            return
        if frames:
            self._last_seq = frames[-1].seq
            self._step = max([self._step, *(each.message.step for each in frames if isinstance(each.message, Step))])
        self._put(_Update(frames=frames))

    def _load(self, history: History) -> None:
        model = load(history, self._position, self._info, self._overview)
        self._step = model.leading_step
        self._last_seq = model.last_seq
        self._loaded = True
        # Pending updates are from before the seek, but not what they report; marks and span are sent again.
        message, ended = None, False
        with suppress(IndexError):  # empty; `pump` takes from the same queue
            while True:
                stale = self._updates.popleft()
                message = message if stale.message is None else stale.message
                ended = ended or stale.ended_live
        marks, span = self._marks or None, (self._first, self._last)
        self._put(_Update(model=model, marks=marks, span=span, message=message, ended_live=ended))

    def _put(self, update: _Update) -> None:
        update.position, update.playing, update.speed = self._position, self._playing, self._speed
        update.handled = self._handled
        self._updates.append(update)


def _neighbour(known: list[AlertMark], position: float, direction: int, at_alert: int | None) -> AlertMark | None:
    """Return the next or previous mark; ``at_alert`` is the shown one, whose time may be before the position."""
    ordered = known if direction > 0 else known[::-1]
    here = next((place for place, mark in enumerate(ordered) if mark.alert_id == at_alert), None)
    if here is not None:
        return next(iter(ordered[here + 1 :]), None)
    return next((mark for mark in ordered if (mark.time - position) * direction > 0), None)


AT_ITS_END = "this run failed: its end is shown; N: alert before, space: play from the start"
"""Shown when a replay begins at a run's end."""

_LOOKED_AT = 64  # messages per read when searching for the first ranks' messages
_TOGETHER_S = 1.0  # ranks whose first messages are within this of each other started together


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


class ReplaySource:
    """Plays a recording, from ``start`` (seconds since the epoch), its end (``at_end``), or the most useful place.

    That is the end of a run that failed, else the first ranks' first messages: nothing is shown before them, and
    seeking to the beginning remains possible. Raises ``RecordingError`` if the file is missing, or is not a recording
    this version can read.
    """

    can_command: bool = False

    def __init__(self, path: str | os.PathLike[str], *, start: float | None = None, at_end: bool = False) -> None:
        self._path = Path(path)
        self.folder: Path | None = self._path.parent
        with Reader(self._path) as reader:
            info = reader.info()
            ended_badly = info.state == "failed" or bool(info.open_errors and not info.live)
            failed = start is None and not at_end and ended_badly
            if start is None:
                start = info.last_t if failed or at_end else first_ranks_time(reader, info)
        self.transport = Transport("replay", self._request)
        self.transport.first, self.transport.last = info.first_t, info.last_t
        self.transport.position = start
        self.transport.message = AT_ITS_END if failed else ""
        self._readers: list[Reader] = []
        self._playback = Playback(self._open, describe(info), self.transport, self.transport.position)
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
