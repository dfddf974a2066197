"""Known patterns of transients in training, recognised in stacks of Python frames.

A frame is ``file:line function``. Each pattern is a file and a function of PyTorch, DeepSpeed or transformers (from
PyTorch 2.11 and 2.13, DeepSpeed 0.19, transformers 4 and 5). The innermost frame that matches a pattern decides. Blocks
allocated by native code have no stack; logits are recognised by their size.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...code_owner import library_of
from ...messages.memory import Cause, StackGroup

_ZERO12, _ZERO3 = r"zero/stage_1_and_2\.py$", r"zero/stage3\.py$"
_REDUCE = r"_*(avg_scatter|add_grad_to_ipg|reduce|allreduce|average_tensor|buffered|gradient_reduction)\w*|\w*ipg\w*"
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
    (
        "gradient_upcast",
        _ZERO3,
        r"_prepare_\w*sub_group|_get_norm_groups|get_grad_norm_direct|unscale_and_clip_grads|step",
    ),
    (
        "gradient_upcast",
        _ZERO12,
        r"step|unscale_and_clip_grads|scaled_global_norm|get_grad_norm_direct|flatten_dense_tensors_aligned|"
        r"_get_preflattened_grad_partition|get_flat_partition",
    ),
    (
        "gradient_upcast",
        r"deepspeed/runtime/(bf16_optimizer|fp16/(un)?fused_optimizer)\.py$",
        r"step|unscale_and_clip_grads|_?update_hp_grads?|get_grads_for_norm|accumulate_hp_grads_and_remove_lp",
    ),
    ("fp32_logits", r"torch/nn/functional\.py$", r"cross_entropy|nll_loss|log_softmax"),
    ("fp32_logits", r"transformers/loss/\w+\.py$", r"\w+"),
    (
        "checkpoint_saving",
        r"torch/serialization\.py$|torch/distributed/checkpoint/|checkpoint_engine/|/safetensors/",
        r".+",
    ),
    ("checkpoint_saving", r"deepspeed/runtime/engine\.py$", r"_?save_\w+|_zero3_consolidated_16bit_state_dict"),
    ("recomputation", r"torch/utils/checkpoint\.py$", r"recompute_fn|unpack_hook|inner_unpack|backward"),
    ("recomputation", r"activation_checkpointing/checkpointing\.py$", r"backward"),
)
_PATTERNS = [(name, re.compile(file), re.compile(function)) for name, file, function in _FRAMES]
_LOGITS_SLACK = 0.02
LEAST_SHARE = 0.2
"""A pattern is named if it has at least this share of the transient bytes."""

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
"""Every pattern, in words."""


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

    pattern: str
    """Empty: no known pattern."""
    bytes: int
    where: str
    """The frame that matched; without a pattern, the frame with most bytes; empty: no stack."""


class Named(NamedTuple):
    """A cause by its patterns."""

    parts: list[Part]
    """Patterns with at least ``LEAST_SHARE`` of the bytes, largest first."""
    total: int
    """Transient bytes according to the trace."""
    elsewhere: Part
    """The remaining bytes, with the frame that has most of them."""

    @property
    def pattern(self) -> str:
        """The pattern with most bytes; empty: none has enough, so the cause is unknown."""
        return self.parts[0].pattern if self.parts else ""


def name_cause(cause: Cause, tokens: int) -> Named:
    """Return the patterns that explain a transient.

    Args:
        tokens: positions of the largest micro-batch; 0: unknown.
    """
    sums: dict[str, int] = {}
    heaviest: dict[str, tuple[int, str]] = {}
    for group, weight in _weigh(cause):
        name, frame = pattern_of(group.frames)
        if not name and _is_logits(group, cause, tokens):
            name = "fp32_logits"
        sums[name] = sums.get(name, 0) + weight
        where = frame.short if frame is not None else place_of(group.frames)
        if weight > heaviest.get(name, (-1, ""))[0]:
            heaviest[name] = weight, where
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
