"""Causes of a phase's transient: from its step's own figures at once, and from stacks once a rank has sent them.

The figures identify a batch longer than any before, an update skipped by the loss scaler, and a checkpoint being saved.
Stacks identify the others, by known patterns: a file and a function of PyTorch, DeepSpeed or transformers (from PyTorch
2.11 and 2.13, DeepSpeed 0.19, transformers 4 and 5). The innermost frame that matches a pattern decides. Blocks
allocated by native code have no stack; logits are recognised by their size. Otherwise no cause is reported.

Traces are the entries of ``torch.cuda.memory._snapshot()["device_traces"]``: plain dictionaries with ``action``,
``addr``, ``size``, ``time_us`` and ``frames``. A frame of a message is ``file:line function``.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from ...code_owner import library_of
from ...messages.memory import Cause, Remedy
from ...messages.telemetry import Hello, StackGroup, Step
from ..allocator.settings import round_size
from ..findings.finding import Condition
from ..remedies import remedy_of

MOST_GROUPS = 20
MOST_FRAMES = 25

Entry = dict[str, Any]


class Span(NamedTuple):
    """One occurrence of the armed phase, on the clock of the entries (microseconds since the epoch)."""

    begin_us: int
    end_us: int
    start_bytes: int


class Blocks(NamedTuple):
    """Allocations, as indices of their entries in the trace."""

    total_bytes: int  # allocated bytes at that moment, including earlier blocks; 0: not computed
    found: list[int]
    kept: frozenset[int]  # the members of `found` that outlived their phase


def blocks_at_peak(trace: Sequence[Entry], spans: Sequence[Span]) -> Blocks:
    """Return the blocks allocated in a phase and live at its peak, for the occurrence with the highest peak."""
    best: tuple[int, int, Span] | None = None
    for span in spans:
        freed = _free_action(trace, span.begin_us, span.end_us)
        now = top = span.start_bytes
        place = -1
        for index, entry in _within(trace, span.begin_us, span.end_us):
            if entry["action"] == "alloc":
                now += round_size(entry["size"])
                if now > top:
                    top, place = now, index
            elif entry["action"] == freed:
                now -= round_size(entry["size"])
        if best is None or top > best[0]:
            best = top, place, span
    if best is None:
        return Blocks(0, [], frozenset())
    top, place, span = best
    freed = _free_action(trace, span.begin_us, span.end_us)
    live: dict[int, int] = {}
    at_peak: list[int] = []
    for index, entry in _within(trace, span.begin_us, span.end_us):
        if entry["action"] == "alloc":
            live[entry["addr"]] = index
        elif entry["action"] == freed:
            live.pop(entry["addr"], None)
        if index == place:
            at_peak = list(live.values())
    return Blocks(top, at_peak, frozenset(live.values()).intersection(at_peak))


def blocks_left(trace: Sequence[Entry], begin_us: int, border_us: int, end_us: int) -> Blocks:
    """Return the blocks allocated from ``begin_us`` to ``border_us`` and not freed until ``end_us``."""
    live: dict[int, int] = {}
    for index, entry in _within(trace, begin_us, end_us):
        if entry["action"] == "alloc":
            # A later allocation at an address means that the earlier block has been freed.
            live.pop(entry["addr"], None)
            if entry["time_us"] < border_us:
                live[entry["addr"]] = index
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    left = list(live.values())
    return Blocks(0, left, frozenset(left))


def grouped(trace: Sequence[Entry], blocks: Blocks, *, kept_counts: bool = False) -> tuple[list[StackGroup], int]:
    """Group blocks by their allocating stack; those with most transient bytes first, with ``kept_counts`` most bytes.

    Returns the first ``MOST_GROUPS`` groups, and the bytes of all blocks with a stack that count.
    """
    found: dict[tuple[tuple[str, int, str], ...], list[int]] = {}
    for index in blocks.found:
        entry = trace[index]
        size = round_size(entry["size"])
        key = tuple((f["filename"], f["line"], f["name"]) for f in (entry.get("frames") or ())[:MOST_FRAMES])
        sums = found.setdefault(key, [0, 0, 0, 0])
        sums[0] += size
        sums[1] += 1
        sums[2] = max(sums[2], size)
        sums[3] += size if index in blocks.kept else 0

    def weight(group: StackGroup) -> int:
        return group.bytes - (0 if kept_counts else group.kept_bytes)

    groups = [
        StackGroup(total, count, [f"{file}:{line} {name}" for file, line, name in reversed(key)], largest, kept)
        for key, (total, count, largest, kept) in found.items()
    ]
    groups.sort(key=lambda group: (weight(group), group.bytes), reverse=True)
    return groups[:MOST_GROUPS], sum(weight(group) for group in groups if group.frames)


def reaches_back(trace: Sequence[Entry], begin_us: int, ring: int) -> bool:
    """Return whether the trace, from a ring of ``ring`` entries, covers the time since ``begin_us``."""
    return len(trace) < ring or trace[0]["time_us"] <= begin_us


def _within(trace: Sequence[Entry], begin_us: int, end_us: int) -> Iterable[tuple[int, Entry]]:
    time = itemgetter("time_us")
    first = bisect_left(trace, begin_us, key=time)
    last = bisect_right(trace, end_us, lo=first, key=time)
    return ((index, trace[index]) for index in range(first, last))


def _free_action(trace: Sequence[Entry], begin_us: int, end_us: int) -> str:
    """Return the action at which the allocator's counters stop counting a block.

    That is the request to free it. A block used by another stream (``record_stream``, as for ZeRO-3's gathered
    parameters) completes later, often in the next phase. Completions are used only if the trace has no requests.
    """
    asked = any(entry["action"] == "free_requested" for _, entry in _within(trace, begin_us, end_us))
    return "free_requested" if asked else "free_completed"


_ZERO12, _ZERO3 = r"zero/stage_1_and_2\.py$", r"zero/stage3\.py$"
_REDUCE = r"_*(avg_scatter|add_grad_to_ipg|reduce|allreduce|average_tensor|buffered|gradient_reduction)\w*|\w*ipg\w*"
_UPDATE = r"step|unscale_and_clip_grads|get_grad_norm_direct"
_FLATTEN = r"flatten_dense_tensors_aligned|_get_preflattened_grad_partition|get_flat_partition"
_HP = r"_?update_hp_grads?|get_grads_for_norm|accumulate_hp_grads_and_remove_lp"
_FRAMES = (
    ("foreach_temporaries", r"torch/optim/\w+\.py$", r"_multi_tensor_\w+"),
    ("optimizer_temporaries", r"torch/optim/\w+\.py$", r"_single_tensor_\w+"),
    ("first_step_states", r"torch/optim/\w+\.py$", r"_init_group"),
    ("first_step_states", r"deepspeed/ops/\w+/\w+\.py$", r"step"),
    ("allgather_bucket", r"zero/(partition_parameters|partitioned_param_coordinator)\.py$", r"\w*all_?gather\w*"),
    ("allgather_bucket", r"deepspeed/runtime/utils\.py$", r"all_gather\w*"),
    ("allgather_bucket", _ZERO3, r"_partitioned_buffers_all_gather|_fp32_state_allgather"),
    ("allgather_bucket", r"torch/distributed/(fsdp|_composable)/", r"\w*all_gather\w*|_?unshard\w*|_alloc_storage"),
    ("reduce_bucket", r"comm/coalesced_collectives\.py$", r"\w+"),
    ("reduce_bucket", rf"{_ZERO12}|{_ZERO3}|deepspeed/runtime/engine\.py$", _REDUCE),
    ("reduce_bucket", _ZERO12, r"setup_buckets|copy_grads_in_partition|_build_compact_grad_partition_buffer"),
    ("reduce_bucket", r"torch/distributed/(fsdp|_composable)/", r"\w*reduce_scatter\w*"),
    ("gradient_upcast", _ZERO3, rf"_prepare_\w*sub_group|_get_norm_groups|{_UPDATE}"),
    ("gradient_upcast", _ZERO12, rf"scaled_global_norm|{_FLATTEN}|{_UPDATE}"),
    ("gradient_upcast", r"deepspeed/runtime/(bf16_optimizer|fp16/(un)?fused_optimizer)\.py$", rf"{_HP}|{_UPDATE}"),
    ("fp32_logits", r"torch/nn/functional\.py$", r"cross_entropy|nll_loss|log_softmax"),
    ("fp32_logits", r"transformers/loss/\w+\.py$", r"\w+"),
    (
        "checkpoint_saving",
        r"torch/(serialization\.py$|distributed/checkpoint/)|checkpoint_engine/|/safetensors/",
        r".+",
    ),
    ("checkpoint_saving", r"deepspeed/runtime/engine\.py$", r"_?save_\w+|_zero3_consolidated_16bit_state_dict"),
    ("recomputation", r"torch/utils/checkpoint\.py$", r"recompute_fn|unpack_hook|inner_unpack|backward"),
    ("recomputation", r"activation_checkpointing/checkpointing\.py$", r"backward"),
)
_PATTERNS = [(name, re.compile(file), re.compile(function)) for name, file, function in _FRAMES]
_LOGITS_SLACK = 0.02
LEAST_SHARE = 0.2  # a pattern is named if it has at least this share of the transient bytes

WORDS = {
    "foreach_temporaries": "foreach temporaries of the optimizer",
    "optimizer_temporaries": "temporaries of the optimizer, one parameter at a time",
    "first_step_states": "the optimizer's states, which its first step creates",
    "allgather_bucket": "a buffer that parameters are gathered into",
    "reduce_bucket": "a bucket that gradients are reduced in",
    "gradient_upcast": "a copy of the gradients for the update",
    "fp32_logits": "logits in fp32 and the loss",
    "checkpoint_saving": "copies made to save a checkpoint",
    "recomputation": "activations computed again by gradient checkpointing",
    "loss_scale_overflow": "an update that the loss scaler skipped",
    "longer_batch": "a longer batch than any before",
}


class Frame(NamedTuple):
    """A parsed frame of a message."""

    file: str
    line: str
    function: str

    @property
    def short(self) -> str:
        """The frame without the folder: ``adamw.py:531 _multi_tensor_adamw``."""
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.function}"


def parse_frame(text: str) -> Frame:
    """Parse ``file:line function``; text of another form becomes the function."""
    place, _, function = text.partition(" ")
    file, _, line = place.rpartition(":")
    return Frame(file.replace("\\", "/"), line, function) if line.isdigit() else Frame("", "", text)


def pattern_of(frames: Sequence[str]) -> tuple[str, Frame | None]:
    """Return a stack's pattern and the frame that matched; empty and None if none does."""
    for text in reversed(frames):
        frame = parse_frame(text)
        for name, file, function in _PATTERNS:
            if function.fullmatch(frame.function) and file.search(frame.file):
                return name, frame
    return "", None


def place_of(frames: Sequence[str]) -> str:
    """Return the frame to show: the innermost frame of user code, else the innermost outside PyTorch."""
    parsed = [parse_frame(text) for text in reversed(frames)]
    for wanted in (lambda name: not name, lambda name: name not in ("torch", "python", "native")):
        for frame in parsed:
            if wanted(library_of(frame.file)):
                return frame.short
    return parsed[0].short if parsed else ""


class Part(NamedTuple):
    """Share of one pattern in a transient."""

    pattern: str  # empty: no known pattern
    bytes: int
    where: str  # the frame that matched; without a pattern, the frame with most bytes; empty: no stack


class Named(NamedTuple):
    """A cause by its patterns."""

    parts: list[Part]  # patterns with at least `LEAST_SHARE` of the bytes, largest first
    total: int  # transient bytes according to the trace
    elsewhere: Part  # the remaining bytes, with the frame that has most of them

    @property
    def pattern(self) -> str:
        """The pattern with most bytes; empty: none has enough, so the cause is unknown."""
        return self.parts[0].pattern if self.parts else ""


def name_cause(cause: Cause, tokens: int) -> Named:
    """Return the patterns that explain a transient; ``tokens``: positions of the largest micro-batch, 0: unknown."""
    sums: dict[str, int] = {}
    heaviest: dict[str, tuple[int, str]] = {}
    for group, weight in _weigh(cause):
        name, frame = pattern_of(group.frames)
        if not name and _is_logits(group, cause, tokens):
            name = "fp32_logits"
        sums[name] = sums.get(name, 0) + weight
        if weight > heaviest.get(name, (-1, ""))[0]:
            heaviest[name] = weight, frame.short if frame is not None else place_of(group.frames)
    total = max(sum(sums.values()), cause.transient_bytes)
    large = {name for name, size in sums.items() if name and size >= LEAST_SHARE * total > 0}
    parts = [Part(name, sums[name], heaviest[name][1]) for name in sorted(large, key=lambda name: -sums[name])]
    rest = [(heaviest[name], name) for name in sums if name not in large]
    size = sum(sums[name] for _, name in rest)
    return Named(parts, total, Part("", size, max(rest)[0][1] if rest else ""))


def _weigh(cause: Cause) -> Iterable[tuple[StackGroup, int]]:
    """Return the bytes that count for each group: transient ones, or all if kept blocks made the peak."""
    passing = sum(group.bytes - group.kept_bytes for group in cause.groups)
    all_counts = cause.reason == "leak" or passing < 0.25 * cause.transient_bytes
    return ((group, group.bytes if all_counts else group.bytes - group.kept_bytes) for group in cause.groups)


def _is_logits(group: StackGroup, cause: Cause, tokens: int) -> bool:
    """Return whether blocks have the size of the logits, positions x vocabulary, in fp32 or 16 bits."""
    whole = cause.vocabulary * tokens
    if not whole or not group.count or group.largest_bytes * group.count > 1.1 * group.bytes:
        return False
    return any(abs(group.largest_bytes - whole * width) <= _LOGITS_SLACK * whole * width for width in (4, 2))


class NumbersCause(msgspec.Struct, frozen=True):
    """A cause identified by the step's own figures, without stacks."""

    pattern: str  # `longer_batch`, `loss_scale_overflow` or `checkpoint_saving`
    remedy: Remedy
    batch_shape: list[int] = []
    longest_shape: list[int] = []  # the largest batch before
    saves_bytes: int = 0  # bytes that a batch like earlier ones would save; 0: see the remedy


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
    peak_bytes: int
    capacity_bytes: int
    share_of_capacity: float
    phase_ms: float
    sets_step_peak: bool
    sets_run_peak: bool
    measure: str  # `allocated` or `resident`
    steps: list[int]  # the last ten steps with such a spike
    repeats: bool
    batch_shape: list[int]
    allocations: int = 0
    allocated_bytes: int = 0
    largest_bytes: list[int] = []  # the largest single allocations of the latest spike, from the allocator's trace
    latest_rank: int = -1  # the rank of the latest spike, if ranks share one alert
    causes: Any = ()  # the known `NumbersCause` and `StackCause`


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
    repeats: bool = msgspec.field(default_factory=lambda: True)
    zero_stage: int | None = None
    causes: Any = ()


class GrowthFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory that the first optimizer step created and kept."""

    growth_bytes: int  # growth on the rank with most
    net_bytes: int  # net increase of memory in that step, on the latest rank
    capacity_bytes: int
    bytes_by_rank: dict[str, int]
    freed_bytes: int = 0  # gradients that the same update freed, on the latest rank


class LeakFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory that grows step over step."""

    bytes_per_step: int
    full_at_step: int  # 0: unknown without a capacity
    window_steps: int
    block_steps: int
    rise_bytes: int
    level_bytes: int
    peak_bytes: int
    capacity_bytes: int
    measure: str
    bytes_per_step_by_rank: dict[str, int]
    latest_rank: int = -1
    ends_at_step: int = 0  # the run's last step, if it comes before the device is full; else 0
    place: str = ""  # the line that allocated most of the kept memory
    cause: Any = None  # a `Cause` of reason `leak`: memory left allocated by whole steps, by stack


REPEATED_SHARE = 0.5  # stacks of a step with less than this share of the spike do not explain it
STEPS_KEPT = 64  # steps whose batch sizes are kept: the stacks of a step arrive some steps later


class _Rank:
    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.elements = 0
        self.longest: list[int] = []
        self.sizes: deque[tuple[int, int]] = deque(maxlen=STEPS_KEPT)
        """Latest steps, each with the elements of its largest micro-batch."""


class KnownCauses:
    """Known causes of each rank's and phase's transients."""

    def __init__(self) -> None:
        self._ranks = defaultdict[int, _Rank](_Rank)
        self._numbers: dict[Condition, NumbersCause] = {}
        self._stacks: dict[Condition, StackCause] = {}
        self._with_stacks: set[Condition] = set()

    def hello(self, hello: Hello) -> None:
        self._ranks[hello.rank].hello = hello

    def note(self, step: Step) -> None:
        """Record a step's batch, once the step has been checked."""
        shape = step.batch_shape
        if not shape:
            return
        rank = self._ranks[step.rank]
        elements = shape[0] * shape[1] if len(shape) > 1 else shape[0]
        rank.sizes.append((step.step, elements))
        if elements > rank.elements:
            rank.elements, rank.longest = elements, shape

    def by_numbers(self, condition: Condition, step: Step, phase: str, transient: int, usual: int) -> None:
        """Find a cause in the step's own figures; call it before ``note``."""
        rank = self._ranks[step.rank]
        shape, pattern, saves = step.batch_shape, "", 0
        if phase == "optimizer" and step.overflow:
            pattern = "loss_scale_overflow"
        elif phase == "checkpoint":
            pattern = "checkpoint_saving"
        elif phase in ("forward", "backward") and len(shape) > 1 and shape[0] * shape[1] > rank.elements > 0:
            pattern, saves = "longer_batch", max(0, transient - usual)
        if pattern:
            remedy = remedy_of(pattern, transient, rank.hello)
            self._numbers[condition] = NumbersCause(pattern, remedy, shape, rank.longest, saves)
        else:
            self._numbers.pop(condition, None)

    def by_stacks(self, condition: Condition, cause: Cause, transient: int) -> None:
        """Process stacks that a rank has sent for a transient of ``transient`` bytes."""
        rank = self._ranks[cause.rank]
        if cause.transient_bytes < REPEATED_SHARE * transient:
            if condition not in self._stacks or self._stacks[condition].named is None:
                self._stacks[condition] = StackCause(cause)
            return
        self._with_stacks.add(Condition("spike", cause.rank, cause.phase))
        # Of the step's batch, or of the latest batch if the step is unknown; 0: none is known.
        elements = dict(rank.sizes).get(cause.step, rank.sizes[-1][1] if rank.sizes else 0)
        named = name_cause(cause, elements)
        remedy = remedy_of(named.pattern, named.parts[0].bytes, rank.hello) if named.pattern else Remedy("", "")
        self._stacks[condition] = StackCause(cause, named, remedy)

    def has_stacks(self, condition: Condition) -> bool:
        """Return whether stacks of a step with this transient are already known."""
        return condition in self._with_stacks

    def of(self, condition: Condition) -> tuple[NumbersCause | StackCause, ...]:
        """Return the known causes of a transient, those from its own step first."""
        found = self._numbers.get(condition), self._stacks.get(condition)
        return tuple(cause for cause in found if cause is not None)


def conditions_of(cause: Cause) -> list[Condition]:
    """Return the conditions that the stacks of a rank's phase may explain."""
    if cause.reason == "leak":
        return []
    which = (("spike", cause.rank), ("spike", None), ("steady_transient", None))
    return [Condition(kind, rank, cause.phase) for kind, rank in which]
