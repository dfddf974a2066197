"""Memory snapshots on request: PyTorch's own, with the Python stacks of what a whole step allocated.

Stacks cost 23 % of a step (measured on an H200), so they are recorded only from the request until one whole step has
passed. Writing the snapshot then holds the training up, for a second or so on a large model: somebody asked for it.
"""

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...protocol import wire
from ...protocol.rundir import RunDir
from ...protocol.telemetry import SnapshotTaken
from .recording import Recording

if TYPE_CHECKING:
    from .probe import Probe

STEPS = 2
"""The step under way when the request came is half over; the one after it is whole."""
LEAST_SECONDS, MOST_SECONDS = 5.0, 40.0

Answer = Callable[[bool, str, dict[str, Any]], None]


class _Wanted(NamedTuple):
    reason: str
    answer: Answer


class Snapshots:
    """Takes the snapshots of one rank; for the publisher thread."""

    def __init__(self, probe: "Probe", run: RunDir, recording: Recording, send: Callable[[wire.Message], None]) -> None:
        self._probe = probe
        self._run = run
        self._recording = recording
        self._send = send
        self._wanted: list[_Wanted] = []
        self._from_step = 0
        self._deadline = 0.0
        """0: stacks are not being recorded yet; somebody else may still be using the recorder."""

    def want(self, reason: str, answer: Answer) -> None:
        """Take a snapshot once a step has been recorded, or steps stay out; ``answer`` is told what came of it."""
        probe = self._probe
        if probe.device.memory.measure != "cuda":
            answer(False, "this rank computes on the CPU: there is no CUDA allocator here", {})
            return
        self._wanted.append(_Wanted(reason, answer))
        self._begin()

    def tick(self) -> None:
        """Take what is due."""
        if not self._wanted:
            return
        if not self._begin():
            return
        first = self._wanted[0]
        if self._probe.tracker.step < self._from_step + STEPS and time.monotonic() < self._deadline:
            return
        wanted, self._wanted = self._wanted, []
        try:
            taken = self._take(first.reason)
        except Exception as error:
            for one in wanted:
                one.answer(False, f"{type(error).__name__}: {error}", {})
            raise
        finally:
            self._recording.off()  # the reader of the numbers switches it on again
            self._recording.release()
            self._deadline = 0.0
        for one in wanted:
            one.answer(True, taken.path, {"path": taken.path, "bytes": taken.bytes, "entries": taken.entries})

    def _begin(self) -> bool:
        if self._deadline:
            return True
        if not self._recording.claim("snapshot"):
            return False
        probe = self._probe
        patience = min(MOST_SECONDS, max(LEAST_SECONDS, 3 * probe.step_seconds))
        self._recording.stacks(long=True, frees=True)
        self._from_step, self._deadline = probe.tracker.step, time.monotonic() + patience
        return True

    def _take(self, reason: str) -> SnapshotTaken:
        import torch

        found: Any = torch.cuda.memory._snapshot()
        probe = self._probe
        rank, step = probe.about.rank, probe.tracker.step
        memory: Any = probe.device.memory
        probe.phase_marks.annotate(found, memory.device_index, step + 1, list(probe.tracker.marks))
        path = self._run.snapshots / f"rank-{rank}-step-{step}-{time.strftime('%H%M%S')}.pickle"
        size = _write(path, pickle.dumps(found, protocol=4))
        entries = sum(len(trace) for trace in found["device_traces"])
        taken = SnapshotTaken(rank, step, time.time(), str(path), size, reason, entries)
        self._send(taken)
        return taken


def _write(path: Path, data: bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        return file.write(data)
