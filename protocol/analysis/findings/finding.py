"""A finding: a detector's conclusion, as figures. ``analysis.text`` turns it into sentences."""

from typing import Any, Literal, NamedTuple

import msgspec

from ...messages.control import Severity

FindingKind = Literal[
    "nan_loss",
    "nan_gradient",
    "diverging_loss",
    "loss_plateau",
    "gradient_explosion",
    "gradient_collapse",
    "scaler_floor",
    "scaler_skipping",
    "input_bound",
    "recompilation",
    "gpu_throttling",
    "gpu_memory_errors",
    "gpu_xid",
    "disk_filling",
    "checkpoint_failed",
    "spike",
    "steady_transient",
    "state_growth",
    "leak",
    "straggler",
    "failure",
    "ended_early",
    "died",
    "launcher_ended",
    "oom",
    "oom_failure",
    "hang",
    "stopped",
    "unreachable",
    "telemetry_lost",
    "not_recording",
    "no_step",
    "messages_refused",
    "not_notified",
    "hub_restarted",
    "recording_damaged",
    "recording_removed",
    "not_listening",
    "missing_ranks",
    "unhooked",
    "port_taken",
    "job_failed",
    "concurrent_job",
    "leftover_processes",
    "hang_action",
    "unproven_hang",
]
"""Stable names: an alert of kind ``health`` has its finding's name as ``evidence["finding"]``."""

State = Literal["raised", "updated", "explained", "added", "resolved"]
"""``updated``: new figures of an unresolved finding. ``explained``: its explanation became known, resolved or not.
``added``: the facts are an addition to those with which it was raised."""


ResolvedWhy = Literal["calm", "rank_ended", "restarted", "caught", "resumed", "run_ended", "superseded"]


class Matter(NamedTuple):
    """Identity of a condition: all findings with the same matter belong to one alert."""

    kind: FindingKind
    rank: int | None = None
    phase: str = ""
    key: str = ""


class Resolution(msgspec.Struct, frozen=True):
    """How a finding was resolved; replaces its facts."""

    why: ResolvedWhy
    number: float = 0
    """A step, a number of steps, or seconds; see ``analysis.text``."""


class Finding(msgspec.Struct, frozen=True):
    """One conclusion of one detector at one moment."""

    kind: FindingKind
    facts: Any
    """The figures that support it: a struct of its detector."""
    state: State = "raised"
    severity: Severity = "warning"
    ranks: tuple[int, ...] = ()
    """The ranks concerned; empty: the whole run, or a host."""
    key: str = ""
    """Distinguishes findings of one kind: a host and a path, a device, a function. Empty: there is only one."""
    step: int | None = None
    rank: int | None = None
    """The rank concerned, if each rank has its own finding."""
    phase: str = ""

    @property
    def matter(self) -> Matter:
        """Identity of its condition."""
        return Matter(self.kind, self.rank, self.phase, self.key)


def added(matter: Matter, facts: Any) -> Finding:
    """Return a finding that adds facts to a condition."""
    return Finding(matter.kind, facts, "added", rank=matter.rank, phase=matter.phase, key=matter.key)


def resolved(matter: Matter, over: Resolution) -> Finding:
    """Return a finding that resolves a condition."""
    ranks = () if matter.rank is None else (matter.rank,)
    return Finding(matter.kind, over, "resolved", ranks=ranks, rank=matter.rank, phase=matter.phase, key=matter.key)
