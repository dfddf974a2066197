"""Measures the monitor itself: messages received, recorded, lost, and its share of a core."""

import os
import time

from ....protocol.messages.control import HubStats
from ..analyses.trace_analysis import TraceAnalysis
from .intake import Intake
from .stream import Stream


class Stats:
    """Builds ``HubStats`` messages."""

    def __init__(self, intake: Intake, stream: Stream, traces: TraceAnalysis) -> None:
        self._intake = intake
        self._stream = stream
        self._traces = traces
        self._pid = os.getpid()
        self._wall = time.monotonic()
        self._cpu = time.process_time()

    def measure(self) -> HubStats:
        """Return the current figures; the CPU share covers the time since the last call."""
        wall, cpu = time.monotonic(), time.process_time()
        share = 100.0 * (cpu - self._cpu) / max(wall - self._wall, 1e-6)
        self._wall, self._cpu = wall, cpu
        return HubStats(
            time=time.time(),
            pid=self._pid,
            received=self._intake.received,
            recorded=self._stream.recorder.writer.recorded,
            published=self._stream.published,
            lost=self._intake.lost,
            unknown=self._intake.unknown,
            refused=self._intake.refused,
            recording_bytes=self._stream.recorder.bytes,
            recording_error=self._stream.recorder.error,
            cpu_percent=round(share, 2),
            dropped_traces=self._traces.dropped,
        )
