"""The report of an out-of-memory error: the moment of every rank, a verdict in words, and what to try, in order.

The hub makes it of a rank's ``Oom`` and what it knows of all the others; ``ftmon oom FILE`` makes one of a snapshot.
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
"""``fragmentation``: enough was free, but not in one piece; ``limit``: a limit on this process refused it;
``longer_batch``: activations of a longer or larger batch than any before; ``activations``: of a batch like those
before; ``logits``: logits and loss; ``optimizer_states``: created in the first step; ``buckets``: communication and
reduction buffers; ``outside``: memory of this process outside PyTorch's allocator; ``too_large``: what the run needs,
or this one request, is more than there is; ``unknown``: cannot tell."""


class OomVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why there was no memory, in words, with the evidence."""

    kind: OomKind
    title: str
    """One line, fit for a list."""
    text: str
    """What happened, a few sentences."""
    sure: bool = False
    """The numbers leave no other reading; otherwise it is the likeliest one."""
    evidence: list[str] = []
    """The figures it rests on, one in a line."""
    short_bytes: Whole = 0
    """What was missing for this request."""


class Remedy(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing to try."""

    kind: str
    """``expandable_segments``, ``checkpointing``, ``micro_batch``, ``zero``, ``offload``, ``fused`` and so on."""
    text: str
    setting: str = ""
    """What to write where, such as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``; empty where it is up to the
    script."""
    frees_bytes: Whole = 0
    """Bytes it would free at the moment of the error; 0: not known."""
    bound: Literal["", "about", "at most"] = ""
    """How ``frees_bytes`` is meant."""


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
    """Highest allocated of its last finished step (CPU: highest resident set)."""
    batch_shape: list[Whole] = []
    """Of its last finished step."""
    collective: str = ""
    """The collective it was inside of."""
    age_s: float = 0.0
    """How old these figures were."""
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
    remedies: list[Remedy] = msgspec.field(name="mends")
    """What to try, in this order."""
    ranks: list[RankMoment] = []
    """All ranks at that moment, the failing one included."""
    processes: list[ProcessMemory] = []
    """Who held memory of the rank's device (NVML; on the CPU the ranks' resident memory)."""
    device_used_bytes: Whole = 0
    """By everybody, at the sample before; 0 where nothing sampled it."""
    path: str = ""
    """Where this report is kept, relative to the run directory."""
