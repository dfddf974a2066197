"""The publisher: one daemon thread that makes messages of the training thread's records.

It polls the command socket 10 times a second and does little work, as it shares the interpreter's lock with the
training. It never queries the allocator: a training thread that is stuck in the driver may hold the allocator's lock.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from ....protocol.link import sockets
from ....protocol.messages import wire
from ....protocol.messages.telemetry import Goodbye, Heartbeat
from .. import guard
from ..device import cuda_graphs
from ..device.events import has_passed
from ..memory.annotations import PhaseMarks
from ..memory.capture_context import CaptureContext
from ..memory.capture_scheduler import CaptureScheduler
from ..memory.history import Recording
from ..memory.snapshots import Snapshots
from ..memory.stack_capture import StackCapture
from ..oom.history import OomHistory
from ..oom.hold import Hold
from ..phases.marks import ClosingRaw, StepRaw
from ..phases.outbox import Outbox
from ..phases.pace import Pace
from ..phases.stop_request import StopRequest
from ..phases.tracker import Tracker
from ..rank.batch_share import COUNTED_ELSEWHERE
from ..rank.context import RankContext
from ..rank.hello import Introduction
from ..rank.trained import Trained
from . import run_files
from .commands import Commands
from .slow_facts import SlowFacts
from .stack_dump import Dumper
from .step_message import closing_message, step_message, without_device

POLL_MS = 100
FLUSH_SECONDS = 5.0
"""Time limit for a hub to receive the last messages, when the rank ends."""
ALONE_SECONDS = 0.5
"""The same without a hub: one may be about to start again."""
LAST_STEPS_SECONDS = 0.25
"""Time limit for the device to pass the last steps, when the rank ends."""
YIELD_SECONDS = 0.0002
BEAT_SECONDS = 1.0
CHANGED_BEAT_SECONDS = 0.1
"""Silence after which a heartbeat reports a change."""
FLOWING_BEAT_SECONDS = 0.5
"""Interval of heartbeats while steps leave no such silence: the last message of a rank that falls silent
then has a recent phase."""
TEND_SECONDS = 1.0


class Publisher(threading.Thread):
    """Sends a rank's messages to the hub of its run, which may not be running.

    Args:
        rank: this rank.
        introduction: contents of its hello.
        trained: engine, model and optimizer that it trains.
        tracker: the phase machine.
        outbox: items from the training thread.
        pace: usual time of a step, filled in here.
        stop: receives a request to stop.
        hold: the rank's hold at an out-of-memory error.
        oom_history: figures of earlier steps, filled in here.
        phase_marks: the phases of the last steps, filled in here.
        last_iterator: returns the dataloader iterator that was fetched from last, while it lives.
    """

    def __init__(
        self,
        rank: RankContext,
        introduction: Introduction,
        trained: Trained,
        tracker: Tracker,
        outbox: Outbox,
        pace: Pace,
        stop: StopRequest,
        hold: Hold,
        oom_history: OomHistory,
        phase_marks: PhaseMarks,
        last_iterator: Callable[[], Any],
    ) -> None:
        super().__init__(name="ftmon-publisher", daemon=True)
        self.dropped = 0
        """Messages that found the queue full, or that could not be made or encoded."""
        self._logged = False
        self._rank = rank
        self._introduction = introduction
        self._trained = trained
        self._tracker = tracker
        self._outbox = outbox
        self._steps = outbox.pending
        self._pace = pace
        self._hold = hold
        self._oom_history = oom_history
        self._phase_marks = phase_marks
        self._sequence = 0
        self._changes = 0.0
        """Progress and hold as of the latest heartbeat, in one number."""
        self._last_beat = 0.0
        self._last_sent = 0.0
        """Times of the latest heartbeat, and of the latest heartbeat or step."""
        self._last_tended = 0.0
        self._closed = False
        """Whether the closing messages have begun: no heartbeat follows."""
        self._ending = threading.Event()
        self._flush_seconds = 0.0
        captures = CaptureContext(rank, tracker, trained, pace, Recording(), self.send)
        self._captures = CaptureScheduler(captures)
        self._snapshots = Snapshots(captures, phase_marks)
        self._stack_capture = StackCapture(captures)
        self._dumper = Dumper(rank.run.logs / f"rank-{rank.rank}.stacks", rank.guard.thread)
        self._commands = Commands(
            rank,
            tracker,
            pace,
            stop,
            hold,
            self._dumper,
            self._snapshots,
            self._stack_capture,
            self._captures,
            outbox.send_hello,
            self.send,
        )
        self._slow_facts = SlowFacts(rank.rank, introduction, tracker, last_iterator)
        self._telemetry: Any = None

    def finish(self) -> None:
        """Send the remaining messages and end; called by the thread that ends the process.

        A hub that receives them is done in milliseconds. The end of the process is delayed by at most
        ``FLUSH_SECONDS`` by a hub that stands still, and by at most ``ALONE_SECONDS`` if there is none.
        """
        is_there = sockets.is_listening(self._rank.run.ipc_address("telemetry"))
        self._flush_seconds = FLUSH_SECONDS if is_there else ALONE_SECONDS
        self._ending.set()
        self.join(self._flush_seconds + 0.1)

    def send(self, message: wire.Message) -> None:
        """Send one message, or count it as dropped; for the publisher thread."""
        self._sequence += 1
        try:
            frames = wire.encode(self._rank.identity, self._sequence, time.time(), message)
            self._telemetry.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.dropped += 1
        except (TypeError, ValueError, OverflowError) as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Count a message that cannot be made or encoded as dropped; the first one is logged."""
        self.dropped += 1
        if not self._logged:
            self._logged = True
            guard.log_error("a message is dropped", error)

    def run(self) -> None:
        """Run until ``finish`` is called."""
        context: zmq.Context[Any] = zmq.Context()
        try:
            identity = self._rank.identity.encode()
            self._telemetry = sockets.peer_socket(context, "telemetry")
            self._telemetry.connect(self._rank.run.ipc_address("telemetry"))
            ranks = sockets.peer_socket(context, "ranks", identity)
            ranks.connect(self._rank.run.ipc_address("ranks"))
            try:
                self._work(ranks)
            finally:
                linger = int(self._flush_seconds * 1000)
                self._telemetry.close(linger)
                ranks.close(linger)  # the answer to a request to stop may be unsent
        except Exception as error:
            self._rank.guard.disable(error)
        finally:
            # Returns once everything is sent, or after the linger if no peer receives it.
            context.term()

    def _work(self, ranks: Any) -> None:
        poller = zmq.Poller()
        poller.register(ranks, zmq.POLLIN)
        is_relaxed = False
        while not self._ending.is_set():
            if not is_relaxed and self._rank.device.events is not None:
                cuda_graphs.allow_queries()
                is_relaxed = True
            if poller.poll(POLL_MS):
                self._commands.receive(ranks)
            self._drain()
            self._send_steps()
            now = time.time()
            beat = self._next_beat(now)
            if beat is not None and not self._closed:
                self.send(beat)
            self._rank.device.memory.tidy()
            self._captures.tick()
            self._snapshots.tick()
            self._hold.tick()
            self._stack_capture.tick()
            if not 0 <= now - self._last_tended < TEND_SECONDS:
                self._last_tended = now
                self._tend()
        self._drain()
        self._send_last_steps()

    def _tend(self) -> None:
        """Restart the agent and the stack handler if they were lost, and send changed facts; once a second."""
        run_files.tend()
        loader = self._slow_facts.loader()
        if loader is not None:
            self._introduction.facts["loader"] = loader
        if self._dumper.lost(self._rank.guard.thread) or loader is not None:
            self.send_hello()
        self._send_compiles()

    def _send_compiles(self) -> None:
        compiles = self._slow_facts.compiles()
        if compiles is not None:
            self.send(compiles)

    def _drain(self) -> None:
        outbox = self._outbox.items
        while outbox:
            item = outbox.popleft()
            if isinstance(item, StepRaw):
                self._steps.append(item)
                # Now, not when the step is sent: a snapshot or the end of a stack capture may precede that.
                self._pace.note((item.marks[-1].ns - item.marks[0].ns) / 1e9)
                self._phase_marks.note(item.number, item.marks)
                self._slow_facts.note_step(item.marks[-1].ns)
            elif item == "hello":
                if not outbox or outbox[0] != "hello":
                    self.send_hello()
            else:
                if isinstance(item, ClosingRaw | Goodbye):
                    self._closed = True
                    self._send_last_steps()
                if isinstance(item, ClosingRaw):
                    self._send_closing(item.raw)
                else:
                    self.send(item)

    def send_hello(self) -> None:
        """Send the rank's hello, and the plan if there is one."""
        introduction = self._introduction
        self.send(introduction.hello(self._dumper.install(self._rank.guard.thread)))
        if introduction.plan is not None:
            self.send(introduction.plan)

    def _send_steps(self) -> None:
        """Send the steps that the device has finished."""
        while self._steps:
            try:
                if not has_passed(self._steps[0].marks[-1].event):
                    return
                raw = self._steps.popleft()
            except RuntimeError:
                # The device is in an error state: missing figures never arrive.
                raw = without_device(self._steps.popleft())
            self._send_step(raw)
            if self._steps:
                # Yields the interpreter's lock: the training thread waits for one step's work at most.
                time.sleep(YIELD_SECONDS)

    def _send_last_steps(self) -> None:
        """Wait briefly for the device to pass the last events; send unfinished steps without device figures."""
        deadline = time.monotonic() + LAST_STEPS_SECONDS
        self._send_steps()
        while self._steps and time.monotonic() < deadline:
            time.sleep(0.005)
            self._send_steps()
        while self._steps:
            self._send_step(without_device(self._steps.popleft()))
        self._send_compiles()
        self._captures.send_ready()

    def _send_closing(self, raw: StepRaw) -> None:
        """Send the record after the last step; called when the process ends."""
        try:
            passed = has_passed(raw.marks[-1].event)
        except RuntimeError:
            passed = False
        read = self._rank.device.memory.read
        try:
            closing = closing_message(raw if passed else without_device(raw), self._rank.rank, read)
        except Exception as error:
            self._drop(error)
            return
        if closing is not None:
            self.send(closing)

    def _send_step(self, raw: StepRaw) -> None:
        rank, device = self._rank.rank, self._rank.device
        dropped = self.dropped + self._outbox.overflowed
        facts = self._introduction.facts
        share = COUNTED_ELSEWHERE if facts.get("pipeline_stage") else self._trained.tensor_parallel
        try:
            step = step_message(raw, rank, device.memory.read, dropped, facts.get("flops"), share)
        except Exception as error:
            self._drop(error)
            return
        self.send(step)
        self._last_sent = time.time()
        self._captures.note_sent(raw.number)
        self._stack_capture.note(step)
        self._oom_history.note(step)
        events = device.events
        if events is not None:
            for mark in raw.marks[:-1]:  # the last one begins the next step
                events.recycle(mark.event)
            for _, begun, ended in raw.notes.waits:
                events.recycle(begun)
                events.recycle(ended)

    def _next_beat(self, now: float) -> Heartbeat | None:
        """Return the heartbeat that is due, or None."""
        tracker, counts = self._tracker, self._tracker.counts
        progress = tracker.progress + counts.entered
        changes = progress + self._hold.since  # a rank that is held, or released, reports at once
        quiet, since = now - self._last_sent, now - self._last_beat
        if changes == self._changes:
            if 0 <= quiet < BEAT_SECONDS:
                return None
        elif 0 <= quiet < CHANGED_BEAT_SECONDS and 0 <= since < FLOWING_BEAT_SECONDS:
            return None
        self._changes, self._last_sent, self._last_beat = changes, now, now
        reading = self._rank.device.memory.read(tracker.sample)
        return Heartbeat(
            rank=self._rank.rank,
            step=tracker.step + 1,
            phase=tracker.phase,
            phase_started=now - (time.perf_counter_ns() - tracker.phase_ns) / 1e9,
            progress=progress,
            time=now,
            micro_step=tracker.notes.micro_steps + tracker.notes.repeats,
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
            dropped=self.dropped + self._outbox.overflowed,
            held_since=self._hold.since,
        )
