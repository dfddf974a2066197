"""The messages of one run that reports and sweeps use."""

from collections import deque
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from ..messages.control import Alert
from ..messages.telemetry import DeviceSample, Evaluation, Failure, Hello, Oom, Step
from ..messages.wire import Frame
from .reader import Reader
from .results import RecordingInfo

_PAGE = 2000


class RecordedRun:
    """Contents of one recording; raises ``RecordingError`` if it cannot be read.

    The first ``skip`` steps of each rank are left out; the last ``most`` are kept, None: all. The recording is not read
    beyond the step ``until``; None: it is read to its end.
    """

    def __init__(self, path: Path, skip: int = 0, most: int | None = None, until: int | None = None) -> None:
        self._skip, self._most, self._until = skip, most, until
        self._later: float | None = None
        """When the first rank had passed the step ``until``."""
        self._seen: dict[int, int] = {}
        self._first: dict[int, int] = {}
        """The lowest step of each rank."""
        self._steps: dict[int, deque[Step]] = {}
        self.hellos: dict[int, Hello] = {}
        self.ooms: list[Oom] = []
        self.failures: list[Failure] = []
        self.evaluations: list[Evaluation] = []
        self.not_finite: set[int] = set()
        """Steps in which the loss of a rank was NaN or infinite, skipped ones included."""
        self.nvml: dict[int, int] = {}
        """Highest memory use of each rank by NVML, bytes."""
        self.devices: set[int] = set()
        """GPUs on which NVML saw a rank."""
        self.peak_reserved: dict[int, int] = {}
        """Highest reserved memory of each rank over all steps, skipped ones included, bytes."""
        with Reader(path) as reader:
            self.info: RecordingInfo = reader.info()
            last = 0
            while frames := reader.frames(last, _PAGE):
                last = frames[-1].seq
                for frame in frames:
                    self._apply(frame)
            self.alerts: list[Alert] = reader.alerts(None, self._later)

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return sorted({*self.hellos, *self._seen})

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [hello.pid for hello in self.hellos.values()]

    def steps(self, rank: int) -> Sequence[Step]:
        """Return the kept steps of a rank, in order."""
        return list(self._steps.get(rank, ()))

    def steps_seen(self, rank: int) -> int:
        """Return the number of steps a rank recorded, kept or not."""
        return self._seen.get(rank, 0)

    def drop_before(self, step: int) -> None:
        """Drop the kept steps before a step."""
        for rank, steps in self._steps.items():
            self._steps[rank] = deque((each for each in steps if each.step >= step), maxlen=self._most)

    def _apply(self, frame: Frame) -> None:
        message = frame.message
        if self._until is not None and isinstance(message, Step) and message.step > self._until:
            self._later = frame.t if self._later is None else self._later
            return
        match message:
            case Step():
                self._step(message)
            case Evaluation() if self._until is None or message.step <= self._until:
                self.evaluations.append(message)
            case Hello():
                self.hellos[message.rank] = message
            case Oom():
                self.ooms.append(message)
            case Failure():
                self.failures.append(message)
            case DeviceSample(kind="gpu") if self._later is None:
                for process in message.processes:
                    if process.rank is not None:
                        self.nvml[process.rank] = max(self.nvml.get(process.rank, 0), process.used_bytes)
                        self.devices.add(message.index)
            case _:
                pass

    def _step(self, step: Step) -> None:
        self._seen[step.rank] = self._seen.get(step.rank, 0) + 1
        reserved = max((record.reserved.peak for record in step.phases), default=0)
        self.peak_reserved[step.rank] = max(self.peak_reserved.get(step.rank, 0), reserved)
        if step.loss is not None and not isfinite(step.loss):
            self.not_finite.add(step.step)
        first = self._first[step.rank] = min(step.step, self._first.get(step.rank, step.step))
        if step.step - first >= self._skip:  # by number: an imported log may have one step in ten
            self._steps.setdefault(step.rank, deque(maxlen=self._most)).append(step)
