"""The report of an out-of-memory error: the state of every rank, a verdict in words, and remedies in order.

The hub makes it from a rank's ``Oom`` and the state of all other ranks; ``ftmon oom FILE`` makes one from a snapshot.
The rules are in ``analysis.oom.verdict`` and ``analysis.remedies``.
"""

from typing import Literal

import msgspec

from .bounds import Rank, Time, Whole
from .telemetry import Oom, ProcessMemory

OomKind = Literal[
    "fragmentation",
    "limit",
    "longer_batch",
    "activations",
    "logits",
    "optimizer_states",
    "optimizer_temporaries",
    "buckets",
    "leak",
    "checkpoint",
    "outside",
    "other_process",
    "too_large",
    "unknown",
]
"""``fragmentation``: enough was free, but not contiguous; ``limit``: a limit on this process refused it;
``longer_batch``: activations of a longer or larger batch than any before; ``activations``: of a batch like earlier
ones; ``logits``: logits and loss; ``optimizer_states``: created in the first step; ``buckets``: communication and
reduction buffers; ``outside``: memory of this process outside PyTorch's allocator; ``too_large``: the run, or this one
request, needs more than the device has; ``unknown``: cannot tell."""


class OomVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why the allocation failed, in words, with the evidence."""

    kind: OomKind
    title: str
    """One line, for lists."""
    text: str
    """What happened, a few sentences."""
    sure: bool = False
    """True: the figures exclude other causes; False: this is the likeliest cause."""
    evidence: list[str] = []
    """The figures that support it, one per line."""
    short_bytes: Whole = 0
    """Bytes missing for this request."""


class Remedy(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of configuration or script that reduces memory."""

    kind: str
    """``expandable_segments``, ``checkpointing``, ``micro_batch``, ``zero``, ``offload``, ``fused`` and so on."""
    text: str
    setting: str = ""
    """The setting, such as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``; empty: the script must change."""
    frees_bytes: Whole = 0
    """Bytes it would free at the moment of the error; 0: unknown."""
    bound: Literal["", "about", "at most"] = ""
    """Precision of ``frees_bytes``."""


class RankMoment(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one rank when the allocation failed, as known to the hub."""

    rank: Rank
    state: str
    step: Whole
    """Current step."""
    phase: str
    micro_step: Whole = 0
    allocated_bytes: Whole = 0
    reserved_bytes: Whole = 0
    peak_bytes: Whole = 0
    """Highest allocated bytes of its last finished step (CPU: highest resident set)."""
    batch_shape: list[Whole] = []
    """Batch shape of its last finished step."""
    collective: str = ""
    """The collective that it was in; empty: none."""
    age_s: float = 0.0
    """Age of these figures."""
    device: str = ""
    """Host and index of its device."""
    device_used_bytes: Whole = 0
    device_total_bytes: Whole = 0


class OomReport(msgspec.Struct, tag="oom_report", frozen=True, omit_defaults=True):
    """Report of one out-of-memory error."""

    rank: Rank
    step: Whole
    phase: str
    time: Time
    oom: Oom
    verdict: OomVerdict
    remedies: list[Remedy] = []
    """Remedies, in the recommended order."""
    ranks: list[RankMoment] = []
    """All ranks at that moment, the failing one included."""
    processes: list[ProcessMemory] = []
    """Processes with memory on the rank's device (NVML; on the CPU the ranks' resident memory)."""
    device_used_bytes: Whole = 0
    """Used by all processes, at the last sample before; 0: not sampled."""
    path: str = ""
    """The report's file, relative to the run directory."""
