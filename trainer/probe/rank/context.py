"""Fixed facts of this rank."""

import os
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from ....protocol.host.process import ProcessId, this_process
from ....protocol.run.run_options import RunOptions
from ....protocol.run.rundir import RunDir
from ..device.device import Device
from ..guard import Guard
from .launch import launch_of_this_process
from .roles import parse_rank


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank: its number, process, run and device, and whether its probe is enabled."""

    rank: int
    local_rank: int
    world_size: int
    run: RunDir
    """This host's directory of the run: logs, sockets, snapshots."""
    options: RunOptions = field(default_factory=RunOptions)
    sends_logs: bool = False
    """The rank sends its own log lines: its output is not redirected into files."""
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
