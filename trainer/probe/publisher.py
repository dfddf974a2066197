"""The publisher: one daemon thread that turns what the training thread left behind into messages.

It sleeps in a poll of the command socket, 10 times a second, and does little when awake: it shares the interpreter's
lock with the training. It never asks the allocator for its figures, because the lock it would need may be held by a
training thread that is stuck in the driver.
"""

import threading
import time
from typing import TYPE_CHECKING, Any

import zmq

from ...protocol import sockets, wire
from ...protocol.rundir import RunDir
from ...protocol.telemetry import Heartbeat
from . import place
from .allocator import AllocatorWatch
from .arming import Arming
from .commands import Commands
from .events import has_passed
from .fold import fold, without_device
from .pace import Pace
from .raw import StepRaw
from .recording import Recording
from .selfdump import Dumper
from .snapshots import Snapshots

if TYPE_CHECKING:
    from .probe import Probe

POLL_MS = 100
YIELD_SECONDS = 0.0002
BEAT_SECONDS = 1.0
CHANGED_BEAT_SECONDS = 0.1
"""Of silence, before a heartbeat says that something has changed."""
FLOWING_BEAT_SECONDS = 0.5
"""Between two heartbeats where steps leave no such silence: a rank that can say no more was last heard of in a phase
that it was in lately."""
TEND_SECONDS = 1.0


class Publisher(threading.Thread):
    """Sends a probe's messages to the hub of ``run``, which may not be there yet, or not any more."""

    def __init__(self, probe: "Probe", run: str) -> None:
        super().__init__(name="ftmon-publisher", daemon=True)
        self.dropped = 0
        """Messages that found the queue full."""
        self._probe = probe
        self._run = RunDir(run)
        self._steps = probe.folding
        self._sequence = 0
        self._changes = 0.0
        """What the latest heartbeat told of."""
        self._beaten = 0.0
        self._spoken = 0.0
        """When the latest heartbeat, and the latest heartbeat or step, was sent."""
        self._tended = 0.0
        self._ending = threading.Event()
        self._flush_seconds = 0.0
        self._pace = Pace()
        self._recording = Recording()
        self._allocator = AllocatorWatch(probe, self._recording, self.send)
        self._snapshots = Snapshots(probe, self._run, self._recording, self.send)
        self._arming = Arming(probe, self._recording, self.send)
        self._commands = Commands(probe, self._run, self._snapshots, self._arming, self._allocator, self.send)
        self._dumper = Dumper(self._run.logs / f"rank-{probe.about.rank}.stacks", probe.thread)
        self._telemetry: Any = None

    def finish(self, seconds: float) -> None:
        """Send what is left and end, within ``seconds``; called by the thread that ends the process."""
        self._flush_seconds = seconds
        self._ending.set()
        self.join(seconds + 0.1)

    def send(self, message: wire.Message) -> None:
        """Send one message, or count it as dropped; for the publisher thread."""
        self._sequence += 1
        frames = wire.encode(self._probe.about.identity, self._sequence, time.time(), message)
        try:
            self._telemetry.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.dropped += 1

    def run(self) -> None:
        """Run until told to end."""
        context: zmq.Context[Any] = zmq.Context()
        try:
            identity = self._probe.about.identity.encode()
            self._telemetry = sockets.peer_socket(context, "telemetry")
            self._telemetry.connect(self._run.ipc_address("telemetry"))
            ranks = sockets.peer_socket(context, "ranks", identity)
            ranks.connect(self._run.ipc_address("ranks"))
            try:
                self._work(ranks)
            finally:
                self._telemetry.close(linger=int(self._flush_seconds * 1000))
                ranks.close(linger=0)
        except Exception as error:
            self._probe.disable(error)
        finally:
            # Ends at once when everything is sent, after the linger when nobody takes it.
            context.term()

    def _work(self, ranks: Any) -> None:
        poller = zmq.Poller()
        poller.register(ranks, zmq.POLLIN)
        while not self._ending.is_set():
            if poller.poll(POLL_MS):
                self._commands.take(ranks)
            self._drain()
            self._send_steps()
            now = time.time()
            self._beat(now)
            self._probe.device.memory.tidy()
            self._allocator.tick()
            self._snapshots.tick()
            self._probe.hold.tick()
            self._arming.tick()
            if not 0 <= now - self._tended < TEND_SECONDS:
                self._tended = now
                self._tend()
        self._drain(before_goodbye=self._send_last_steps)

    def _tend(self) -> None:
        """See, once a second, that what may be lost is there: the agent, and the handler that writes stacks."""
        place.tend()
        if self._dumper.lost(self._probe.thread):
            self.say_hello()

    def _drain(self, before_goodbye: Any = None) -> None:
        outbox = self._probe.outbox
        while outbox:
            item = outbox.popleft()
            if isinstance(item, StepRaw):
                self._steps.append(item)
            elif item == "hello":
                if not outbox or outbox[0] != "hello":
                    self.say_hello()
            else:
                if before_goodbye is not None:
                    before_goodbye()
                self.send(item)

    def say_hello(self) -> None:
        """Introduce the rank, with the plan when there is one."""
        probe = self._probe
        probe.self_dump = self._dumper.install(probe.thread)
        about, device = probe.about, probe.device
        self.send(about.hello(device.info, device.memory.measure, probe.sends_logs, probe.self_dump))
        if probe.plan_message is not None:
            self.send(probe.plan_message)

    def _send_steps(self) -> None:
        while self._steps:
            try:
                if not has_passed(self._steps[0].marks[-1].event):
                    return
                raw = self._steps.popleft()
            except RuntimeError:
                # The device is in an error state: what it has not told by now it never will.
                raw = without_device(self._steps.popleft())
            self._send_step(raw)
            if self._steps:
                # Lets the training thread have the interpreter's lock: it waits for one step's work at most.
                time.sleep(YIELD_SECONDS)

    def _send_last_steps(self) -> None:
        """Give the device a moment to pass the last events; what has not passed then goes without device figures."""
        deadline = time.monotonic() + self._flush_seconds / 2
        while self._steps and time.monotonic() < deadline:
            self._send_steps()
            if self._steps:
                time.sleep(0.005)
        while self._steps:
            self._send_step(without_device(self._steps.popleft()))
        self._allocator.send_ready()

    def _send_step(self, raw: StepRaw) -> None:
        probe = self._probe
        dropped = self.dropped + probe.overflowed
        step = fold(raw, probe.about.rank, probe.device.memory.read, dropped)
        self.send(step)
        self._spoken = time.time()
        probe.step_sent = raw.number
        self._pace.note((raw.marks[-1].ns - raw.marks[0].ns) / 1e9)
        probe.step_seconds = self._pace.usual
        self._arming.note(step)
        probe.oom_history.note(step)
        probe.phase_marks.note(raw.number, raw.marks)
        events = probe.device.events
        if events is not None:
            for mark in raw.marks[:-1]:  # the last one begins the next step
                events.recycle(mark.event)

    def _beat(self, now: float) -> None:
        probe = self._probe
        tracker, counts = probe.tracker, probe.tracker.counts
        progress = tracker.progress + counts.entered
        changes = progress + probe.hold.since  # a rank that is held, or let go, says so at once
        quiet, since = now - self._spoken, now - self._beaten
        if changes == self._changes:
            if 0 <= quiet < BEAT_SECONDS:
                return
        elif 0 <= quiet < CHANGED_BEAT_SECONDS and 0 <= since < FLOWING_BEAT_SECONDS:
            return
        self._changes, self._spoken, self._beaten = changes, now, now
        reading = probe.device.memory.read(tracker.sample)
        self.send(
            Heartbeat(
                rank=probe.about.rank,
                step=tracker.step + 1,
                phase=tracker.phase,
                phase_started=now - (time.perf_counter_ns() - tracker.phase_ns) / 1e9,
                progress=progress,
                time=now,
                micro_step=tracker.notes.micro_steps,
                collectives=counts.entered,
                collective=counts.in_flight,
                last_collective=counts.last,
                step_collectives=max(0, counts.entered - tracker.step_collectives),
                group=counts.group,
                group_sequence=counts.sequence,
                size=counts.size,
                allocated=reading.allocated,
                reserved=reading.reserved,
                resident=max(0, reading.resident),
                dropped=self.dropped + probe.overflowed,
                held_since=probe.hold.since,
            )
        )
