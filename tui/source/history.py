"""Interface to a run's history: its recording, opened here or queried through the hub."""

from typing import Protocol

from ...protocol.messages.control import Alert
from ...protocol.messages.wire import Frame
from ...protocol.recording.phase_peaks import PeakMark
from ...protocol.recording.results import MemoryColumn, RecordingInfo, StepPoint, TrainingPoint


class History(Protocol):
    """The methods common to ``protocol.recording.Reader``, which documents them, and ``RemoteReader``."""

    def info(self) -> RecordingInfo:
        """Return the current description of the recording."""
        ...

    def frames(self, after_seq: int, limit: int, until_t: float | None = None) -> list[Frame]:
        """Read the stream in order."""
        ...

    def state_at(self, t: float) -> list[Frame]:
        """Read the minimal frames for the state at ``t``."""
        ...

    def memory(self, t0: float, t1: float, columns: int) -> list[MemoryColumn]:
        """Read memory peaks of all ranks, pooled into columns."""
        ...

    def series(self, rank: int, t0: float, t1: float, limit: int) -> list[StepPoint]:
        """Read a rank's steps, pooled when there are more than ``limit``."""
        ...

    def training(self, rank: int, t0: float, t1: float, limit: int) -> list[TrainingPoint]:
        """Read a rank's training figures by step, pooled if there are more than ``limit``."""
        ...

    def alerts(self, t0: float | None = None, t1: float | None = None) -> list[Alert]:
        """Read the last state of each alert."""
        ...

    def logs(
        self, before_seq: int | None = None, rank: int | None = None, text: str = "", limit: int = 500
    ) -> list[Frame]:
        """Read the log lines before a position in the stream."""
        ...

    def marks(self) -> list[PeakMark]:
        """Read the steps in which a phase reached a new peak, for all ranks."""
        ...

    def sampled(self, kind: str, rank: int, limit: int = 240) -> list[Frame]:
        """Read messages of one type of a rank, spread evenly over the recording."""
        ...

    def jobs(self) -> list[Frame]:
        """Read the last state of each job."""
        ...

    def step_time(self, step: int) -> float | None:
        """Return the time at which a step was finished."""
        ...

    def seq_at(self, t: float) -> int:
        """Return the stream's sequence number at a time."""
        ...

    def close(self) -> None:
        """Close the recording or connection."""
        ...
