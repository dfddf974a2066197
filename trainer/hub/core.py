"""What the parts of a hub share: the run, its stream, its analysis, and the connections to its ranks."""

import time
from collections.abc import Callable
from typing import Any

from ...protocol.messages.wire import Message
from ...protocol.run.rundir import RunDir
from ..host.loop import Mailbox
from .adopt import open_recording, read_history
from .analyses import Analysis
from .end import keeper
from .ranks import RankAccess, RankHosts, RankLink
from .sockets import Channels
from .telemetry import Recorder, Stream


class Core:
    """The shared parts of one hub. Main loop only, except ``post``.

    Raises:
        FtmonError: the run cannot be read, its recording cannot be opened, or a socket cannot be bound.
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
