"""Facts of the memory detectors. Alerts carry them as evidence; ``memory.words`` turns them into text."""

from typing import Any

import msgspec

from ...messages.memory import Cause
from ...messages.oom import Remedy
from .stack_patterns import Named


class NumbersCause(msgspec.Struct, frozen=True):
    """A cause identified by the step's own figures, without stacks."""

    pattern: str
    """``longer_batch``, ``loss_scale_overflow`` or ``checkpoint_saving``."""
    remedy: Remedy
    batch_shape: list[int] = []
    longest_shape: list[int] = []
    """The largest batch before."""
    saves_bytes: int = 0
    """Bytes that a batch like earlier ones would save; 0: see the remedy."""


class StackCause(msgspec.Struct, frozen=True):
    """Cause found in the stacks of one step. Without ``named`` they do not explain the transient."""

    cause: Cause
    named: Named | None = None
    remedy: Remedy = Remedy("", "")

    @property
    def pattern(self) -> str:
        """The pattern with most bytes; empty: cannot tell."""
        return self.named.pattern if self.named is not None else ""


class SpikeFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A transient far above the phase's usual one."""

    transient_bytes: int
    usual_bytes: int
    limit_bytes: int
    """Threshold above which a transient counts as a spike."""
    peak_bytes: int
    capacity_bytes: int
    share_of_capacity: float
    phase_ms: float
    sets_step_peak: bool
    sets_run_peak: bool
    measure: str
    """``allocated`` or ``resident``."""
    steps: list[int]
    """The last ten steps with such a spike."""
    repeats: bool
    batch_shape: list[int]
    allocations: int = 0
    allocated_bytes: int = 0
    largest_bytes: list[int] = []
    """The largest single allocations of the latest spike, from the allocator's trace."""
    latest_rank: int = -1
    """The rank of the latest spike, if ranks share one alert."""
    causes: Any = ()
    """The known ``NumbersCause`` and ``StackCause``."""


class SteadyFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A large transient that every step has."""

    transient_bytes: int
    capacity_bytes: int
    share_of_capacity: float
    phase_ms: float
    peak_bytes: int
    sets_step_peak: bool
    measure: str
    first_steps: int
    """Steps that were checked."""
    repeats: bool = msgspec.field(default_factory=lambda: True)
    zero_stage: int | None = None
    causes: Any = ()


class GrowthFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory that the first optimizer step created and kept."""

    growth_bytes: int
    """Growth on the rank with most."""
    net_bytes: int
    """Net increase of memory in that step, on the latest rank."""
    capacity_bytes: int
    bytes_by_rank: dict[str, int]
    freed_bytes: int = 0
    """Gradients that the same update freed, on the latest rank."""


class LeakFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory that grows step over step."""

    bytes_per_step: int
    full_at_step: int
    """0: unknown without a capacity."""
    window_steps: int
    block_steps: int
    rise_bytes: int
    """Increase over the window."""
    level_bytes: int
    peak_bytes: int
    capacity_bytes: int
    measure: str
    bytes_per_step_by_rank: dict[str, int]
    latest_rank: int = -1
    ends_at_step: int = 0
    """The run's last step, if it comes before the device is full; else 0."""
    place: str = ""
    """The line that allocated most of the kept memory."""
    cause: Any = None
    """A ``Cause`` of reason ``leak``: memory left allocated by whole steps, by stack."""
