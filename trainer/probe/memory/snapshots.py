"""Takes memory snapshots on request: PyTorch's own, with the Python stacks of one whole step's allocations.

Stacks cost 23 % of a step (measured on an H200), so they are recorded only from the request until one whole step has
passed. Writing the snapshot then blocks the training, for a second or so on a large model.
"""

import time
from typing import Any, NamedTuple

from ....protocol.messages.telemetry import SnapshotTaken
from ..guard import log_error
from .annotations import PhaseMarks
from .capture_context import Answer, CaptureContext
from .snapshot_file import write_snapshot

STEPS = 2
"""Steps until the snapshot: the one under way at the request is incomplete, the next one is whole."""
LEAST_SECONDS, MOST_SECONDS = 5.0, 40.0


class _Wanted(NamedTuple):
    reason: str
    answer: Answer


class Snapshots:
    """Takes the snapshots of one rank; for the publisher thread."""

    def __init__(self, context: CaptureContext, phase_marks: PhaseMarks) -> None:
        self._rank, self._tracker = context.rank, context.tracker
        self._phase_marks = phase_marks
        self._pace, self._recording, self._send = context.pace, context.recording, context.send
        self._wanted: list[_Wanted] = []
        self._from_step = 0
        self._deadline = 0.0
        """0: stacks are not recorded yet, as the recorder may be in use elsewhere."""

    def want(self, reason: str, answer: Answer) -> None:
        """Schedule a snapshot after one recorded step, or after a time without one; ``answer`` receives the result."""
        if self._rank.device.memory.measure != "cuda":
            answer(False, "this rank computes on the CPU: there is no CUDA allocator here", {})
            return
        self._wanted.append(_Wanted(reason, answer))
        self._begin()

    def tick(self) -> None:
        """Take the snapshots that are due."""
        if not self._wanted:
            return
        if not self._begin():
            return
        first = self._wanted[0]
        if self._tracker.step < self._from_step + STEPS and time.monotonic() < self._deadline:
            return
        wanted, self._wanted = self._wanted, []
        taken: SnapshotTaken | None = None
        try:
            taken, note = self._capture(first.reason)
        except Exception as error:
            log_error("a memory snapshot failed", error)
            note = f"{type(error).__name__}: {error}"
        finally:
            self._recording.off()  # the recorder of numbers switches it on again
            self._recording.release()
            self._deadline = 0.0
        for one in wanted:
            if taken is None:
                one.answer(False, note, {})
            else:
                text = f"{taken.path} ({note})" if note else taken.path
                one.answer(True, text, {"path": taken.path, "bytes": taken.bytes, "entries": taken.entries})

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
        """Write a snapshot; return it (None: there is none), and the problem in words."""
        import torch

        found: Any = torch.cuda.memory._snapshot()
        rank, step = self._rank.rank, self._tracker.step
        index = self._rank.device.memory.device_index
        self._phase_marks.annotate(found, index, step + 1, list(self._tracker.marks))
        name = f"rank-{rank}-step-{step}-{time.strftime('%H%M%S')}.pickle"
        path, size, note = write_snapshot(self._rank.run.snapshots / name, found)
        if path is None:
            return None, note
        entries = sum(len(trace) for trace in found["device_traces"])
        taken = SnapshotTaken(rank, step, time.time(), str(path), size, reason, entries)
        self._send(taken)
        return taken, note
