"""PyTorch's recorder of allocations, and memory snapshots on request with the stacks of one whole step.

Writing a snapshot blocks the training, for a second or so on a large model.
"""

import contextlib
import functools
import gc
import inspect
import os
import pickle
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ....protocol.messages import wire
from ....protocol.messages.telemetry import SnapshotTaken
from ....protocol.snapshot.columns import OWN_SPAN
from ..guard import log_error
from ..phases.tracker import Mark, Pace, Tracker, wall_offset_ns
from ..rank.context import RankContext
from ..rank.model import Trained

# The recorder is one per process and has one ring of entries a device. It is on all the time, numbers only (0.4 % of a
# 55 ms step, measured on an H200); with Python stacks it costs 23 %, so these are recorded for single phases or steps.
# The ring's size is never changed without clearing it: PyTorch would then write past its end or out of order. An entry
# uses 150 bytes or so, and a ring that leaves the processor's caches costs half as much again (0.45 ms instead of 0.29
# ms in steps of 4,330 entries, on an H200's host), so its capacity is a step and a half.

MIN_ENTRIES = 2_000
MAX_ENTRIES = 25_000
STEPS_KEPT = 1.5  # Steps that the ring holds: all of a step's allocations explain a failure in its last phase
LONG_ENTRIES = 200_000
STEP_ENTRIES = 100_000  # Capacity for every action of one step and some of its neighbours'; a step has some 15,000

Mode = Literal["off", "numbers", "stacks"]


class Recording:
    """The recorder of this process, which any thread may switch; once the script has switched it, it is left alone."""

    def __init__(self) -> None:
        self._mode: Mode = "off"
        self.cleared = 0  # How often the history was cleared; a reader of a span compares the counts at its ends
        self.keeps_history = False
        """Whether this PyTorch can switch between numbers and stacks without clearing the ring (by its arguments)."""
        self.owner = ""  # Present exclusive user of the recorder: stacks are recorded for one reader at a time
        self.entries = 0
        self._usual = MAX_ENTRIES
        self._can_skip = False
        self._lock = threading.Lock()

    @property
    def mode(self) -> Mode:
        """The probe's present recording."""
        return "off" if self.by_script else self._mode

    @property
    def by_script(self) -> bool:
        """Whether the script has switched the recorder itself, and so owns it from then on."""
        return _by_script

    def claim(self, who: str) -> bool:
        """Acquire the recorder for ``who``; False while another has it."""
        with self._lock:
            if self.owner not in ("", who):
                return False
            self.owner = who
            return True

    def release(self) -> None:
        """Release the recorder."""
        self.owner = ""

    def fit(self, entries: int) -> None:
        """Set the capacity of later rings for numbers from the entries of a step."""
        self._usual = min(MAX_ENTRIES, max(MIN_ENTRIES, int(entries * STEPS_KEPT)))

    def numbers(self, *, whole: bool = False) -> bool:
        """Record sizes and addresses only; return False if the recorder is the script's.

        Right after stacks, which are about to be read, their ring is kept if PyTorch can do that. The long ring is not:
        it is read before. ``whole``: begin a new history with every action, to be read a step later. Requests to free
        are needed because the counters drop a block at its request, also while it waits for another stream.
        """
        options = {"context": None} if whole else {"context": None, **self._fewer()}
        usual = MAX_ENTRIES if self.mode == "stacks" and self.entries == MAX_ENTRIES else self._usual
        return self._switch("numbers", STEP_ENTRIES if whole else usual, options, fresh=whole)

    def stacks(self, *, long: bool = False, frees: bool = False) -> bool:
        """Record with the Python stack of every allocation; return False if the recorder is the script's.

        Requests to free are recorded too, unless only ``long`` is set: a phase's peak is found by them. The history
        continues if PyTorch can do that (``keeps_history``); ``long``: begin a new one, with ``LONG_ENTRIES``.
        ``frees``: record stacks of frees as well.
        """
        options = {"context": "all" if frees else "alloc", "stacks": "python"}
        if long and not frees:
            options |= self._fewer()
        return self._switch("stacks", LONG_ENTRIES if long else MAX_ENTRIES, options, fresh=long)

    def off(self) -> bool:
        """Stop recording and discard the history; return False if the recorder is the script's."""
        with self._lock:
            record = self._recorder()
            if self.by_script:
                return False
            record(None)
            self._mode, self.entries = "off", 0
            self.cleared += 1
            return True

    def read(self, device: int) -> list[dict[str, Any]]:
        """Return the entries of one device, oldest first; 0.6 us each, under the interpreter's lock."""
        traces = self.snapshot()["device_traces"]
        return traces[device] if device < len(traces) else []

    def snapshot(self) -> dict[str, Any]:
        """Return segments and entries of all devices, in PyTorch's form; holds the lock as ``read`` does."""
        core: Any = torch._C
        collects = gc.isenabled()
        gc.disable()  # it would traverse all objects of the script, repeatedly, without garbage to find
        try:
            return core._cuda_memorySnapshot(None)
        finally:
            if collects:
                gc.enable()

    def _fewer(self) -> dict[str, Any]:
        """Return options that leave out requests to free, a third of all entries; completions are enough."""
        self._recorder()
        return {"skip_actions": ["free_requested"]} if self._can_skip else {}

    def _switch(self, mode: Mode, entries: int, options: dict[str, Any], *, fresh: bool) -> bool:
        with self._lock:
            record = self._recorder()
            if self.by_script:
                return False
            fresh = fresh or entries != self.entries
            if fresh or not self.keeps_history:
                if self.mode != "off":
                    record(None)  # clears the ring in every PyTorch
                self.cleared += 1
            record("all", max_entries=entries, **options)
            self._mode, self.entries = mode, entries
            return True

    def _recorder(self) -> Callable[..., None]:
        real = watch_script()
        parameters = inspect.signature(real).parameters
        self.keeps_history = "clear_history" in parameters
        self._can_skip = "skip_actions" in parameters
        return real


_by_script = False
_real: Callable[..., None] | None = None


def watch_script() -> Callable[..., None]:
    """Detect from now on switches of the recorder by the script; return PyTorch's own function."""
    global _real, _by_script
    if _real is not None:
        return _real
    memory: Any = torch.cuda.memory
    real = memory._record_memory_history

    @functools.wraps(real)
    def recording(*args: Any, **kwargs: Any) -> Any:
        global _by_script
        _by_script = True
        return real(*args, **kwargs)

    _real = real
    if torch.cuda.is_initialized():  # before, there is no allocator, and a query would crash
        _by_script = bool(getattr(torch._C, "_cuda_isHistoryEnabled", bool)())
    memory._record_memory_history = recording
    if getattr(torch.cuda, "_record_memory_history", None) is real:
        setattr(torch.cuda, "_record_memory_history", recording)  # noqa: B010
    return real


MOST_BYTES = 512 * 2**20  # Limit of one snapshot; beyond it the oldest entries of the trace are left out
SPARE_BYTES = 512 * 2**20


def write_snapshot(path: Path, found: dict[str, Any]) -> tuple[Path | None, int, str]:
    """Write a snapshot as ``torch.cuda.memory._dump_snapshot`` does.

    Return the file (None when there is none), its bytes, and the problem in words (empty without one).
    """
    note = ""
    data = pickle.dumps(found, protocol=4)
    while len(data) > MOST_BYTES and any(len(trace) > 1000 for trace in found["device_traces"]):
        share = MOST_BYTES / len(data) * 0.9
        found["device_traces"] = [trace[-max(1000, int(len(trace) * share)) :] for trace in found["device_traces"]]
        data = pickle.dumps(found, protocol=4)
        most = max(map(len, found["device_traces"]))
        note = f"only its last {most:,} entries, to keep it under {MOST_BYTES >> 20} MiB"
    try:
        free = shutil.disk_usage(path.parent).free
        if free < len(data) + SPARE_BYTES:
            return None, 0, f"no snapshot: {len(data) >> 20} MiB, and only {free >> 20} MiB of the disk are free"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return None, 0, f"no snapshot: {error.strerror or error}"
    return path, len(data), note


Answer = Callable[[bool, str, dict[str, Any]], None]  # Gets a request's result: success, a text, figures by name


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """A rank, its phases and models, PyTorch's recorder, and the function that sends messages."""

    rank: RankContext
    tracker: Tracker
    trained: Trained  # Engine, model and optimizer, whose storages are walked
    pace: Pace
    recording: Recording
    send: Callable[[wire.Message], None]


_STEPS = 256  # Number of steps kept: more than any recording of the allocator covers

_Begun = tuple[str, int]


class PhaseMarks:
    """Phases of the last finished steps, for memory snapshots. ``note`` is for one thread, the rest for any.

    PyTorch keeps named spans beside its trace, which its own viewer shows (``external_annotations``: a start and an
    end, each with a device and a time in microseconds since 1970). ftmon adds its steps and phases to that list.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[_Begun]]] = deque(maxlen=_STEPS)

    def note(self, step: int, marks: Sequence[Mark]) -> None:
        """Record a finished step; its last mark is its end."""
        self._steps.append((step, [(mark.phase, mark.ns) for mark in marks]))

    def annotate(self, found: dict[str, Any], device: int, step: int, marks: Sequence[Mark]) -> None:
        """Add the phases to a snapshot, those of the step under way last."""
        offset_ns = wall_offset_ns()
        now = time.perf_counter_ns()
        steps = [*self._steps, (step, [*((mark.phase, mark.ns) for mark in marks), ("", now)])]
        spans = found.setdefault("external_annotations", [])
        for number, begun in steps:
            for name, begin, end in _spans(number, begun):
                for stage, at in (("START", begin), ("END", end)):
                    time_us = (at + offset_ns) // 1000
                    spans.append({"name": OWN_SPAN + name, "stage": stage, "device": device, "time_us": time_us})


def _spans(step: int, begun: list[_Begun]) -> Iterator[tuple[str, int, int]]:
    """Yield the step, then its phases: name, begin, end. A mark without a phase continues the previous one."""
    if len(begun) < 2:
        return
    yield f"step {step}", begun[0][1], begun[-1][1]
    name, since = begun[0]
    for phase, ns in begun[1:-1]:
        if phase and phase != name:
            yield name, since, ns
            name, since = phase, ns
    yield name, since, begun[-1][1]


def take_snapshot(rank: RankContext, found: dict[str, Any], step: int, reason: str) -> tuple[SnapshotTaken | None, str]:
    """Write a rank's snapshot into the run's folder; return its message (None: there is none), and the problem."""
    kind = "-oom" if reason == "oom" else ""
    name = f"rank-{rank.rank}-step-{step}{kind}-{time.strftime('%H%M%S')}.pickle"
    path, size, note = write_snapshot(rank.run.snapshots / name, found)
    if path is None:
        return None, note
    entries = sum(map(len, found["device_traces"]))
    return SnapshotTaken(rank.rank, step, time.time(), str(path), size, reason, entries), note


STEPS = 2  # Steps until the snapshot: the one under way at the request is incomplete, the next one is whole
LEAST_SECONDS, MOST_SECONDS = 5.0, 40.0


class Snapshots:
    """Takes the snapshots of one rank; for the publisher thread."""

    def __init__(self, context: CaptureContext, phase_marks: PhaseMarks) -> None:
        self._rank, self._tracker = context.rank, context.tracker
        self._phase_marks = phase_marks
        self._pace, self._recording, self._send = context.pace, context.recording, context.send
        self._wanted: list[tuple[str, Answer]] = []
        self._from_step = 0
        self._deadline = 0.0  # 0: stacks are not recorded yet, as the recorder may be in use elsewhere

    def want(self, reason: str, answer: Answer) -> None:
        """Schedule a snapshot after one recorded step, or after a time without one; ``answer`` receives the result."""
        if self._rank.device.memory.measure != "cuda":
            answer(False, "this rank computes on the CPU: there is no CUDA allocator here", {})
            return
        self._wanted.append((reason, answer))
        self._begin()

    def tick(self) -> None:
        """Take the snapshots that are due."""
        if not self._wanted or not self._begin():
            return
        if self._tracker.step < self._from_step + STEPS and time.monotonic() < self._deadline:
            return
        wanted, self._wanted = self._wanted, []
        taken: SnapshotTaken | None = None
        try:
            taken, note = self._capture(wanted[0][0])
        except Exception as error:
            log_error("a memory snapshot failed", error)
            note = f"{type(error).__name__}: {error}"
        finally:
            self._recording.off()  # the recorder of numbers switches it on again
            self._recording.release()
            self._deadline = 0.0
        for _, answer in wanted:
            if taken is None:
                answer(False, note, {})
            else:
                text = f"{taken.path} ({note})" if note else taken.path
                answer(True, text, {"path": taken.path, "bytes": taken.bytes, "entries": taken.entries})

    def _begin(self) -> bool:
        if self._deadline:
            return True
        if not self._recording.claim("snapshot"):
            return False
        patience = min(MOST_SECONDS, max(LEAST_SECONDS, 3 * self._pace.usual))
        self._recording.stacks(long=True, frees=True)
        self._from_step, self._deadline = self._tracker.step, time.monotonic() + patience
        return True

    def _capture(self, reason: str) -> tuple[SnapshotTaken | None, str]:
        found: Any = torch.cuda.memory._snapshot()
        step = self._tracker.step
        index = self._rank.device.memory.device_index
        self._phase_marks.annotate(found, index, step + 1, self._tracker.present_marks())
        taken, note = take_snapshot(self._rank, found, step, reason)
        if taken is not None:
            self._send(taken)
        return taken, note
