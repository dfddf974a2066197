"""One interface to all health detectors: messages of the stream in, findings out. Pure: times are passed in.

A rank's hello from another process starts another job of the run and resets all detectors that use steps.
"""

from ...messages.health import Compiles, DeviceHealth, DiskSpace, Xid
from ...messages.telemetry import Checkpoint, CheckpointFailed, DeviceSample, Hello, Plan, Step
from ..findings import Finding
from .checkpoints import Checkpoints
from .compiles import Recompilation
from .data_wait import DataWait
from .disks import Disks
from .divergence import Divergence
from .gpus import Gpus
from .gradients import Gradients
from .joined import Join
from .nonfinite import NonFinite
from .plateau import Plateau
from .scaler import FLOOR, Scaler


class HealthMonitor:
    """The detectors of one run."""

    def __init__(self) -> None:
        self._join = Join()
        self._losses, self._norms = NonFinite("loss"), NonFinite("grad_norm")
        self._divergence, self._plateau = Divergence(), Plateau()
        self._gradients, self._scaler = Gradients(), Scaler()
        self._data_wait = DataWait()
        self._compiles = Recompilation()
        self._checkpoints = Checkpoints()
        self._gpus, self._disks = Gpus(), Disks()
        self._processes: dict[int, tuple[int, int]] = {}
        self._precision = ""

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

    def drop(self, rank: int) -> list[Finding]:
        """Stop waiting for a rank that ended, and comparing with it."""
        self._join.drop(rank)
        self._data_wait.drop(rank)
        return self._losses.settle(self._join.ranks) + self._norms.settle(self._join.ranks)

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

    def compiles(self, message: Compiles) -> list[Finding]:
        """Process a rank's compilations."""
        return self._compiles.compiles(message)

    def checkpoint(self, message: Checkpoint) -> list[Finding]:
        """Process a complete checkpoint."""
        return self._checkpoints.complete(message)

    def checkpoint_failed(self, message: CheckpointFailed) -> list[Finding]:
        """Process a checkpoint that could not be written."""
        return self._checkpoints.failed(message)

    def sample(self, sample: DeviceSample) -> list[Finding]:
        """Process a device's sample; also raise delayed findings, because samples arrive every second."""
        return [*self._losses.tick(sample.time), *self._norms.tick(sample.time), *self._gpus.sample(sample)]

    def device(self, message: DeviceHealth) -> list[Finding]:
        """Process a GPU's memory faults."""
        return self._gpus.health(message)

    def xid(self, message: Xid) -> list[Finding]:
        """Process a driver error."""
        return self._gpus.xid(message)

    def disks(self, message: DiskSpace) -> list[Finding]:
        """Process the free space of a host's disks."""
        return self._disks.space(message)

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
