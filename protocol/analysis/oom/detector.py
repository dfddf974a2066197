"""Finds out-of-memory errors in reports of failed allocations and in exceptions, and judges why an allocation failed.

The judgement uses the figures at that moment; "cannot tell" is a verdict too. A cause counts only if the request would
have fitted without it. If several causes qualify, the one that holds the most memory is the verdict, and the others are
listed with it. Checked in this order:

1. A request larger than the whole device is **too_large**; a request for which memory was free hit a **limit**.
2. Causes whose size is measured: **fragmentation** (reserved memory is free, but in pieces), **other_process**, memory
   of this process **outside** PyTorch's allocator, a **leak** (memory at the start of steps keeps growing), a
   **longer_batch** than any before (allocated memory in excess of any earlier peak).
3. Causes that the failing phase and stack show: **logits**, **buckets**, **optimizer_states**,
   **optimizer_temporaries**, **checkpoint**, **activations**.
4. Parameters, gradients and optimizer states that fill the device by themselves: **too_large**. Else **unknown**.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from ...messages.memory import OomKind, OomReport
from ...messages.telemetry import Failure, Hello, Oom, ProcessMemory, Step
from ..allocator.snapshot_layout import matters
from ..allocator.snapshot_replay import STATE_FRAMES
from ..findings.finding import Condition, Finding, Resolution, added, resolved

OOM_WORDS = ("outofmemoryerror", "out of memory", "can't allocate memory", "cannot allocate memory", "memoryerror")
TRACEBACK_LIMIT = 8000
FITTING = ("parameters", "gradients", "optimizer_states", "master_copies", "partitions")
"""Parts that do not depend on the batch."""
_SEGMENT = 2 * 2**20  # the allocator asks the driver for multiples of this, and reports that size when it fails
_PART_OF_DEVICE = 0.05  # share of the device from which memory of other processes, or outside the allocator, counts
_PIECES = 0.02  # free pieces of less than this share of the device are not the cause
_OUTSIDE_USUAL = 2 * 2**30  # usual size of a CUDA context and NCCL's buffers
_RISING = 0.8
_LEAST_STEPS = 8
_LOGITS = ("cross_entropy", "log_softmax", "nll_loss", "causallmloss", "linear_cross_entropy", "compute_loss_func")
_BUCKETS = (
    "ipg", "bucket", "reduce_scatter", "reduce_grad", "allgather", "all_gather", "flatten_dense", "average_tensor",
    "partition_grads", "get_flat_partition",
)  # fmt: skip
_ADAM = ("adamw", "adam", "fusedadam", "nadam", "radam", "lamb", "fusedlamb")
"""Optimizers that keep two values per updated parameter."""


class Uncaught(msgspec.Struct, frozen=True):
    """An out-of-memory exception that ended a script; also added to the report of the same error."""

    error: str
    traceback: str


class Released(msgspec.Struct, frozen=True):
    """Added later: a rank held at its error was released."""


def is_oom(error: str) -> bool:
    """Return whether an exception's text is an out-of-memory error (CUDA's, the CPU allocator's or Python's own)."""
    lowered = error.lower()
    return any(words in lowered for words in OOM_WORDS)


class OomDetector:
    """Finds ranks that are out of memory; a later step of the rank resolves the finding."""

    def __init__(self) -> None:
        self._standing: dict[int, tuple[Condition, int]] = {}
        """By rank that ran out of memory: its finding, and the step in which it happened."""
        self._held: set[int] = set()

    def oom(self, report: OomReport) -> list[Finding]:
        """Process the report of one failed allocation; the report has the finding's facts."""
        return self._found("oom", report.rank, report.step, report.phase, report)

    def held(self, rank: int, held: bool) -> list[Finding]:
        """Record that a rank is held at its out-of-memory error, or was released."""
        if held:
            self._held.add(rank)
            return []
        condition = self.standing(rank)
        if condition is None or rank not in self._held:
            return []
        self._held.discard(rank)
        return [added(condition, Released())]

    def failure(self, failure: Failure) -> list[Finding] | None:
        """Return the finding of an out-of-memory failure; None for other failures."""
        if not is_oom(failure.error):
            return None
        facts = Uncaught(failure.error, failure.traceback[-TRACEBACK_LIMIT:])
        condition = self.standing(failure.rank)
        if condition is not None:
            return [added(condition, facts)]
        return self._found("oom_failure", failure.rank, failure.step, failure.phase, facts)

    def step(self, step: Step) -> list[Finding]:
        """Resolve the finding of a rank that makes a step: its script caught the error and continued."""
        known = self._standing.get(step.rank)
        # Steps from before the error may arrive later, because they wait for their device times.
        if known is None or step.step < known[1]:
            return []
        del self._standing[step.rank]
        return [resolved(known[0], Resolution("caught", step.step))]

    def standing(self, rank: int) -> Condition | None:
        """Return the finding of a rank that is out of memory, or None."""
        known = self._standing.get(rank)
        return known[0] if known is not None else None

    def restore(self, finding: Finding) -> None:
        if finding.rank is not None and finding.state != "resolved":
            self._standing[finding.rank] = finding.condition, finding.step or 0

    def _found(
        self, kind: Literal["oom", "oom_failure"], rank: int, step: int, phase: str, facts: OomReport | Uncaught
    ) -> list[Finding]:
        finding = Finding(kind, facts, severity="error", ranks=(rank,), step=step, rank=rank, phase=phase)
        self._standing[rank] = finding.condition, step
        return [finding]


class OomContext(NamedTuple):
    """Facts besides the failing rank's report."""

    hello: Hello | None = None
    processes: Sequence[ProcessMemory] = ()  # processes with memory on the device, from its latest sample
    to_come: int = 0  # bytes that the optimizer still had to allocate for its states, from a snapshot; 0: unknown


ALONE = OomContext()


class Judgement(msgspec.Struct, frozen=True):
    """Why an allocation failed."""

    kind: OomKind
    also: list[OomKind]  # other causes without which the request would have fitted
    sure: bool  # whether the figures admit no other cause
    short_bytes: int  # bytes missing for the request
    figures: dict[str, int]  # the figures used, as returned by `facts`


def judge(oom: Oom, around: OomContext = ALONE) -> Judgement:
    """Judge a failed allocation (the rules are this module's docstring)."""
    short, found = max(0, oom.requested_bytes - _left(oom)), facts(oom, around)
    kind, also, sure = _kind(oom, found, short)
    return Judgement(kind, also, sure, short, found)


def facts(oom: Oom, around: OomContext) -> dict[str, int]:
    """Return the figures for the judgement, in bytes: those that are known and not 0."""
    found = {
        "fragmented": oom.usable_free_bytes if oom.usable_free_bytes > oom.largest_free_bytes else 0,
        **_outside(oom, around),
        "leak": steady_growth(oom.starts) or 0,
        "excess": _excess_of_batch(oom),
        "logits": logits_bytes(oom),
        "to_come": around.to_come or pending_states(oom),
    }
    return {name: size for name, size in found.items() if size > 0}


def _outside(oom: Oom, around: OomContext) -> dict[str, int]:
    """Return used memory outside the failing rank's allocator: of other processes, its own (CUDA context, NCCL), all.

    The owners are unknown if the list of processes lacks the rank itself: its pids are of another namespace then.
    """
    capacity = oom.capacity_bytes or oom.device_total_bytes
    if oom.measure != "cuda" or not capacity:
        return {}
    elsewhere = max(0, capacity - oom.device_free_bytes - oom.reserved_bytes)
    own = next((process.used_bytes for process in around.processes if process.rank == oom.rank), None)
    if own is None:
        return {"elsewhere": elsewhere}
    others = min(sum(process.used_bytes for process in around.processes if process.rank != oom.rank), elsewhere)
    return {"others": others, "outside": min(own - oom.reserved_bytes, elsewhere - others), "elsewhere": elsewhere}


def steady_growth(starts: Sequence[int]) -> int | None:
    """Return the growth of memory at the start of steps, in bytes, if it grew steadily; else None.

    Steady: over at least 8 steps without the first two (optimizer states, caches), four in five start with more memory
    than the step before, and no decrease is as large as a quarter of the growth.
    """
    later = list(starts[2:])
    if len(later) < _LEAST_STEPS:
        return None
    changes = [after - before for before, after in pairwise(later)]
    gained = later[-1] - later[0]
    rising = sum(change > 0 for change in changes)
    if gained <= 0 or rising < _RISING * len(changes) or -min(changes) > gained / 4:
        return None
    return gained


def pending_states(oom: Oom) -> int:
    """Return a lower bound of the bytes that Adam's first step still had to allocate for states; 0: unknown.

    Adam keeps two values per updated parameter, in the parameters' data type; states created so far are subtracted.
    """
    is_adam = oom.optimizer_class.lower() in _ADAM
    if oom.phase != "optimizer" or not is_adam or not oom.trainable or "optimizer_states" not in oom.parts:
        return 0
    width = 4 if oom.parts.get("master_copies") or oom.parameter_bytes >= 4 * oom.trainable else 2
    return max(0, 2 * width * oom.trainable - oom.parts["optimizer_states"])


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a batch of that shape; 0 if unknown."""
    return math.prod(shape) if shape else 0


def _excess_of_batch(oom: Oom) -> int:
    """Return by how many bytes a batch larger than any before exceeds the highest peak; 0 if it is not larger."""
    is_longer = 0 < elements(oom.largest_shape) < elements(oom.batch_shape)
    if not is_longer or oom.phase not in ("forward", "backward", "eval") or oom.peak_bytes <= 0:
        return 0
    return max(0, oom.allocated_bytes + oom.requested_bytes - oom.peak_bytes)


def logits_bytes(oom: Oom) -> int:
    """Return the size of the batch's fp32 logits in bytes if the request has that size (or that in bf16); else 0."""
    if len(oom.batch_shape) != 2 or oom.vocabulary <= 0:
        return 0
    rows, length = oom.batch_shape
    for full in (rows * length * oom.vocabulary, rows * (length - 1) * oom.vocabulary):
        if any(w * full > _SEGMENT and _rounded(w * full) == _rounded(oom.requested_bytes) for w in (4, 2)):
            return full * 4
    return 0


def _rounded(size: int) -> int:
    return -(-size // _SEGMENT)


def _kind(oom: Oom, found: dict[str, int], short: int) -> tuple[OomKind, list[OomKind], bool]:
    """Return the verdict, other causes without which the request would have fitted, and whether it is certain."""
    capacity = oom.capacity_bytes or oom.device_total_bytes
    if not capacity or (not oom.requested_bytes and not oom.allocated_bytes):
        return "unknown", [], False
    if oom.measure == "cuda" and not oom.requested_bytes:
        # Refused by the driver outside PyTorch's allocator, which always reports the size.
        return "outside", [], True
    if oom.requested_bytes > capacity:
        return "too_large", [], True
    if oom.measure != "cuda":
        if oom.device_free_bytes >= oom.requested_bytes > 0:
            return "limit", [], bool(oom.limit)
    elif oom.limit and oom.requested_bytes > oom.device_total_bytes:
        return "limit", [], True
    weights: dict[OomKind, int] = {}
    unused = max(0, oom.reserved_bytes - oom.allocated_bytes)
    if oom.usable_free_bytes >= oom.requested_bytes > oom.largest_free_bytes:
        weights["fragmentation"] = oom.usable_free_bytes
    elif not oom.free_blocks and oom.measure == "cuda" and unused >= oom.requested_bytes:
        weights["fragmentation"] = unused  # the block sizes are unknown, but contiguous it would have sufficed
    elif oom.largest_free_bytes < oom.requested_bytes and found.get("fragmented", 0) >= max(short, _PIECES * capacity):
        weights["fragmentation"] = found["fragmented"]  # with the driver's free memory it would have sufficed
    # If the device had room, the process's own limit refused it: other processes are not the cause.
    if not (oom.limit and oom.device_free_bytes >= oom.requested_bytes):
        weights |= _beside_allocator(found, short, capacity)
    causes: tuple[tuple[str, OomKind], ...] = (("leak", "leak"), ("excess", "longer_batch"))
    weights |= {cause: found[name] for name, cause in causes if found.get(name, 0) >= max(short, 1)}
    by_phase, sure = _of_phase(oom, found)
    if "fragmentation" in weights and (
        not matters(weights["fragmentation"], oom.reserved_bytes)
        or (by_phase == "optimizer_states" and found.get("to_come", 0) > weights["fragmentation"] + _left(oom))
    ):
        del weights["fragmentation"]  # even contiguous, the free memory would not have lasted much longer
    order = sorted(weights, key=lambda kind: -weights[kind])
    if by_phase == "logits" and (not order or order[0] == "longer_batch"):
        return "logits", order, sure
    if order:
        return order[0], order[1:], order[0] != "leak" and (order[0] != "outside" or bool(found.get("outside")))
    if by_phase:
        return by_phase, [], sure
    if oom.measure == "cuda" and oom.device_free_bytes >= oom.requested_bytes:
        return "limit", [], bool(oom.limit)
    fixed = sum(oom.parts.get(part, 0) for part in FITTING)
    if fixed >= 0.6 * oom.device_total_bytes or oom.phase == "init":
        return "too_large", [], bool(oom.parts)
    return "unknown", [], False


def _beside_allocator(found: dict[str, int], short: int, capacity: int) -> dict[OomKind, int]:
    """Return the memory of other processes, or of this one outside PyTorch, if it would have sufficed."""
    weights: dict[OomKind, int] = {}
    if found.get("others", 0) >= max(short, _PART_OF_DEVICE * capacity):
        weights["other_process"] = found["others"]
    if found.get("outside", 0) >= max(short, _PART_OF_DEVICE * capacity, _OUTSIDE_USUAL):
        weights["outside"] = found["outside"]
    elif "others" not in found and found.get("elsewhere", 0) >= max(short, 2 * _PART_OF_DEVICE * capacity):
        weights["outside"] = found["elsewhere"]  # of an unknown process
    return weights


def _left(oom: Oom) -> int:
    return oom.room_bytes if oom.limit or oom.room_bytes else oom.device_free_bytes


def _of_phase(oom: Oom, found: dict[str, int]) -> tuple[OomKind | None, bool]:
    frames = [frame.lower() for frame in oom.stack] if oom.stack_of == "failing" else []
    last = " ".join(frames[-12:])
    if any(word in last for word in STATE_FRAMES) or (oom.phase == "optimizer" and not oom.steps_done and not frames):
        return "optimizer_states", True
    if "logits" in found or (oom.phase in ("forward", "eval") and any(word in last for word in _LOGITS)):
        return "logits", True
    if any(word in last for word in _BUCKETS):
        return "buckets", True
    if oom.phase == "optimizer":
        temporaries = any(word in last for word in ("_multi_tensor", "_foreach", "_single_tensor"))
        if not oom.steps_done and not temporaries:
            return "optimizer_states", False
        return "optimizer_temporaries", temporaries
    if oom.phase == "checkpoint":
        return "checkpoint", False
    if oom.phase in ("forward", "backward", "eval"):
        parts = oom.parts
        fixed = sum(parts.get(part, 0) for part in FITTING)
        if parts and fixed > 0.6 * oom.allocated_bytes and parts.get("activations", 0) < fixed / 4:
            return "too_large", False
        return "activations", bool(parts.get("activations"))
    return None, False
