"""The options of a run: set once, when it is started, and then the same for its launcher, hub and probes.

A ``StartRequest`` passes them to the process that creates the run, which writes them to ``run.json`` (and ``join.json``
for other hosts). Every other process of the run reads them there.
"""

import math
from typing import Literal

import msgspec

from ..errors import UsageError

OnHang = Literal["warn", "stacks", "stop", "kill"]
OnOom = Literal["raise", "hold"]


class MultiHost(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run on several hosts, as detected from its command."""

    hosts: list[str] = []
    """Their names, if the launcher reaches them over ssh; empty: something else starts the ranks there."""
    ssh_port: int | None = None
    by_hand: bool = False
    """Each host's command is started separately."""
    slurm_nodes: int = 0
    """Nodes of the run's SLURM job, which ``srun`` reaches; 0: no SLURM job."""


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a run is monitored, and what ftmon may do to it."""

    listen: str = ""
    """``HOST:PORT``: the hub also serves other hosts, encrypted; empty: only this host."""
    read_only: bool = False
    """The hub refuses every command that acts on the run."""
    logs: bool = True
    """The ranks' output is written to the run's log files."""
    allocator_events: bool = True
    """Single steps of a rank are captured with the allocator's trace."""
    predict: bool = True
    """With ftmon's own trainer on GPUs: the memory of its configuration is predicted during the run."""
    on_oom: OnOom = "raise"
    """``hold``: a rank waits in the frame in which an allocation failed."""
    allow_console: bool = False
    """A console may run code in a held rank."""
    hold_timeout: float = 0.0
    """Seconds after which a held rank continues without being released; 0: never."""
    on_hang: OnHang = "warn"
    """Action on a hang that has lasted ``hang_grace``."""
    hang_grace: float = 30.0
    """Seconds that a hang must last before the action of ``on_hang``."""
    exit_timeout: float = 0.0
    """Seconds without progress after which the rest of a run is killed once a rank has finished; 0: never."""
    stop_grace: float = 30.0
    """Seconds between SIGTERM (or the loss of the command that the run is tied to) and SIGKILL; the default is that of
    SLURM and Kubernetes."""
    multihost: MultiHost | None = None
    """The run's hosts, if it has several; detected when the run is created."""

    def check(self) -> None:
        """Check the values and their combinations.

        Raises:
            UsageError: one is invalid; the text names the option of the command line.
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
