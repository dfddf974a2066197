"""The hub of a run: one process with one main loop over its sockets; it never makes a rank wait."""

import gc
import os
import signal
import socket as host_sockets
import sys
import time
from collections.abc import Callable
from types import FrameType

from ... import __version__
from ...protocol.analysis.findings import Finding
from ...protocol.analysis.hub_facts import (
    DamagedRecordingFacts,
    NotListeningFacts,
    NotNotifiedFacts,
    RefusedFacts,
    RestartFacts,
)
from ...protocol.errors import FtmonError
from ...protocol.host.process import this_process
from ...protocol.messages.control import RankState
from ...protocol.messages.step_trace import StepTrace
from ...protocol.messages.telemetry import Closing, DeviceSample, Failure, Goodbye, Hello, LogLine, Plan, Step
from ...protocol.messages.wire import Frame, Message
from ...protocol.run.rundir import ExitFile, HubFile, RunDir
from ..host import processes
from ..host.hardware.devices import DeviceSampler
from ..host.hardware.watch import HostWatch
from ..host.log_tail import LogTail
from ..host.mailbox import Mailbox
from ..host.supervisor import Supervisor
from .adopt import of_the_last_job, open_recording, read_history
from .analyses.analysis import Analysis
from .analyses.prediction import PredictionProcess
from .analyses.trace_analysis import TraceAnalysis
from .control.actions import Actions
from .control.commands import Commands
from .control.kill import Kills
from .control.notify import make_notifier
from .control.policy import Policy
from .detect.leftovers import Leftovers
from .detect.missing_ranks import MissingRanks
from .detect.port_watch import PortWatch
from .detect.process_facts import ProcessFacts
from .detect.unhooked import Unhooked
from .end.end_detector import EndDetector
from .end.oom_files import keeper
from .end.run_end import RunEnd
from .jobs.job_stream import JobStream
from .poll_loop import PollLoop
from .ranks.agents import Agents
from .ranks.host_inspection import HostInspection
from .ranks.rank_hosts import RankHosts
from .ranks.rank_link import RankLink
from .ranks.stack_requests import StackRequests
from .ranks.stall_probe import StallProbe
from .sockets.channels import Channels
from .telemetry.commits import Commits
from .telemetry.history import HistoryServer
from .telemetry.intake import Intake
from .telemetry.recorder import Recorder
from .telemetry.stats import Stats
from .telemetry.stream import Stream

STATS_SECONDS = 2.0
STOP_NOTICE_SECONDS = 5.0
"""Lead time of a stop command to ranks on several hosts."""
TRACES_SECONDS = 10.0
"""Time limit at a run's end for analysing the traces of captured steps."""
_RECORDED_SECONDS = 5.0
"""Time limit at a run's end for the disk: whoever hears of the end finds it in the recording."""
_DRAIN = 512
"""Maximum messages received per socket before commands are handled again."""


class Hub:
    """One hub: create it, then call ``run``."""

    def __init__(self, run: RunDir) -> None:
        self._run_dir = run
        self._lock = run.lock_hub()
        self._file = run.read_run()
        self._read_only = self._file.options.read_only
        self._status = 0
        self._announced = False
        self._next_stats = 0.0
        history = read_history(run)
        writer, damage = open_recording(run, self._file)
        self._channels = Channels(run, self._file.options.listen)
        self._mailbox = Mailbox()
        self._stream = Stream(self._channels.of("stream"), Recorder(writer), writer.next_seq)
        self._link = RankLink(self._channels.of("ranks"))
        actions = Actions(self._link, self.emit, self._may_ask)
        self._analysis = Analysis(self._file, self._emit, actions.send, keeper(run))
        actions.answered = self._analysis.answered
        known = {} if writer.received is None and _is_first(run) else writer.received
        self._intake = Intake(self._accept, self._refuse, known, lambda count: self._commits.missed(count))
        self._rank_hosts = RankHosts()
        self._ports = PortWatch(self.post, self._analysis.put)
        self._end_detector = EndDetector(run, self._file)
        self._predicting = PredictionProcess(run, self._file, self.emit)
        self._traces = TraceAnalysis(self.emit, self.post)
        self._agents = Agents(
            self._channels.of("agents"), self._intake.receive, self._analysis.fact, writer.agent_numbers
        )
        self._stream.recorder.agent_numbers = self._agents.received
        self._stream.recorder.received = self._intake.numbers
        self._agents.replaced = self._link.rename
        tracker = self._analysis.tracker
        inspection = HostInspection(tracker, self._rank_hosts, self._link, self._agents, self.post)
        self._stall_probe = StallProbe(run, tracker, self._rank_hosts, self._link, inspection, self.emit, self.post)
        self._leftovers = Leftovers(
            self._analysis, lambda: processes.of_run(run.path, [], [os.getpid()]), lambda: self._rank_hosts.on_gpu
        )
        kills = Kills(run, self._rank_hosts, self._link, self._agents, self.post, self._leftovers.note)
        self._policy = Policy(
            run, self._file.options, self._analysis, self._stall_probe, kills, self._rank_hosts, self.emit
        )
        stack_requests = StackRequests(tracker, self._link, inspection, self._stall_probe, self.emit)
        self._commands = Commands(run, self, self._rank_hosts, self._link, stack_requests, kills, self._read_only)
        self._missing_ranks = MissingRanks(self._analysis, self._rank_hosts, self._file.options.listen)
        launcher = self._file.launcher
        self._unhooked = Unhooked(run, launcher.pid if launcher is not None else None, self._analysis)
        self._supervisor = Supervisor(lambda: self._mailbox.post(self._facts.collect))
        self._facts = ProcessFacts(run, self._supervisor, self._analysis, self.emit)
        self._jobs = JobStream(
            self._analysis, self._rank_hosts, self._end_detector, self._ports, self.emit, self._meet, self._settle_job
        )
        self._devices = DeviceSampler(host_sockets.gethostname(), self._rank_pids)
        self._host_watch = HostWatch(host_sockets.gethostname(), run.path, self._rank_pids)
        self._logs = LogTail(run, history.log_offsets)
        self._stats = Stats(self._intake, self._stream, self._traces)
        last = history.frames[-1].t if history.frames else self._file.created
        self._commits = Commits(self._stream, self._agents, self._analysis, self._report, self.post, last)
        self._history = HistoryServer(self._channels.of("query"), run.recording, self._commits.then_set)
        self._notifier = make_notifier(run, host_sockets.gethostname(), self._report_not_notified)
        self._end = RunEnd(self._agents, self._detect_end, self._finish, self._busy)
        self._loop = self._make_loop()
        self._adopt(history.frames, damage)

    def run(self) -> int:
        """Serve until the run is over (or the hub receives a signal to end); return the exit status."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ctrl-c meant for the job
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for thread in (self._supervisor, self._devices, self._host_watch, self._history):
            thread.start()
        if self._notifier is not None:
            self._notifier.start()
        self._announced = self._announce()
        # Objects created so far never become garbage, and others are freed by reference count: collect rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        try:
            self._loop.run()
        finally:
            self._close()
        return self._status

    # Interface for the commands.

    def emit(self, message: Message) -> None:
        """Append a message of the hub's own to the stream, and analyse it."""
        seq, t = self._emit(message)
        self._analysis.feed(seq, t, message)

    def post(self, call: Callable[[], object]) -> None:
        """Schedule a call in the main loop; any thread."""
        self._mailbox.post(call)

    def shut_down(self) -> None:
        """End the hub soon; the ranks continue."""
        self._loop.stop()

    def last_step(self) -> int:
        """Return a step late enough for every rank to receive a stop command before finishing it."""
        return self._analysis.tracker.step_in(STOP_NOTICE_SECONDS)

    # The loop.

    def _make_loop(self) -> PollLoop:
        loop = PollLoop(self._tick, self._stream.flush, self._after_read)
        loop.add(self._mailbox.fileno(), self._mailbox.drain)
        for socket in self._channels.of("control"):
            loop.add(socket, lambda socket=socket: self._commands.receive(socket))
        for socket in self._channels.of("ranks"):
            loop.add(socket, lambda socket=socket: self._link.receive(socket))
        for socket in self._agents.sockets:
            loop.add(socket, lambda socket=socket: self._agents.receive(socket, _DRAIN))
        for socket in self._channels.of("telemetry"):
            loop.add(socket, lambda socket=socket: self._intake.drain(socket, _DRAIN))
        return loop

    def _after_read(self) -> None:
        self._analysis.flush()
        self._commits.commit_when_due()

    def _tick(self, now: float) -> None:
        for line in self._logs.poll():
            self.emit(line)
            self._ports.note(line)
            if line.rank < 0:
                self._supervisor.read_words(line.text)
        for sample in self._devices.poll():
            self.emit(sample)
            if isinstance(sample, DeviceSample):
                self._stall_probe.sample(sample)
        for found in self._host_watch.poll():
            self.emit(found)
        self._facts.collect()
        for state in self._agents.tick():
            self.emit(state)
        self._analysis.tick(time.time())
        self._jobs.tick()
        self._missing_ranks.tick(now)
        self._unhooked.tick(now, bool(self._rank_hosts.senders))
        self._stall_probe.tick()
        self._policy.tick(now)
        self._leftovers.tick(now)
        self._predicting.tick(self._end_detector.stepped)
        self._link.expire()
        self._commits.commit()
        if self._end.tick(now):
            self._loop.stop()
        if now >= self._next_stats:
            self._next_stats = now + STATS_SECONDS
            self._report()

    def _busy(self, now: float) -> bool:
        return self._commands.busy or self._leftovers.waiting(now)

    def _detect_end(self) -> ExitFile | None:
        try:
            if not self._run_dir.path.exists():
                print(f"{self._run_dir.path} was removed: there is nothing left to serve", file=sys.stderr)
                self._loop.stop()
                return None
            alive = len(self._supervisor.alive()) + self._agents.ranks_alive
            return self._end_detector.poll(alive, self._rank_hosts.any_elsewhere, self._intake.received)
        except (FtmonError, OSError) as error:
            print(error, file=sys.stderr)
            return None

    def _finish(self, end: ExitFile) -> None:
        """Receive the messages still in flight, then append the run's end."""
        for socket in self._agents.sockets:
            while self._agents.receive(socket, _DRAIN):
                self._stream.flush()
        for socket in self._channels.of("telemetry"):
            while self._intake.drain(socket, _DRAIN):
                self._stream.flush()
        for line in self._logs.poll(last=True):
            self.emit(line)
            self._ports.note(line)
        self._ports.finish()
        self._traces.settle(TRACES_SECONDS)
        self._mailbox.drain()
        self._facts.collect()
        without_step = self._end_detector.no_step(end, self._unhooked.found)
        if without_step is not None:
            self._analysis.put(without_step)
        if end.left:
            self._leftovers.find_at_end()
        self._analysis.ended(end)
        self._jobs.close()
        self._report()
        self._commits.commit_all(_RECORDED_SECONDS)

    def _report(self) -> None:
        self.emit(self._stats.measure())
        if not self._announced:
            self._announced = self._announce()

    # Messages.

    def _accept(self, message: Message, t: float, sender: str, body: bytes) -> None:
        kind = type(message)
        if kind is Hello:
            assert isinstance(message, Hello)
            away = self._agents.speaking is not None
            if not self._jobs.join(message, t):
                return
            t = time.time()  # messages that start its job were appended first: times in the stream do not go back
            self._meet(message, away)
            self._predicting.hello(message)
            if self._rank_hosts.target(message.rank) is not None:
                self._commands.met(message)
        elif sender in self._jobs.off_stream:
            self._jobs.add(sender, message)
            if kind is not LogLine:
                return
        elif sender not in self._rank_hosts.senders:
            if sender.startswith("rank-"):
                self._link.identify(sender)
        elif kind is Step:
            assert isinstance(message, Step)
            if self._jobs.step(sender, message, t):
                t = time.time()
        elif kind in (Goodbye, Failure, Closing):
            self._jobs.add(sender, message)
            if isinstance(message, Failure):
                self._ports.note(message)
        if kind is Plan:
            assert isinstance(message, Plan)
            self._host_watch.disks.note_output(message.rank, message.output_dir)
        if kind is StepTrace:
            self._traces.submit(sender, body)
            return
        if kind is Goodbye or not self._end_detector.stepped:
            self._end_detector.note(message)
        seq = self._stream.put(message, t, body)
        self._analysis.feed(seq, t, message)

    def _meet(self, hello: Hello, away: bool = False) -> None:
        self._rank_hosts.register(hello, away)
        self._link.register(hello)
        self._end_detector.note(hello)
        target = self._rank_hosts.target(hello.rank)
        if target is not None:
            self._supervisor.watch(*target)

    def _settle_job(self) -> None:
        """Collect the facts of a job's processes before another job enters the stream."""
        self._facts.collect()
        self._traces.forget()

    def _rank_pids(self) -> dict[int, int]:
        """Return the pids of this host's ranks, by rank; called by the device sampler's thread."""
        return {rank: pid for rank, pid, _ in self._supervisor.alive()}

    def _refuse(self, sender: str, reason: str) -> None:
        self._analysis.put(Finding("messages_refused", RefusedFacts(sender, reason), key=sender))

    def _emit(self, message: Message) -> tuple[int, float]:
        t = time.time()
        if self._notifier is not None:
            self._notifier.note(message)
        if type(message) is RankState:
            self._jobs.state(message)
        return self._stream.put(message, t), t

    # Beginning and end.

    def _report_not_notified(self, target: str, why: str) -> None:
        """Raise a note; called by the notifier's thread."""
        finding = Finding("not_notified", NotNotifiedFacts(target, why), key=target)
        self.post(lambda: self._analysis.put(finding))

    def _announce(self) -> bool:
        """Write the connection file; False if the disk refuses it (each report retries)."""
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

    def _adopt(self, history: list[Frame], damage: DamagedRecordingFacts | None) -> None:
        """Continue where an earlier hub of this run ended."""
        self._jobs.restore(frame.message for frame in history)
        known = of_the_last_job(history)
        for frame in known:
            if isinstance(frame.message, Hello):
                self._meet(frame.message)
        for frame in history:
            self._end_detector.note(frame.message)
        self._analysis.restore(known)
        self._predicting.restore(frame.message for frame in history)
        self._agents.restore(frame.message for frame in history)
        if history:
            last = history[-1].t
            self._analysis.put(Finding("hub_restarted", RestartFacts(last, time.time() - last), severity="info"))
        if damage is not None:
            self._analysis.put(Finding("recording_damaged", damage, severity="error"))
        problem = self._channels.remote.problem
        if problem:
            self._analysis.put(Finding("not_listening", NotListeningFacts(problem), severity="error"))

    def _may_ask(self, verb: str) -> bool:
        """Return whether the hub may send commands to ranks on its own initiative."""
        if verb in ("arm", "compose") and not self._file.options.allocator_events:
            return False
        return not self._read_only

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Not 0, because the end was not requested by a command: the launcher starts another hub.
        self._status = 128 + number
        self._loop.stop()

    def _close(self) -> None:
        if self._notifier is not None:
            self._notifier.close()
            self._mailbox.drain()  # alerts about targets that failed
        self._predicting.close()
        self._traces.close()
        self._history.stop()
        self._supervisor.stop()
        self._devices.close()
        self._host_watch.close()
        self._stream.flush()
        self._stream.close()
        self._channels.close()
        os.close(self._lock)


def _is_first(run: RunDir) -> bool:
    """Return whether no hub of this run has ever served."""
    try:
        return run.read_hub() is None
    except FtmonError:
        return False
