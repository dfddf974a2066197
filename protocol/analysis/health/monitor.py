"""One interface to all health detectors: messages of the stream in, findings out. Pure: times are passed in.

A rank's hello from another process starts another job of the run and resets all detectors that use steps.
"""

from collections.abc import Mapping
from typing import ClassVar

from ...messages.health import Compiles
from ...messages.telemetry import Checkpoint, CheckpointFailed, DeviceSample, Hello, Plan, Step
from ..findings import Finding
from ..findings.detector import Detector, Handler
from ..findings.kind import Kind
from . import checkpoints, compiles, data_wait, divergence, gradients, nonfinite, plateau, scaler
from .checkpoints import Checkpoints
from .compiles import Recompilation
from .data_wait import DataWait
from .divergence import Divergence
from .gradients import Gradients
from .joined import Join
from .nonfinite import NonFinite
from .plateau import Plateau
from .scaler import FLOOR, Scaler


class HealthMonitor(Detector):
    """The detectors of one run that compare steps."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        *nonfinite.KINDS,
        *divergence.KINDS,
        *plateau.KINDS,
        *gradients.KINDS,
        *scaler.KINDS,
        *data_wait.KINDS,
        *compiles.KINDS,
        *checkpoints.KINDS,
    )
    replays = (Hello, Plan, Step, Checkpoint, CheckpointFailed)

    def __init__(self) -> None:
        self._join = Join()
        self._losses, self._norms = NonFinite("loss"), NonFinite("grad_norm")
        self._divergence, self._plateau = Divergence(), Plateau()
        self._gradients, self._scaler = Gradients(), Scaler()
        self._data_wait = DataWait()
        self._compiles = Recompilation()
        self._checkpoints = Checkpoints()
        self._processes: dict[int, tuple[int, int]] = {}
        self._precision = ""

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method for each type of message."""
        return {
            Hello: self.hello,
            Plan: self.plan,
            Step: self.step,
            DeviceSample: self.sample,
            Compiles: self._compiles.compiles,
            Checkpoint: self._checkpoints.complete,
            CheckpointFailed: self._checkpoints.failed,
        }

    def hello(self, hello: Hello) -> list[Finding]:
        """Register a rank; a new process of a known rank starts another job."""
        process = hello.pid, hello.start_ticks
        before = self._processes.get(hello.rank)
        found: list[Finding] = []
        if before is not None and before != process:
            found = self._reset()
            self._processes.clear()
        self._processes[hello.rank] = process
        self._precision = hello.precision or self._precision
        self._scaler.floor = _floor(hello)
        self._join.ranks.add(hello.rank)
        self._data_wait.hello(hello)
        return found

    def rank_ended(self, rank: int) -> list[Finding]:
        """Stop waiting for a rank that ended, and comparing with it."""
        self._join.drop(rank)
        self._data_wait.drop(rank)
        return self._losses.raise_complete(self._join.ranks) + self._norms.raise_complete(self._join.ranks)

    def plan(self, plan: Plan) -> list[Finding]:
        """Record the planned number of steps."""
        self._plateau.total_steps = plan.total_steps
        return []

    def step(self, step: Step) -> list[Finding]:
        """Process one rank's step."""
        found = self._losses.step(step, self._precision, self._join.ranks)
        found += self._norms.step(step, self._precision, self._join.ranks)
        found += self._data_wait.step(step)
        for row in self._join.add(step):
            if not self._join.alternating:
                found += self._divergence.step(row)
                found += self._plateau.step(row)
            found += self._gradients.step(row)
            found += self._scaler.step(row)
            if row.step % 10 == 0:
                found += self._compiles.step(row.step)
        return found

    def sample(self, sample: DeviceSample) -> list[Finding]:
        """Raise delayed findings: samples arrive every second."""
        return [*self._losses.tick(sample.time), *self._norms.tick(sample.time)]

    def _reset(self) -> list[Finding]:
        self._join = Join()
        found: list[Finding] = []
        for part in (
            self._losses,
            self._norms,
            self._divergence,
            self._plateau,
            self._gradients,
            self._scaler,
            self._data_wait,
            self._compiles,
            self._checkpoints,
        ):
            found += part.reset()
        return found


def _floor(hello: Hello) -> float:
    """Return DeepSpeed's ``min_loss_scale``, or 1."""
    section = (hello.deepspeed_config or {}).get("fp16")
    value = section.get("min_loss_scale", FLOOR) if isinstance(section, dict) else FLOOR
    return float(value) if isinstance(value, int | float) and value > 0 else FLOOR
