"""The options of a run: chosen once, where it is started, and then the same for its launcher, hub and probes.

They travel in a ``StartRequest`` to the process that makes the run, and are kept in ``run.json`` (and in ``join.json``
for other hosts), which every other process of the run reads.
"""

import math
from typing import Literal

import msgspec

from ..errors import UsageError

OnHang = Literal["warn", "stacks", "stop", "kill"]
OnOom = Literal["raise", "hold"]


class MultiHost(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run on several hosts, as found from its command."""

    hosts: list[str] = []
    """Their names, where the launcher reaches them over ssh; empty where something else starts the ranks there."""
    ssh_port: int | None = None
    by_hand: bool = False
    """Each host's command is started separately."""
    slurm_nodes: int = 0
    """Nodes of the SLURM job that the run is in, to which ``srun`` reaches; 0 outside of one."""


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a run is watched, and what ftmon may do to it."""

    listen: str = ""
    """``HOST:PORT``: the hub also serves other hosts, encrypted; empty: this host alone."""
    read_only: bool = False
    """The hub refuses every command that acts on the run."""
    logs: bool = True
    """The ranks' output goes to the run's log files."""
    allocator_events: bool = True
    """Single steps of a rank are captured with the allocator's own trace."""
    predict: bool = True
    """Of ftmon's own trainer on GPUs: its configuration is predicted beside the run."""
    on_oom: OnOom = "raise"
    """``hold``: a rank waits in the frame in which an allocation failed."""
    allow_console: bool = False
    """A console may run code in a rank that is held."""
    hold_timeout: float = 0.0
    """Seconds after which a held rank continues without a release; 0: never."""
    on_hang: OnHang = "warn"
    """What is done about a hang that has stood for ``hang_grace``."""
    hang_grace: float = 30.0
    """Seconds that a hang must have stood before something is done about it."""
    exit_timeout: float = 0.0
    """Seconds without progress after which the rest of a run is killed once a rank has finished; 0: never."""
    stop_grace: float = 30.0
    """Seconds between SIGTERM (or the loss of the command that the run is tied to) and SIGKILL: what SLURM and
    Kubernetes give."""
    multihost: MultiHost | None = None
    """The run's hosts where it has several; found when the run is made."""

    def check(self) -> None:
        """Refuse values that make no sense, alone or together.

        Raises:
            UsageError: one does; the text names the option of the command line.
        """
        if self.on_oom != "hold" and (self.allow_console or self.hold_timeout):
            raise UsageError("--allow-console and --hold-timeout need --on-oom hold")
        for option in ("hold_timeout", "hang_grace", "exit_timeout", "stop_grace"):
            seconds: float = getattr(self, option)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise UsageError(f"--{option.replace('_', '-')} must be seconds, 0 or more")
        if self.allow_console and self.read_only:
            raise UsageError("--allow-console and --read-only: a read-only run runs no code from outside")
        if self.read_only and (self.on_hang in ("stop", "kill") or self.exit_timeout):
            raise UsageError("--on-hang stop, --on-hang kill and --exit-timeout need a run that is not --read-only")
