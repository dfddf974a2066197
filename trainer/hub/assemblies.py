"""The five assemblies of a hub: intake, judge, act, watch host, end. Each connects itself to those before it.

Intake receives messages and records them, judge draws conclusions from them, act sends commands, the host watch reads
this host's processes, devices and logs, and end finishes the run.
"""

import os
import socket
import sys
import time

from ...protocol.analysis.findings.finding import Finding
from ...protocol.analysis.hub_facts import NotNotifiedFacts, RefusedFacts
from ...protocol.errors import FtmonError
from ...protocol.messages.control import HubStats, RankState
from ...protocol.messages.memory import StepTrace
from ...protocol.messages.telemetry import Closing, DeviceSample, Failure, Goodbye, Hello, LogLine, Plan, Step
from ...protocol.messages.wire import Frame, Message
from ...protocol.run.notices import read_notify
from ...protocol.run.rundir import ExitFile, RunDir
from ..host import processes
from ..host.hardware.watch import DeviceSampler, HostWatch
from ..host.log_tail import LogTail
from ..host.supervisor import Supervisor
from .agents import Agents
from .analyses import PredictionProcess, TraceAnalysis
from .commands import Actions, Commands, Kills
from .core import Core, of_the_last_job
from .detect import Leftovers, MissingRanks, PortWatch, ProcessFacts, Unhooked
from .end import EndDetector, RunEnd
from .foreign import ForeignRanks
from .hang_policy import HangPolicy
from .history import Commits, HistoryServer
from .inspection import HostInspection, StackRequests, StallProbe
from .jobs import JobStream
from .notify import Notifier
from .sockets import PollLoop
from .telemetry import Intake

TRACES_SECONDS = 10.0  # Time limit at a run's end for analysing the traces of captured steps
_RECORDED_SECONDS = 5.0  # Time limit at a run's end for the disk: whoever hears of the end finds it in the recording
_DRAIN = 512  # Maximum messages received per socket before commands are handled again


class WatchAssembly:
    """Watches this host: the ranks' processes, devices, disks and log files."""

    def __init__(self, core: Core) -> None:
        host = socket.gethostname()
        self._core = core
        self.supervisor = Supervisor(lambda: core.post(self.facts.collect))
        self.facts = ProcessFacts(core, self.supervisor)
        self.disks = HostWatch(host, core.run.path, self.supervisor.pids)
        self._devices = DeviceSampler(host, self.supervisor.pids)
        self._logs = LogTail(core.run, core.history.log_offsets)

    def start(self) -> None:
        """Start the threads."""
        for thread in (self.supervisor, self._devices, self.disks):
            thread.start()

    def read_logs(self, last: bool = False) -> None:
        """Emit the new lines of the log files; ``last``: unfinished lines too."""
        for line in self._logs.poll(last=last):
            self._core.emit(line)
            if line.rank < 0 and not last:
                self.supervisor.read_words(line.text)

    def tick(self) -> None:
        """Emit what was observed since the last call."""
        self.read_logs()
        for found in (*self._devices.poll(), *self.disks.poll()):
            self._core.emit(found)
        self.facts.collect()

    def close(self) -> None:
        """End the threads."""
        self.supervisor.stop()
        self._devices.close()
        self.disks.close()


class JudgeAssembly:
    """Assigns each message to its job, appends it to the stream, and judges it."""

    def __init__(self, core: Core, watch: WatchAssembly) -> None:
        self._core = core
        self._watch = watch
        analysis = core.analysis
        launcher = core.file.launcher
        self.end_detector = EndDetector(core.run, core.file)
        self.ports = PortWatch(core.post, analysis.put)
        self.leftovers = Leftovers(
            analysis, lambda: processes.of_run(core.run.path, [], [os.getpid()]), lambda: core.rank_hosts.on_gpu
        )
        self.traces = TraceAnalysis(core.emit, core.post)
        self.unhooked = Unhooked(core.run, launcher.pid if launcher is not None else None, analysis)
        self.jobs = JobStream(core, self.end_detector, self.ports, self.register, self._end_job)
        self._missing_ranks = MissingRanks(analysis, core.rank_hosts, core.file.options.listen)
        self._prediction = PredictionProcess(core.run, core.file, core.emit)
        foreign = core.file.foreign
        self.foreign = ForeignRanks(core, foreign, self.accept, self.end_detector.note) if foreign is not None else None
        self.agents: Agents | None = None  # Agents of other hosts, whose messages ``accept`` receives too
        self.commands: Commands | None = None  # Receives the ``Hello`` of each rank on this host
        core.observers[RankState] = self.jobs.state
        core.observers[LogLine] = self.ports.note

    def accept(self, message: Message, t: float, sender: str, body: bytes) -> None:
        """Process one message of a rank or an agent."""
        kind = type(message)
        if kind is Hello:
            assert isinstance(message, Hello)
            if self.foreign is not None and "ftmon" in message.versions:
                self.foreign.heard(message)
            if not self.jobs.join(message, t):
                return
            t = time.time()  # messages that start its job were appended first: times in the stream do not go back
            self._add_rank(message)
        elif sender in self.jobs.off_stream:
            self.jobs.add(sender, message)
            if kind is not LogLine:
                return
        elif sender not in self._core.rank_hosts.senders:
            if sender.startswith("rank-"):
                self._core.link.identify(sender)
        elif kind is Step:
            assert isinstance(message, Step)
            if self.jobs.step(sender, message, t):
                t = time.time()
        elif kind in (Goodbye, Failure, Closing):
            self.jobs.add(sender, message)
            if isinstance(message, Failure):
                self.ports.note(message)
        if kind is Plan:
            assert isinstance(message, Plan)
            self._watch.disks.disks.note_output(message.rank, message.output_dir)
        if kind is StepTrace:
            self.traces.submit(sender, body)
            return
        if kind is Goodbye or not self.end_detector.stepped:
            self.end_detector.note(message)
        seq = self._core.stream.put(message, t, body)
        self._core.analysis.feed(seq, t, message)

    def register(self, hello: Hello, away: bool = False) -> None:
        """Register the process of a rank in the stream; ``away``: an agent forwarded its ``Hello``."""
        self._core.rank_hosts.register(hello, away)
        self._core.link.register(hello)
        self.end_detector.note(hello)
        target = self._core.rank_hosts.target(hello.rank)
        if target is not None:
            self._watch.supervisor.watch(*target)

    def refuse(self, sender: str, reason: str) -> None:
        """Report a sender whose messages are refused."""
        self._core.analysis.put(Finding("messages_refused", RefusedFacts(sender, reason), key=sender))

    def restore(self, history: list[Frame]) -> None:
        """Continue where an earlier hub of this run ended."""
        self.jobs.restore(frame.message for frame in history)
        known = of_the_last_job(history)
        for frame in known:
            if isinstance(frame.message, Hello):
                self.register(frame.message)
        for frame in history:
            self.end_detector.note(frame.message)
        self._core.analysis.restore(known)
        self._prediction.restore(frame.message for frame in history)

    def tick(self, now: float) -> None:
        """Judge what depends on time; ``now`` is ``time.monotonic``."""
        self._core.analysis.tick(time.time())
        self.jobs.tick()
        self._missing_ranks.tick(now)
        self.unhooked.tick(now, bool(self._core.rank_hosts.senders))
        self.leftovers.tick(now)
        self._prediction.tick(self.end_detector.stepped)
        if self.foreign is not None:
            self.foreign.tick(now)

    def close(self) -> None:
        """End the processes of the analyses."""
        self._prediction.close()
        self.traces.close()

    def _add_rank(self, hello: Hello) -> None:
        self.register(hello, self.agents is not None and self.agents.speaking is not None)
        self._prediction.hello(hello)
        if self.commands is not None and self._core.rank_hosts.target(hello.rank) is not None:
            self.commands.rank_started(hello)

    def _end_job(self) -> None:
        """Collect the facts of a job's processes before another job enters the stream."""
        self._watch.facts.collect()
        self.traces.forget()


class IntakeAssembly:
    """Receives the messages of ranks and agents, commits the stream, and answers the apps' queries."""

    def __init__(self, core: Core, judge: JudgeAssembly) -> None:
        self._core = core
        known = {} if core.writer.received is None and _is_first(core.run) else core.writer.received
        self.intake = Intake(judge.accept, judge.refuse, known, lambda count: self._commits.missed(count))
        self.agents = Agents(
            core.channels.of("agents"), self.intake.receive, core.analysis.fact, core.writer.agent_numbers
        )
        self._sources = [(each, self.agents.receive) for each in self.agents.sockets]
        self._sources += [(each, self.intake.drain) for each in core.channels.of("telemetry")]
        self._traces = judge.traces
        self._measured = time.monotonic(), time.process_time()
        frames = core.history.frames
        last = frames[-1].t if frames else core.file.created
        self._commits = Commits(core.stream, self.agents, core.analysis, self.report, core.post, last)
        self.history = HistoryServer(core.channels.of("query"), core.run.recording, self._commits.then_set)
        self.commit = self._commits.commit
        judge.agents = self.agents
        self.agents.replaced = core.link.rename
        core.stream.recorder.agent_numbers = self.agents.received
        core.stream.recorder.received = self.intake.numbers

    def add_sources(self, loop: PollLoop) -> None:
        """Have the main loop receive from the sockets."""
        for source, receive in self._sources:
            loop.add(source, lambda source=source, receive=receive: receive(source, _DRAIN))

    def after_read(self) -> None:
        """Analyse the steps received in a round of the main loop, and commit if due."""
        self._core.analysis.flush()
        self._commits.commit_when_due()

    def tick(self) -> None:
        """Emit changed states of other hosts."""
        for state in self.agents.tick():
            self._core.emit(state)

    def drain(self) -> None:
        """Receive all messages in flight."""
        for source, receive in self._sources:
            while receive(source, _DRAIN):
                self._core.stream.flush()

    def report(self) -> None:
        """Emit the monitor's own figures; the CPU share covers the time since the last call."""
        (wall, cpu), self._measured = self._measured, (time.monotonic(), time.process_time())
        intake, stream, recorder = self.intake, self._core.stream, self._core.stream.recorder
        stats = HubStats(
            *(time.time(), os.getpid(), intake.received, recorder.writer.recorded, stream.published),
            lost=intake.lost,
            unknown=intake.unknown,
            refused=intake.refused,
            recording_bytes=recorder.bytes,
            recording_error=recorder.error,
            cpu_percent=round(100.0 * (self._measured[1] - cpu) / max(self._measured[0] - wall, 1e-6), 2),
            dropped_traces=self._traces.dropped,
        )
        self._core.emit(stats)

    def finish(self) -> None:
        """Report and commit for the last time."""
        self.report()
        self._commits.commit_all(_RECORDED_SECONDS)


class ActAssembly:
    """Sends commands: of apps, of detectors, and of the hang policy; captures evidence of stalls; notifies."""

    def __init__(self, core: Core, agents: Agents, judge: JudgeAssembly, loop: PollLoop) -> None:
        self._core = core
        inspection = HostInspection(core.access, agents, judge.foreign)
        actions = Actions(core.link, core.emit, self._may_ask)
        core.analysis.act, actions.answered = actions.send, core.analysis.answered
        self._stall_probe = stall_probe = StallProbe(core.access, inspection)
        core.observers[DeviceSample] = stall_probe.sample
        kills = Kills(core, agents, judge.leftovers.note)
        self._hang_policy = HangPolicy(core, stall_probe, kills)
        self.commands = Commands(core, StackRequests(core.access, inspection, stall_probe), kills, loop.stop)
        judge.commands = self.commands
        notify = read_notify(core.run)

        def failed(target: str, why: str) -> None:
            core.post(lambda: core.analysis.put(Finding("not_notified", NotNotifiedFacts(target, why), key=target)))

        self._notifier = notify and Notifier(notify, core.run.id, socket.gethostname(), failed)
        if self._notifier:
            core.notify = self._notifier.note

    def start(self) -> None:
        """Start the thread that notifies."""
        if self._notifier is not None:
            self._notifier.start()

    def add_sources(self, loop: PollLoop) -> None:
        """Have the main loop receive commands and answers."""
        for source in self._core.channels.of("control"):
            loop.add(source, lambda source=source: self.commands.receive(source))
        for source in self._core.channels.of("ranks"):
            loop.add(source, lambda source=source: self._core.link.receive(source))

    def tick(self, now: float) -> None:
        """Probe suspected stalls, act on hangs, expire commands; ``now`` is ``time.monotonic``."""
        self._stall_probe.tick()
        self._hang_policy.tick(now)
        self._core.link.expire()

    def close(self) -> None:
        """Deliver the last notices."""
        if self._notifier is not None:
            self._notifier.close()
            self._core.mailbox.drain()  # alerts about targets that failed

    def _may_ask(self, verb: str) -> bool:
        options = self._core.file.options
        return not options.read_only and (options.allocator_events or verb not in ("arm", "compose"))


class EndAssembly:
    """Detects the run's end, receives the messages still in flight, and appends the end.

    It waits for commands under way, and for processes that a kill could not end.
    """

    def __init__(
        self, core: Core, watch: WatchAssembly, judge: JudgeAssembly, intake: IntakeAssembly, commands: Commands
    ) -> None:
        self._core = core
        self._watch = watch
        self._judge = judge
        self._intake = intake
        self._sequence = RunEnd(
            intake.agents, self._detect, self._finish, lambda now: commands.busy or judge.leftovers.waiting(now)
        )
        self._is_removed = False

    def tick(self, now: float) -> bool:
        """Advance the end once the run has ended; True if the hub may exit. ``now`` is ``time.monotonic``."""
        return self._sequence.tick(now) or self._is_removed

    def _detect(self) -> ExitFile | None:
        """Return the job's end, or None while it is running."""
        try:
            if not self._core.run.path.exists():
                print(f"{self._core.run.path} was removed: there is nothing left to serve", file=sys.stderr)
                self._is_removed = True
                return None
            alive = len(self._watch.supervisor.alive()) + self._intake.agents.ranks_alive
            elsewhere = self._core.rank_hosts.any_elsewhere
            return self._judge.end_detector.poll(alive, elsewhere, self._intake.intake.received)
        except (FtmonError, OSError) as error:
            print(error, file=sys.stderr)
            return None

    def _finish(self, end: ExitFile) -> None:
        """Receive the messages still in flight, then append the run's end."""
        core, judge = self._core, self._judge
        self._intake.drain()
        self._watch.read_logs(last=True)
        judge.ports.finish()
        judge.traces.finish(TRACES_SECONDS)
        core.mailbox.drain()
        self._watch.facts.collect()
        without_step = judge.end_detector.no_step(end, judge.unhooked.found)
        if without_step is not None:
            core.analysis.put(without_step)
        if end.left:
            judge.leftovers.find_at_end()
        core.analysis.ended(end)
        judge.jobs.close()
        self._intake.finish()


def _is_first(run: RunDir) -> bool:
    try:
        return run.read_hub() is None
    except FtmonError:
        return False
