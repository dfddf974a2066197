"""Facts of this rank: its number, process, run and device, its part of the batches, and its ``Hello`` message."""

import os
import platform
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from ....protocol.host.process import ProcessId, start_ticks, this_process
from ....protocol.messages.telemetry import Hello, Plan, SelfDump
from ....protocol.run.rundir import RunDir, RunOptions
from ..device.cuda import Device
from ..device.memory import backend_of
from ..guard import Guard
from .roles import parse_rank

_RANK_VARIABLES = (b"LOCAL_RANK=", b"RANK=")
_MOST_ANCESTORS = 16


def launch_of_this_process() -> str:
    """Return the process that launched this host's ranks, ``PID-START_TICKS``; empty if /proc does not show it.

    It is the nearest ancestor whose environment names no rank: there may be a wrapper for each rank in between
    (``torchrun --no-python wrap.sh``, ``numactl``). ``/proc/PID/environ`` has the environment at the start of a
    process, without its own changes.
    """
    pid = os.getppid()
    try:
        if _names_a_rank("self"):
            for _ in range(_MOST_ANCESTORS):
                if pid <= 1 or not _names_a_rank(str(pid)):
                    break
                pid = _parent(pid)
        ticks = start_ticks(pid)
    except (OSError, ValueError):
        return ""
    return f"{pid}-{ticks}" if ticks is not None else ""


def _names_a_rank(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(_RANK_VARIABLES) for entry in file.read().split(b"\0"))
    except PermissionError:  # of another user, such as a job scheduler: not a rank
        return False


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        stat = file.read()
    return int(stat[stat.rindex(b")") + 2 :].split()[1])


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank: its number, process, run and device, and whether its probe is enabled."""

    rank: int
    local_rank: int
    world_size: int
    run: RunDir  # This host's directory of the run: logs, sockets, snapshots
    options: RunOptions = field(default_factory=RunOptions)
    sends_logs: bool = False  # The rank sends its own log lines: its output is not redirected into files
    guard: Guard = field(default_factory=Guard)
    device: Device = field(default_factory=Device)
    process: ProcessId = field(default_factory=this_process)
    host: str = field(default_factory=socket.gethostname)
    launch: str = field(default_factory=launch_of_this_process)
    """The process that launched this host's ranks, ``PID-START_TICKS``; empty if unknown."""

    @property
    def identity(self) -> str:
        """The sender's name in every header, and the identity of the command socket."""
        return f"rank-{self.rank}-{self.process.pid}-{self.process.start_ticks}"


def place_of_this_process() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from the launcher or, without one, torch.distributed; (0, 0, 1) else."""
    place = parse_rank(os.environ)
    if place is None:
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
            return rank, int(os.environ.get("LOCAL_RANK") or rank), world
    return place or (0, 0, 1)


_PACKAGES = ("ftmon", "torch", "deepspeed", "transformers", "accelerate")


class Introduction:
    """Collects the fields of the rank's ``Hello`` as they become known."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._backend = ""
        self.plan: Plan | None = None  # The script's plan; sent after each hello
        self.begin()

    def begin(self) -> None:
        """Forget what is known of a training."""
        self.facts: dict[str, Any] = {"framework": "pytorch"}
        self.parameter_dtype = ""  # ``bf16``, ``fp16`` or ``fp32``, of the model's parameters; empty while unknown
        self.forward_dtype: str | None = None
        """Data type of autocast in the first forward, empty without autocast; None before the first forward."""

    def hello(self, self_dump: SelfDump | None = None) -> Hello:
        """Return a ``Hello`` with everything known so far."""
        rank = self._rank
        loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
        versions = {name: str(version) for name, version in loaded.items() if version is not None}
        return Hello(
            rank=rank.rank,
            local_rank=rank.local_rank,
            world_size=rank.world_size,
            host=rank.host,
            pid=rank.process.pid,
            start_ticks=rank.process.start_ticks,
            device=rank.device.info,
            memory_measure=rank.device.memory.measure,
            time=time.time(),
            versions={"python": platform.python_version(), **versions},
            argv=list(sys.argv),
            backend=self.note_backend(),
            sends_logs=rank.sends_logs,
            self_dump=self_dump,
            launch=rank.launch,
            restart=_restart_count(),
            matmul_precision=self.matmul_precision(),
            **self.facts,
        )

    def note_backend(self) -> str:
        """Return the backend of torch.distributed, also after its process group was destroyed."""
        self._backend = backend_of(self._rank.device.info.kind) or self._backend
        return self._backend

    def matmul_precision(self) -> Literal["", "bf16", "fp16", "tf32", "fp32"]:
        """Return the data type of matrix products; empty if unknown (no forward seen, so autocast may be on)."""
        configured = self.facts.get("precision", "")
        halves = [one for one in (configured, self.forward_dtype, self.parameter_dtype) if one in ("bf16", "fp16")]
        if halves:
            return "bf16" if halves[0] == "bf16" else "fp16"
        if configured != "fp32" and self.forward_dtype is None:
            return ""
        torch: Any = sys.modules.get("torch")
        return "fp32" if torch is None or torch.get_float32_matmul_precision() == "highest" else "tf32"


def _restart_count() -> int:
    try:
        return max(0, int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))
    except ValueError:
        return 0


def plain(value: Any) -> Any:
    """Convert a framework's configuration to msgpack types; other values become their ``str``."""
    return msgspec.to_builtins(value, enc_hook=str, str_keys=True)


class BatchShare(NamedTuple):
    """A rank's equal part of the counts of a batch that several ranks train on (tensor and pipeline parallelism).

    Steps count a batch once: sums over ranks of samples, tokens and FLOPs are those of the whole job.
    """

    place: int
    ranks: int  # Their number; 0: the batch is counted elsewhere

    def of(self, count: int) -> int:
        """Return this rank's part of a count; the parts of all ranks add up to it."""
        if not self.ranks:
            return 0
        return (self.place + 1) * count // self.ranks - self.place * count // self.ranks


WHOLE = BatchShare(0, 1)  # No other rank trains on the batch
COUNTED_ELSEWHERE = BatchShare(0, 0)  # The first stage of the pipeline counts the batch


def of_optimizer(optimizer: Any) -> BatchShare:
    """Return the rank's part by the device mesh of an optimizer's parameters, if that has a dimension named ``tp``."""
    if "torch.distributed.tensor" not in sys.modules:
        return WHOLE
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = getattr(parameter, "device_mesh", None)
            names = getattr(mesh, "mesh_dim_names", None) or ()
            place = mesh.get_coordinate() if mesh is not None and "tp" in names else None
            if mesh is not None and place is not None:
                dimension = names.index("tp")
                return BatchShare(place[dimension], mesh.size(dimension))
    return WHOLE
