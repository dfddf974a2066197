"""The publisher: one daemon thread that makes messages of the training thread's records.

It polls the command socket 10 times a second and does little work, as it shares the interpreter's lock with the
training: that of short steps while a backward runs, which needs the lock least. It never queries the allocator: a
training thread that is stuck in the driver may hold the allocator's lock.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import zmq

from ....protocol.host.machine import ModelFlops, causal_pairs_of_rows
from ....protocol.link import sockets
from ....protocol.messages import wire
from ....protocol.messages.telemetry import (
    Closing,
    Compilation,
    Compiles,
    DataLoaderInfo,
    Goodbye,
    Heartbeat,
    PhaseRecord,
    Span,
    Step,
)
from .. import guard
from ..device import cuda
from ..device.cuda import elapsed_us, has_passed
from ..device.memory import Reading
from ..loop.regular import SPARE_NOTES, Followed
from ..loop.training import Training
from ..memory.capture_scheduler import CaptureScheduler
from ..memory.snapshots import CaptureContext, PhaseMarks, Recording, Snapshots
from ..memory.stacks import StackCapture
from ..oom.console import Hold
from ..oom.report import OomHistory
from ..phases.budget import Unusual
from ..phases.tracker import (
    ClosingRaw,
    Mark,
    Notes,
    Pace,
    Reads,
    StepRaw,
    StopRequest,
    Tracker,
    first_of_step,
    lend_events,
    readings,
    wall_offset_ns,
)
from ..rank.context import COUNTED_ELSEWHERE, WHOLE, BatchShare, Introduction
from ..values import batch, losses
from ..values.signs import SignReader
from . import output
from .commands import Captures, Commands
from .stacks import Dumper

IDLE_SHARE = 0.05
IDLE_BYTES = 16 * 2**20
"""Time between phases gets a record of its own when it is this share of the step, or moved this much memory."""

MOST_UPDATES = 32
_FIGURES = (0, 2, 4, 6, 8)
"""Indexes in ``Reading`` of allocated, reserved, active, requested and resident; the peak of each is next to it."""


class _Phase:
    """One phase under construction. ``figures``: start, end and peak of allocated, reserved, active and so on."""

    def __init__(self, name: str, start_ns: int, at_start: Reading) -> None:
        self.name = name
        self.start_ns = start_ns
        self.host_ns = 0
        self.device_us: int | None = None
        self.waited_us: int | None = None
        self.count = 0
        self.allocations = self.frees = self.allocated_bytes = 0
        self.coarse = False
        self._stretch: list[Reading] = []
        self.collectives = self.collective_ns = 0
        self.figures = [[at_start[place], -1, -1] for place in _FIGURES]

    def add(self, marks: list[Mark], readings: list[Reading], coarse: bool) -> None:
        """Add one occurrence: from the first mark to the last, peaks taken from all readings but the first.

        ``coarse``: the readings are those around a longer stretch.
        """
        first, last = marks[0], marks[-1]
        start, end = readings[0], readings[-1]
        self.count += 1
        self.host_ns += last.ns - first.ns
        spent = elapsed_us(first.event, last.event)
        if spent is not None:
            self.device_us = (self.device_us or 0) + spent
        self.collectives += last.collectives - first.collectives
        self.collective_ns += last.collective_ns - first.collective_ns
        if coarse:
            self.coarse = True
            if readings is self._stretch:
                return
            self._stretch = readings
        else:
            if end.allocations > start.allocations:  # also guards against counters that the script has reset
                self.allocations += end.allocations - start.allocations
                self.allocated_bytes += max(0, end.allocated_bytes - start.allocated_bytes)
            self.frees += max(0, end.frees - start.frees)
        for place, figure in zip(_FIGURES, self.figures, strict=True):
            figure[1] = now = end[place]
            highest = end[place + 1]  # ifs, not max(): this is most of the publisher's work
            if now > highest:
                highest = now
            if start[place] > highest:
                highest = start[place]
            if highest > figure[2]:
                figure[2] = highest
        for between in readings[1:-1]:
            for place, figure in zip(_FIGURES, self.figures, strict=True):
                figure[2] = max(figure[2], between[place + 1])

    def record(self, origin_ns: int) -> PhaseRecord:
        """Return the phase as part of a message."""
        allocated, reserved, active, requested, resident = self.figures
        return PhaseRecord(
            self.name,
            (self.start_ns - origin_ns) // 1000,
            self.host_ns // 1000,
            Span(*allocated),
            Span(*reserved),
            self.device_us,
            _span(active),
            _span(requested),
            _span(resident),
            self.count,
            self.allocations,
            self.frees,
            self.allocated_bytes,
            self.collective_ns // 1000,
            self.collectives,
            self.waited_us,
            self.coarse,
        )


def step_message(
    raw: StepRaw,
    rank: int,
    read: Callable[[Any], Reading],
    dropped: int,
    flops: ModelFlops | None = None,
    share: BatchShare = WHOLE,
    signs: SignReader | None = None,
) -> Step:
    """Return a step's message, with all occurrences of a phase in one record. Its device events must have passed.

    A step begins at the end of the previous one. The first step begins at the end of the ``init`` phase, and has its
    record with a negative ``start_us``. ``share`` is this rank's part of the batches; what the loop counts itself
    (``notes.counts``) is the rank's own. ``signs`` examines its batches and weights.
    """
    times = _phase_records(raw, read)
    host_us, notes, last = times.host_us, raw.notes, times.last
    loss = losses.step_loss(notes)  # before micro_steps, which it corrects
    updates = losses.updates(notes)
    own = updates.get(notes.owner)
    if own is not None and loss is None:
        loss = own.loss if own.loss is not None else _first([each.loss for each in updates.values()])
    norm = cuda.read(notes.grad_norm) if own is None else own.grad_norm
    if own is not None and own.loss is None:  # one clipping and one backward were for several: the first has its norm
        norm = _first([norm, *(each.grad_norm for each in updates.values())])
    lr, overflow = cuda.read(notes.lr) if own is None else own.lr, bool(cuda.read(notes.overflow))
    share = WHOLE if notes.counts else share
    if notes.counts:
        tokens, labels = sum(count.tokens for count in notes.counts), sum(count.label_tokens for count in notes.counts)
    else:
        tokens = sum(cuda.read_count(count) for count in notes.tokens if count is not None)
        labels = sum(map(batch.count_labels, notes.labels)) if len(notes.labels) == notes.micro_steps else 0
    batch_id, found = signs.of_step(raw.number, notes, raw.every) if signs is not None else (0, None)
    batch_id = 0 if share.place or not share.ranks else batch_id  # of ranks that share a batch the first one tells it
    return Step(
        rank=rank,
        step=raw.number,
        started=raw.ended - host_us / 1e6,
        host_us=host_us,
        phases=times.phases,
        device_us=times.device_us,
        micro_steps=max(1, notes.micro_steps),
        loss=loss,
        lr=lr,
        grad_norm=norm,
        loss_scale=cuda.read(notes.loss_scale) if own is None else own.loss_scale,
        overflow=overflow,
        batch_shape=notes.shape,
        samples=share.of(_samples(notes)),
        tokens=share.of(tokens),
        padded_tokens=share.of(notes.padded_tokens),
        label_tokens=labels,
        retries=last.retries,
        ooms=last.ooms,
        probe_us=raw.cost_ns // 1000,
        dropped=dropped,
        updates=list(updates.values())[:MOST_UPDATES],
        cpu_us=raw.cpu_ns // 1000,
        flops=_flops(notes, tokens, flops, share),
        fetch_us=notes.fetch_ns // 1000 if notes.fetches else None,
        batch_id=batch_id,
        signs=found,
        memory_every=raw.every,
    )


def _first(figures: Iterable[float | None]) -> float | None:
    return next((figure for figure in figures if figure is not None), None)


def _samples(notes: Notes) -> int:
    counted = [count.samples for count in notes.counts if count.samples is not None]
    return sum(counted) if counted and len(counted) == len(notes.counts) else notes.samples


def _flops(notes: Notes, tokens: int, flops: ModelFlops | None, share: BatchShare) -> float:
    """Return the FLOPs of the model for a step; 0 where they are not known, as for several models."""
    if notes.flops is not None:
        return notes.flops
    if flops is None or notes.parts or not tokens or not share.ranks:
        return 0.0
    if notes.counts and all(count.pairs for count in notes.counts):
        return flops.of(tokens, sum(count.pairs for count in notes.counts), max(each.longest for each in notes.counts))
    rows = notes.samples
    return flops.of(tokens, causal_pairs_of_rows(tokens, rows), tokens // rows if rows else 0) / share.ranks


def closing_message(raw: StepRaw, rank: int, read: Callable[[Any], Reading]) -> Closing | None:
    """Return the message of a rank's phases after its last step, whose number ``raw`` has; None: nothing notable.

    Its device events must have passed.
    """
    times = _phase_records(raw, read)
    phases = [record for record in times.phases if record.name != "idle" or _moves(record)]
    if not phases:
        return None
    started = raw.ended - times.host_us / 1e6
    return Closing(rank, raw.number, started, times.host_us, phases, times.device_us)


class _Times(NamedTuple):
    host_us: int
    device_us: int | None
    phases: list[PhaseRecord]
    last: Reading


def _phase_records(raw: StepRaw, read: Callable[[Any], Reading]) -> _Times:
    marks = lend_events(raw.marks)
    figures = [] if raw.coarse else readings(marks, read)
    reads = Reads(marks, read) if raw.coarse else None
    first = first_of_step(marks)
    origin = marks[first]
    host_us = (marks[-1].ns - origin.ns) // 1000
    phases: dict[str, _Phase] = {}
    start = 0
    for end in range(1, len(marks)):
        if marks[end].phase in ("", marks[start].phase) and end + 1 < len(marks):
            continue  # the same phase goes on
        name = marks[start].phase if start >= first else "init"
        around, coarse = (figures[start : end + 1], False) if reads is None else reads.around(start, end)
        if name not in phases:
            phases[name] = _Phase(name, marks[start].ns, around[0])
        phases[name].add(marks[start : end + 1], around, coarse)
        start = end
    for name, begun, ended in raw.notes.waits:
        waited, phase = elapsed_us(begun, ended), phases.get(name)
        if waited is not None and phase is not None:
            phase.waited_us = (phase.waited_us or 0) + waited
    records = [phase.record(origin.ns) for phase in phases.values()]
    least_us = host_us * IDLE_SHARE
    shown = [each for each in records if each.name != "idle" or each.host_us >= least_us or _moves(each)]
    last = figures[-1] if reads is None else reads.last
    return _Times(host_us, elapsed_us(origin.event, marks[-1].event), shown, last)


def first_has_passed(steps: Sequence[StepRaw]) -> bool:
    """Return whether the device has passed the first of some steps, and what is copied from it is here.

    What a block's steps left on the device is copied after their events. Whether a number is here is seen by its bytes;
    after an event that follows its copy it counts as here.
    """
    raw, notes = steps[0], steps[0].notes
    event = raw.marks[-1].event
    if event is not None and not has_passed(event):
        return False
    values = (*notes.losses, notes.grad_norm, notes.loss_scale, notes.overflow, notes.lr)
    if not raw.followed or cuda.arrived(values):
        return True
    if not all(each.arrived() for each in values if isinstance(each, cuda.Kept)):
        return False
    events = (each.marks[-1].event for each in steps)
    later = next((each for each in events if each is not None), None)
    return later is not None and has_passed(later)


def without_device(raw: StepRaw) -> StepRaw:
    """Return a step without the values that the device has not delivered: times, and numbers copied from it."""
    notes = raw.notes
    for name in ("losses", "reported", "trainer_losses"):
        setattr(notes, name, list(filter(_is_here, getattr(notes, name))))
    notes.labels, notes.weights, notes.received, notes.attended = [], None, [], []
    notes.weights_before, notes.gradients, notes.targets = None, None, []
    notes.seen = [each._replace(of_loss=None) for each in notes.seen]
    notes.tokens = [count for count in notes.tokens if not isinstance(count, cuda.Fetched)]
    for part in (notes, *notes.parts.values()):
        for name in ("lr", "grad_norm", "loss_scale"):
            if not isinstance(getattr(part, name), int | float):
                setattr(part, name, None)
    for part in notes.parts.values():
        part.losses = [list(filter(_is_here, losses)) for losses in part.losses]
    notes.waits = []
    return raw._replace(marks=[mark._replace(event=None) for mark in raw.marks])


def _moves(idle: PhaseRecord) -> bool:
    peak = idle.peak_span
    return not idle.coarse and (peak.transient >= IDLE_BYTES or abs(peak.growth) >= IDLE_BYTES)


def _is_here(value: Any) -> bool:
    return not isinstance(value, cuda.ON_ITS_WAY)


def _span(figures: list[int]) -> Span | None:
    return Span(*figures) if figures[1] >= 0 else None


_REASON = 400
_MOST = 32


class SlowFacts:
    """Reads slowly changing facts once a second, at no cost to the training thread.

    The DataLoader's settings come from the iterator that the training thread fetched from last, compilations from
    Dynamo's metrics (``torch._dynamo.utils``), which this module never imports.
    """

    def __init__(
        self, rank: int, introduction: Introduction, tracker: Tracker, last_iterator: Callable[[], Any]
    ) -> None:
        self._rank, self._introduction, self._tracker = rank, introduction, tracker
        self._last_iterator = last_iterator
        self._last: Any = None
        self._total = 0
        self._trained_since = 0.0

    def loader(self) -> DataLoaderInfo | None:
        """Return the settings of the training's DataLoader if they have changed, else None."""
        iterator = self._last_iterator()
        if iterator is None or getattr(iterator, "_ftmon_eval", False):
            return None
        found = loader_info(iterator)
        if found is None or found == self._introduction.facts.get("loader"):
            return None
        return found

    def note_step(self, ended_ns: int) -> None:
        """Record when the first step ended (``time.perf_counter_ns``): earlier compilations are the run's warm-up."""
        if not self._trained_since:
            self._trained_since = (ended_ns + wall_offset_ns()) / 1e9

    def compiles(self) -> Compiles | None:
        """Return Dynamo's compilations since the last call; None: none."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        kept = getattr(utils, "_compilation_metrics", None)
        if not kept:
            return None
        try:
            metrics = list(kept)
        except RuntimeError:  # the training thread is adding one
            return None
        fresh = list(takewhile(lambda one: one is not self._last, reversed(metrics)))[::-1]
        self._last = metrics[-1]
        functions = [found for one in fresh if (found := self._compilation(one)) is not None]
        self._total += len(functions)
        return Compiles(self._rank, time.time(), self._total, functions[-_MOST:]) if functions else None

    def _compilation(self, metrics: Any) -> Compilation | None:
        name = getattr(metrics, "co_name", None)
        if not name:
            return None
        began = (getattr(metrics, "start_time_us", None) or 0) / 1e6
        warm_up = not self._trained_since or began < self._trained_since
        file = os.path.basename(str(getattr(metrics, "co_filename", "") or "?"))
        return Compilation(
            f"{name} ({file}:{getattr(metrics, 'co_firstlineno', 0)})"[:200],
            1 if warm_up else self._tracker.step + 1,
            float(getattr(metrics, "entire_frame_compile_time_s", None) or 0.0),
            str(getattr(metrics, "recompile_reason", None) or "")[:_REASON],
            str(getattr(metrics, "fail_type", None) or "")[:100],
        )


_ITERABLE = 1
"""``torch.utils.data.dataloader._DatasetKind.Iterable``."""


def loader_info(iterator: Any) -> DataLoaderInfo | None:
    """Return the settings of an iterator of PyTorch's DataLoader; None for other iterators."""
    workers = getattr(iterator, "_num_workers", None)
    if workers is None:
        return None
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return DataLoaderInfo(
        int(workers),
        int(getattr(iterator, "_prefetch_factor", None) or 0) if workers else 0,
        bool(getattr(iterator, "_pin_memory", False)),
        bool(getattr(iterator, "_persistent_workers", False)),
        max(1, len(os.sched_getaffinity(0)) // ranks),
        getattr(iterator, "_dataset_kind", 0) == _ITERABLE,
    )


POLL_MS = 100
FLUSH_SECONDS = 5.0
"""Time limit for a hub to receive the last messages, when the rank ends."""
ALONE_SECONDS = 0.5
"""The same without a hub: one may be about to start again."""
LAST_STEPS_SECONDS = 0.25
"""Time limit for the device to pass the last steps, when the rank ends."""
YIELD_SECONDS = 0.0002
YIELD_EVERY = 4
"""Coarse steps between two yields of the interpreter's lock; after every other step there is one."""
BACKWARD_SECONDS = 0.05
"""Time that coarse steps wait for a backward."""
TOGETHER_SECONDS = 0.25
MOST_TOGETHER = 16
"""Coarse steps, which are short, are made into messages so long after each other, or so many at once: the interpreter
does the same work in a third of the time if it has just done it."""
BEAT_SECONDS = 1.0
CHANGED_BEAT_SECONDS = 0.1
"""Silence after which a heartbeat reports a change."""
FLOWING_BEAT_SECONDS = 0.5
"""Interval of heartbeats while steps leave no such silence: the last message of a rank that falls silent
then has a recent phase."""
TEND_SECONDS = 1.0


class Publisher(threading.Thread):
    """Sends a rank's messages to the hub of its run, which may not be running."""

    def __init__(
        self,
        training: Training,
        pace: Pace,
        stop: StopRequest,
        hold: Hold,
        oom_history: OomHistory,
        phase_marks: PhaseMarks,
    ) -> None:
        super().__init__(name="ftmon-publisher", daemon=True)
        self.dropped = 0
        """Messages that found the queue full, or that could not be made or encoded."""
        self._logged = False
        self._rank = rank = training.rank
        self._introduction, self._trained = training.introduction, training.trained
        self._signs, self._loading = training.signs, training.loading
        self._tracker = tracker = training.tracker
        self._outbox = outbox = training.outbox
        self._steps, self._regular = outbox.pending, training.regular
        self._unfetched: deque[Followed] = deque()
        """Blocks whose losses are still on the device."""
        self._pace, self._hold = pace, hold
        self._unusual = Unusual()
        self._oom_history, self._phase_marks = oom_history, phase_marks
        self._sequence = 0
        self._changes = 0.0
        """Progress and hold as of the latest heartbeat, in one number."""
        self._last_beat = self._last_sent = self._last_steps = self._last_tended = 0.0
        """Times of the latest heartbeat, of the latest heartbeat or step, and of ``_tend``."""
        self._closed = False
        """Whether the closing messages have begun: no heartbeat follows."""
        self._ending = threading.Event()
        self._flush_seconds = 0.0
        captures = CaptureContext(rank, tracker, training.trained, pace, Recording(), self.send)
        self._captures = Captures(CaptureScheduler(captures), Snapshots(captures, phase_marks), StackCapture(captures))
        self._dumper = Dumper(rank.run.logs / f"rank-{rank.rank}.stacks", rank.guard.thread)
        self._commands = Commands(captures, self._captures, stop, hold, self._dumper, outbox.send_hello)
        self._slow_facts = SlowFacts(rank.rank, self._introduction, tracker, training.loading.last_iterator)
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

    def capture_first(self) -> None:
        """Begin the capture of the first step, before the thread starts."""
        self._captures.steps.tick()

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
                cuda.allow_queries()
                is_relaxed = True
            if poller.poll(POLL_MS):
                self._commands.receive(ranks)
            if self._outbox.items and isinstance(self._outbox.items[0], Followed):
                self._regular.await_backward(BACKWARD_SECONDS)
            self._drain()
            now = time.time()
            if self._is_due(now):
                self._send_steps()
            beat = self._next_beat(now)
            if beat is not None and not self._closed:
                self.send(beat)
            self._captures.tick()
            self._hold.tick()
            if not 0 <= now - self._last_tended < TEND_SECONDS:
                self._last_tended = now
                self._tend()
        self._drain()
        self._send_last_steps()

    def _tend(self) -> None:
        """Restart the agent and the stack handler if they were lost, and send changed facts; once a second."""
        self._rank.device.memory.tidy()
        output.tend()
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
        outbox, spare = self._outbox.items, self._regular.spare
        self._fetch()
        while len(spare) < SPARE_NOTES and self._steps and self._steps[-1].followed:
            spare.append(Notes())
        while outbox:
            item = outbox.popleft()
            if isinstance(item, Followed):
                self._unfetched.append(item)
                self._fetch()
                steps = item.steps()
                cost_ns = sum(raw.cost_ns for raw in steps) // max(1, len(steps))
                for raw in steps:
                    self._tracker.budget.note_followed(cost_ns, raw.marks[-1].ns - raw.marks[0].ns)
                    self._note_step(raw)
            elif isinstance(item, StepRaw):
                self._note_step(item)
            elif item == "hello":
                if not outbox or outbox[0] != "hello":
                    self.send_hello()
            else:
                if isinstance(item, ClosingRaw | Goodbye):
                    self._closed = True
                    self._send_last_steps()
                if isinstance(item, ClosingRaw):
                    self._captures.steps.tick()
                    self._send_closing(item.raw)
                else:
                    self.send(item)

    def _fetch(self) -> None:
        """Begin to copy the losses of blocks; later, if a CUDA graph is captured."""
        while self._unfetched and self._regular.fetch(self._unfetched[0]):
            self._unfetched.popleft()

    def _note_step(self, raw: StepRaw) -> None:
        self._steps.append(raw)
        # Now, not when the step is sent: a snapshot or the end of a stack capture may precede that.
        self._pace.note((raw.marks[-1].ns - raw.marks[0].ns) / 1e9)
        self._phase_marks.note(raw.number, raw.marks)
        self._slow_facts.note_step(raw.marks[-1].ns)

    def send_hello(self) -> None:
        """Send the rank's hello, and the plan if there is one."""
        introduction = self._introduction
        self.send(introduction.hello(self._dumper.install(self._rank.guard.thread)))
        if introduction.plan is not None:
            self.send(introduction.plan)

    def _is_due(self, now: float) -> bool:
        steps = self._steps
        waits = bool(steps) and steps[-1].coarse and len(steps) < MOST_TOGETHER
        return not (waits and 0 <= now - self._last_steps < TOGETHER_SECONDS)

    def _send_steps(self) -> None:
        self._last_steps, sent = time.time(), 0
        waits = not self._ending.is_set()
        while self._steps:
            if waits and self._steps[0].coarse:
                waits = self._regular.await_backward(BACKWARD_SECONDS)
            try:
                if not first_has_passed(self._steps):
                    return
                raw = self._steps.popleft()
            except RuntimeError:
                # The device is in an error state: missing figures never arrive.
                raw = without_device(self._steps.popleft())
            self._send_step(raw)
            sent += 1
            if self._steps and not (raw.coarse and (waits or sent % YIELD_EVERY)):
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
        self._captures.steps.send_ready()

    def _send_closing(self, raw: StepRaw) -> None:
        try:
            passed = has_passed(raw.marks[-1].event)
        except RuntimeError:
            passed = False
        try:
            raw = raw if passed else without_device(raw)
            closing = closing_message(raw, self._rank.rank, self._rank.device.memory.read)
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
            step = step_message(raw, rank, device.memory.read, dropped, facts.get("flops"), share, self._signs)
        except Exception as error:
            self._drop(error)
            return
        self.send(step)
        self._last_sent = time.time()
        self._captures.steps.note_sent(raw.number)
        self._captures.stacks.note(step)
        self._oom_history.note(step)
        if self._unusual.is_so(step):
            self._tracker.budget.suspect()
        events = device.events
        if events is not None:
            for mark in raw.marks[:-1]:  # the last one begins the next step
                events.recycle(mark.event)
            for _, begun, ended in raw.notes.waits:
                events.recycle(begun)
                events.recycle(ended)

    def _next_beat(self, now: float) -> Heartbeat | None:
        tracker, counts, at = self._tracker, self._tracker.counts, self._tracker.now()
        progress = at.progress + counts.entered
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
            phase=at.phase,
            phase_started=now - (time.perf_counter_ns() - at.since_ns) / 1e9,
            progress=progress,
            time=now,
            micro_step=at.micro_steps,
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
            left_out=self._loading.left_out,
        )
