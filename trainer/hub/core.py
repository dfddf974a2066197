"""What the parts of a hub share: the run, what an earlier hub recorded of it, its stream, analysis, and links."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.analysis.hub_facts import DamagedRecordingFacts
from ...protocol.errors import FtmonError, RecordingError
from ...protocol.messages import telemetry
from ...protocol.messages.control import RankState
from ...protocol.messages.hosts import Job
from ...protocol.messages.memory import Cause
from ...protocol.messages.wire import Frame, Message
from ...protocol.recording.reader import Reader
from ...protocol.recording.writer import Writer
from ...protocol.run.rundir import RunDir, RunFile
from ..host.log_tail import offsets_after
from ..host.loop import Mailbox
from .analyses import Analysis
from .end import keeper
from .ranks import RankAccess, RankHosts, RankLink
from .sockets import Channels
from .telemetry import Recorder, Stream

_FAR_SECONDS = 86_400.0  # Added to now: the clock may have been set back since the recording's last message
_LOG_LINES = 5_000
_OF_A_JOB = (
    *(telemetry.Hello, telemetry.Step, telemetry.Goodbye, telemetry.Failure, RankState, telemetry.Oom, Cause),
    *(telemetry.AllocatorEvents, telemetry.Plan, telemetry.Evaluation, telemetry.Checkpoint),
    *(telemetry.CheckpointFailed, telemetry.EarlyStop, telemetry.Activity),
)
_FINAL_STATES = ("finished", "failed", "stopped")


class EarlierHistory(NamedTuple):
    """Recording of an earlier hub of this run."""

    frames: list[Frame]  # The minimal frames that restore its state; empty without an earlier hub
    log_offsets: dict[str, int]  # Offset at which to continue in each log file, in bytes


def read_history(run: RunDir) -> EarlierHistory:
    """Read the recording of an earlier hub; empty if there was none or it is unreadable."""
    if not run.recording.exists():
        return EarlierHistory([], {})
    try:
        with Reader(run.recording) as reader:
            frames = reader.state_at(time.time() + _FAR_SECONDS)
            lines = sorted(reader.logs(limit=_LOG_LINES), key=lambda frame: frame.seq)
    except FtmonError as error:
        print(error, file=sys.stderr)
        return EarlierHistory([], {})
    recorded = [frame.message for frame in lines if isinstance(frame.message, telemetry.LogLine)]
    return EarlierHistory(frames, offsets_after(run, recorded))


def of_the_last_job(frames: list[Frame]) -> list[Frame]:
    """Drop messages about ranks of jobs before the last one in the stream; alerts of all jobs are kept."""
    began: dict[int, int] = {}
    for frame in frames:
        job = frame.message
        if isinstance(job, Job) and job.shown and not job.is_over:
            began.setdefault(job.number, frame.seq)
    since = max(began.values(), default=0) if len(began) > 1 else 0
    return [frame for frame in frames if frame.seq >= since or not isinstance(frame.message, _OF_A_JOB)]


def open_recording(run: RunDir, file: RunFile) -> tuple[Writer, DamagedRecordingFacts | None]:
    """Open the recording; if it cannot be continued, rename it, and return the damage too."""
    try:
        return Writer(run.recording, file), None
    except RecordingError as error:
        aside = run.recording.with_name(f"recording.damaged-{time.time_ns()}.sqlite")
        run.recording.rename(aside)
        with contextlib.suppress(OSError):  # the WAL has the newest rows, which a reader salvages too
            Path(f"{run.recording}-wal").rename(f"{aside}-wal")
        with contextlib.suppress(OSError):
            Path(f"{run.recording}-shm").unlink()
        return Writer(run.recording, file), DamagedRecordingFacts(str(error), aside.name)


def already_over(run: RunDir) -> bool:
    """Return whether the run has ended and its recording contains the end, so that no hub is needed."""
    if run.read_exit() is None:
        return False
    try:
        with Reader(run.recording) as reader:
            return reader.info().state in _FINAL_STATES
    except FtmonError:
        return False


class Core:
    """The shared parts of one hub. Main loop only, except ``post``.

    Raises ``FtmonError`` if the run cannot be read, its recording cannot be opened, or a socket cannot be bound.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.file = run.read_run()
        self.history = read_history(run)
        self.writer, self.damage = open_recording(run, self.file)
        self.channels = Channels(run, self.file.options.listen)
        self.mailbox = Mailbox()
        self.post = self.mailbox.post
        self.stream = Stream(self.channels.of("stream"), Recorder(self.writer), self.writer.next_seq)
        self.link = RankLink(self.channels.of("ranks"))
        self.rank_hosts = RankHosts()
        self.analysis = Analysis(self.file, self.conclude, keep=keeper(run))
        self.access = RankAccess(run, self.analysis.tracker, self.rank_hosts, self.link, self.emit, self.post)
        self.notify: Callable[[Message], object] | None = None
        self.observers: dict[type[Message], Callable[[Any], object]] = {}
        """By type: called with each message of the hub's own before it is appended."""

    def emit(self, message: Message) -> None:
        """Append a message of the hub's own to the stream, and analyse it."""
        seq, t = self.conclude(message)
        self.analysis.feed(seq, t, message)

    def conclude(self, message: Message) -> tuple[int, float]:
        """Append a conclusion of the analysis to the stream; return its number and time."""
        t = time.time()
        if self.notify is not None:
            self.notify(message)
        observer = self.observers.get(type(message))
        if observer is not None:
            observer(message)
        return self.stream.put(message, t), t
