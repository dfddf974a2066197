"""The hub of a run: one process, one main loop over its sockets, and nothing in it that could make a rank wait."""

import gc
import os
import signal
import socket as host_sockets
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import zmq

from ... import __version__
from ...protocol.errors import FtmonError
from ...protocol.process import this_process
from ...protocol.rundir import ExitFile, HubFile, RunDir
from ...protocol.telemetry import Goodbye, Hello
from ...protocol.wire import Frame, Message
from .. import processes
from ..intent import LEFT_OVER
from .actions import Actions
from .adopt import open_recording, read_history
from .agents import BACK_SECONDS, Agents
from .channels import Channels
from .commands import Commands
from .devices import DeviceSampler
from .ending import Ending
from .history import History
from .intake import Intake
from .judging import Judging
from .killing import Killing
from .leftovers import Leftovers
from .logtail import LogTail
from .looking import Looking
from .mailbox import Mailbox
from .oomfiles import keeper
from .policy import Policy
from .rankbook import RankBook
from .ranklink import RankLink
from .reach import Reach
from .recorder import Recorder
from .stacking import Stacking
from .stats import Stats
from .stream import Stream
from .supervisor import Supervisor
from .unheard import Unheard

TICK_SECONDS = 0.25
STATS_SECONDS = 2.0
LINGER_SECONDS = 3.0
"""How long the hub stays after the end, so that apps see it and can ask for the rest."""
STOP_NOTICE_SECONDS = 5.0
"""How long before it a stop is told to ranks on several hosts."""
SETTLE_SECONDS = 1.25
"""After a failure the deaths of the ranks are judged in their order before the end is told."""
AGENTS_END_SECONDS = 10.0
"""How long agents may take to end what is left on their hosts and to send the rest, when a run did not finish."""
AGENTS_FINISH_SECONDS = 45.0
"""The same when it has finished: on another host a job of its own may still be saving."""
_FAILURES = 100
_FAILURES_SECONDS = 20.0
"""So many failures of its own within so long, and a hub gives up: another one may do better."""
_DRAIN = 512
"""Messages taken before commands get their turn."""


class Hub:
    """Everything of one hub. Make it, then ``run`` it."""

    def __init__(self, run: RunDir) -> None:
        self._run_dir = run
        self._lock = run.lock_hub()
        self._file = run.read_run()
        self._read_only = bool(self._file.options.get("read_only"))
        self._over = False
        self._status = 0
        self._announced = False
        self._failures = 0
        self._failing_since = 0.0
        self._finish_at = 0.0
        self._agents_until = 0.0
        self._missed_until = 0.0
        self._leave_at: float | None = None
        self._end: ExitFile | None = None
        self._disk_trouble = False
        history = read_history(run)
        writer, moved = open_recording(run, self._file)
        self._channels = Channels(run, str(self._file.options.get("listen") or ""))
        self._mailbox = Mailbox()
        self._stream = Stream(self._channels.of("stream"), Recorder(writer), writer.next_seq)
        self._link = RankLink(self._channels.of("ranks"))
        actions = Actions(self._link, self.emit, self._may_ask)
        self._judging = Judging(self._file, self._emit, actions.send, keeper(run))
        self._intake = Intake(self._accept, self._refuse, fresh=run.read_hub() is None)
        self._book = RankBook()
        self._ending = Ending(run, self._file)
        self._agents = Agents(self._channels.of("agents"), self._intake.take, self._judging.fact, writer.taken)
        self._stream.recorder.taken = self._agents.taken
        self._agents.replaced = self._link.rename
        tracker = self._judging.tracker
        reach = Reach(tracker, self._book, self._link, self._agents, self.post)
        self._looking = Looking(run, tracker, self._book, self._link, reach, self.emit, self.post)
        self._leftovers = Leftovers(
            self._judging, lambda: processes.of_run(run.path, [], [os.getpid()]), lambda: self._book.on_gpu
        )
        killing = Killing(run, self._book, self._link, self._agents, self.post, self._leftovers.note)
        self._policy = Policy(run, self._file.options, self._judging, self._looking, killing, self._book, self.emit)
        stacking = Stacking(tracker, self._link, reach, self._looking, self.emit)
        self._commands = Commands(run, self, self._book, self._link, stacking, killing, self._read_only)
        self._unheard = Unheard(self._judging, self._book, str(self._file.options.get("listen") or ""))
        self._supervisor = Supervisor(lambda: self._mailbox.post(self._take_facts))
        self._devices = DeviceSampler(host_sockets.gethostname(), self._rank_pids)
        self._logs = LogTail(run, history.log_offsets)
        self._history = History(self._channels.of("query"), run.recording, self._commit_for)
        self._stats = Stats(self._intake, self._stream)
        self._adopt(history.frames, moved)

    def run(self) -> int:
        """Serve until the run is over (or the hub is told to end); return the exit status."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ctrl-c meant for the job
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for thread in (self._supervisor, self._devices, self._history):
            thread.start()
        self._announced = self._announce()
        # Nothing made so far becomes garbage, and the rest dies by reference count: collections are rare on purpose.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        try:
            self._loop()
        finally:
            self._close()
        return self._status

    # What the commands need of the hub.

    def emit(self, message: Message) -> None:
        """Append a message of the hub's own to the stream, and look at it."""
        seq, t = self._emit(message)
        self._judging.feed(seq, t, message)

    def post(self, call: Callable[[], object]) -> None:
        """Have the main loop make a call; any thread."""
        self._mailbox.post(call)

    def shut_down(self) -> None:
        """End soon; the ranks go on."""
        self._over = True

    def last_step(self) -> int:
        """Name a step that no rank has finished yet, and that each will hear of in time to stop after it."""
        return self._judging.tracker.step_in(STOP_NOTICE_SECONDS)

    # The loop.

    def _loop(self) -> None:
        poller = zmq.Poller()
        handlers: dict[Any, Callable[[], object]] = {self._mailbox.fileno(): self._mailbox.drain}
        for socket in self._channels.of("control"):
            handlers[socket] = lambda socket=socket: self._commands.receive(socket)
        for socket in self._channels.of("ranks"):
            handlers[socket] = lambda socket=socket: self._link.receive(socket)
        for socket in self._agents.sockets:
            handlers[socket] = lambda socket=socket: self._agents.receive(socket, _DRAIN)
        for socket in self._channels.of("telemetry"):
            handlers[socket] = lambda socket=socket: self._intake.drain(socket, _DRAIN)
        order = list(handlers)  # control before data
        for source in order:
            poller.register(source, zmq.POLLIN)
        next_tick = time.monotonic()
        next_stats = next_tick
        while not self._over:
            now = time.monotonic()
            try:
                if now >= next_tick:
                    next_tick = now + TICK_SECONDS
                    self._tick(now)
                    if now >= next_stats:
                        next_stats = now + STATS_SECONDS
                        self._report()
                self._stream.flush()
                ready = dict(poller.poll(max(0, int((next_tick - now) * 1000) + 1)))
                for source in order:
                    if source in ready:
                        handlers[source]()
                if self._stream.commit_due:
                    self._commit()
            except Exception:  # one bad message or file must not end the watch; the same one again and again would
                traceback.print_exc(file=sys.stderr)
                if now - self._failing_since > _FAILURES_SECONDS:
                    self._failing_since, self._failures = now, 0
                self._failures += 1
                if self._failures > _FAILURES:
                    raise

    def _tick(self, now: float) -> None:
        for line in self._logs.poll():
            self._hub_message(line)
            if line.rank < 0:
                self._supervisor.read_words(line.text)
        for sample in self._devices.poll():
            self._hub_message(sample)
            self._looking.sample(sample)
        self._take_facts()
        for state in self._agents.tick():
            self._hub_message(state)
        self._judging.tick(time.time())
        self._unheard.tick(now)
        self._looking.tick()
        self._policy.tick(now)
        self._leftovers.tick(now)
        self._link.expire()
        self._commit()
        if self._end is None:
            self._end = self._look_for_end()
            if self._end is not None:
                failed = self._end.state == "failed"
                self._finish_at = now + (SETTLE_SECONDS if failed else 0.0)
                clean = self._end.state == "finished"
                self._agents_until = now + (AGENTS_FINISH_SECONDS if clean else AGENTS_END_SECONDS)
                self._missed_until = now + BACK_SECONDS
                self._agents.run_is_over(AGENTS_FINISH_SECONDS - AGENTS_END_SECONDS if clean else SETTLE_SECONDS)
        if self._end is None or now < self._finish_at or (now < self._agents_until and self._agents.reachable()):
            return
        if self._leave_at is None:
            self._leave_at = now + LINGER_SECONDS
            self._finish(self._end)
        elif now >= self._leave_at and not self._commands.busy and not self._leftovers.waiting(now):
            self._over = now >= self._missed_until or not self._agents.missed()

    def _look_for_end(self) -> ExitFile | None:
        if not self._run_dir.path.exists():
            print(f"{self._run_dir.path} was removed: there is nothing left to serve", file=sys.stderr)
            self._over = True
            return None
        try:
            alive = len(self._supervisor.alive()) + self._agents.ranks_alive
            return self._ending.look(alive, self._book.any_elsewhere, self._intake.received)
        except (FtmonError, OSError) as error:
            print(error, file=sys.stderr)
            return None

    def _finish(self, end: ExitFile) -> None:
        """Take in what is still on its way, then say how it ended."""
        for socket in self._agents.sockets:
            while self._agents.receive(socket, _DRAIN):
                self._stream.flush()
        for socket in self._channels.of("telemetry"):
            while self._intake.drain(socket, _DRAIN):
                self._stream.flush()
        for line in self._logs.poll(last=True):
            self._hub_message(line)
        self._take_facts()
        silent = self._ending.before_first_step(end)
        if silent is not None and end.state != "stopped":
            title, text, last = silent
            severity = "error" if end.state == "failed" else "warning"
            self._judging.alert("exit", severity, title, "before_first_step", text, last_lines=last)
        if LEFT_OVER in end.text:
            self._leftovers.look_at_end()
        self._judging.ended(end)
        self._report()
        self._commit()

    def _take_facts(self) -> None:
        for fact in self._supervisor.poll():
            self._judging.fact(fact)

    def _report(self) -> None:
        self._hub_message(self._stats.take())
        if not self._announced:
            self._announced = self._announce()

    def _commit(self) -> None:
        numbers = self._agents.unconfirmed()
        self._stream.commit((lambda: self.post(lambda: self._agents.confirm(numbers))) if numbers else None)
        trouble = bool(self._stream.recorder.error)
        if trouble != self._disk_trouble:  # say so at once, not with the next regular report
            self._disk_trouble = trouble
            self._report()

    def _commit_for(self, done: Any) -> None:
        """Commit everything published so far, then set the event; called by the history thread."""
        self._mailbox.post(lambda: self._stream.commit(done.set))

    # Messages.

    def _accept(self, message: Message, t: float, sender: str, body: bytes) -> None:
        kind = type(message)
        if kind is Hello:
            assert isinstance(message, Hello)
            self._meet(message, away=self._agents.speaking is not None)
            if self._book.target(message.rank) is not None:
                self._commands.met(message)
        elif sender not in self._book.senders and sender.startswith("rank-"):
            self._link.identify(sender)
        if kind is Goodbye or not self._ending.stepped:
            self._ending.note(message)
        seq = self._stream.put(message, t, body)
        self._judging.feed(seq, t, message)

    def _meet(self, hello: Hello, away: bool = False) -> None:
        self._book.know(hello, away)
        self._link.know(hello)
        self._ending.note(hello)
        target = self._book.target(hello.rank)
        if target is not None:
            self._supervisor.watch(*target)

    def _rank_pids(self) -> dict[int, int]:
        """Give the pids of this host's ranks, by rank; called by the device sampler's thread."""
        return {rank: pid for rank, pid, _ in self._supervisor.alive()}

    def _refuse(self, sender: str, reason: str) -> None:
        self._judging.alert("note", "warning", f"messages of {sender} are refused", f"refused {sender}", reason)

    def _hub_message(self, message: Message) -> None:
        seq, t = self._emit(message)
        self._judging.feed(seq, t, message)

    def _emit(self, message: Message) -> tuple[int, float]:
        t = time.time()
        return self._stream.put(message, t), t

    # Beginning and end.

    def _announce(self) -> bool:
        """Write the connection file; False when the disk does not take it (it is tried again with each report)."""
        content = HubFile(
            process=this_process(),
            addresses=self._channels.addresses,
            version=__version__,
            host=host_sockets.gethostname(),
            started=time.time(),
            listen=self._channels.remote.addresses,
            server_key=self._channels.remote.server_key,
            read_only=self._read_only,
        )
        try:
            self._run_dir.write_hub(content)
        except OSError as error:
            print(f"hub.json cannot be written: {error}", file=sys.stderr)
            return False
        return True

    def _adopt(self, history: list[Frame], moved: str) -> None:
        """Go on where an earlier hub of this run ended."""
        for frame in history:
            if isinstance(frame.message, Hello):
                self._meet(frame.message)
            self._ending.note(frame.message)
        self._judging.restore(history)
        self._agents.restore(frame.message for frame in history)
        if history:
            last = history[-1].t
            self._judging.alert(
                "note",
                "info",
                "the hub was restarted",
                "restarted",
                f"Nothing was watched for {time.time() - last:.1f} s before; training went on meanwhile.",
                last_recorded=last,
            )
        if moved:
            self._judging.alert("disk", "error", "the recording was damaged", "damaged", moved)
        problem = self._channels.remote.problem
        if problem:
            self._judging.alert("note", "error", "not listening for other hosts", "listen", problem)

    def _may_ask(self, verb: str) -> bool:
        """Tell whether the hub may ask ranks for something by itself."""
        if verb in ("arm", "compose") and self._file.options.get("allocator_events", True) is False:
            return False
        return not self._read_only

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Not 0: whoever ended the hub so did not ask it to stay away, and the launcher starts another.
        self._status = 128 + number
        self._over = True

    def _close(self) -> None:
        self._history.stop()
        self._supervisor.stop()
        self._devices.close()
        self._stream.flush()
        self._stream.close()
        self._channels.close()
        os.close(self._lock)
