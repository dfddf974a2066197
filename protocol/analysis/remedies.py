"""The table of remedies against causes of memory use, each with its condition and the bytes it saves.

Causes are the patterns of transients (``memory.stack_patterns``) and the verdicts on failed allocations (``OomKind``).
If a remedy has several rows, the first row whose condition holds applies.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from ..messages.memory import OomVerdict, Remedy
from ..messages.telemetry import Hello, Oom
from .oom.detector import ALONE, OomContext, elements, facts

_STATES_8BIT = 0.75  # Adam's two states take 8 bytes per element in fp32, and 2 in 8 bits
_LARGE_VOCABULARY = 30_000
_BUCKET = 500_000_000  # DeepSpeed's default for both bucket sizes, in elements
_SMALLER = 200_000_000
_SUB_GROUP = 1_000_000_000
_MICRO_BATCH = "train_micro_batch_size_per_gpu, gradient_accumulation_steps"
_SMALLER_UNITS = "smaller FSDP units (wrap each layer): fewer parameters are gathered, and gradients reduced, at once"
_NO_OOM = Oom(0, 0, "", 0.0, 0, 0, 0, 0, 0)


class Case(NamedTuple):
    """Inputs of conditions and savings. Unknown values are empty."""

    kind: str  # the verdict on a failed allocation
    size: int  # bytes of the pattern
    oom: Oom
    sizes: dict[str, int]  # figures that the verdict is based on, bytes
    framework: str
    world: int
    stage: int  # ZeRO stage; 0 also without ZeRO
    gather: int  # this and the next two: sizes of DeepSpeed's buckets, in elements
    reduce: int
    sub_group: int
    offloads: bool  # the optimizer's states are not on the device
    rows: int  # rows of the batch
    states: int  # bytes of the optimizer's states with their fp32 copies; in Adam's first step, of those to be created
    own_states: int  # the same without the copies
    remarks: dict[str, str]  # text for figures that may be unknown

    @property
    def fsdp(self) -> bool:
        """Whether PyTorch shards the model: DeepSpeed's options do not apply."""
        return self.framework == "fsdp"

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU's memory ran out."""
        return self.oom.measure == "cuda"


class Row(NamedTuple):
    """One remedy, or one form of it."""

    name: str
    text: str  # the advice; in braces, fields of the case
    setting: str = ""
    when: Callable[[Case], object] = lambda _: True
    frees: Callable[[Case], int] = lambda _: 0  # bytes freed; 0: unknown
    bound: Literal["", "about", "at most"] = ""


def _smaller(now: int, size: int) -> int:
    return size - size * _SMALLER // now if now > _SMALLER else 0


def _half(case: Case) -> int:
    held = case.oom.parts.get("activations", 0) or case.sizes.get("logits", 0)
    return round(held * (1 - case.rows // 2 / case.rows))


def _logits(case: Case) -> int:
    shape = case.oom.batch_shape
    computed = elements(shape) * case.oom.vocabulary * 4 if len(shape) == 2 else 0
    return case.sizes.get("logits") or computed or case.oom.requested_bytes


def _is_long(case: Case) -> bool:
    shape = case.oom.batch_shape
    return len(shape) == 2 and (case.rows <= 1 or elements(case.oom.largest_shape) < elements(shape))


def _split(case: Case) -> tuple[int, int, int]:
    """Return the bytes that ZeRO's stages 1, 2 and 3 each split."""
    return case.states, case.oom.parts.get("gradients", 0), case.oom.parts.get("parameters", 0)


# fmt: off
TABLE = (
    # Against the patterns of transients.
    Row("temporaries", 'optim="adamw_torch_fused" in the TrainingArguments needs none',
        when=lambda case: case.framework == "transformers", frees=lambda case: case.size),
    Row("temporaries",
        "fused=True in torch.optim.AdamW needs none, nor does DeepSpeed's FusedAdam "
        '("optimizer": {{"type": "AdamW"}} without torch_adam)',
        when=lambda case: case.framework == "deepspeed", frees=lambda case: case.size),
    Row("temporaries", "torch.optim.AdamW(..., fused=True) needs none", frees=lambda case: case.size),
    Row("gradient_upcast",
        "a smaller sub_group_size (now {sub_group:.0e}): the copy is made for one sub-group at a time",
        when=lambda case: case.stage == 3,
        frees=lambda case: _smaller(case.sub_group, case.size) if case.size >= 4 * _SMALLER else 0),
    Row("gradient_upcast",
        "offload_optimizer moves it off the device; ZeRO stage 3 makes it for one sub_group_size at a time; more "
        "ranks make each one's partition smaller",
        when=lambda case: case.stage, frees=lambda case: case.size),
    Row("gradient_upcast", "ZeRO stage 1 or 2 divides it among the {world} ranks; offload_optimizer moves it",
        when=lambda case: case.world > 1, frees=lambda case: case.size - case.size // case.world),
    Row("gradient_upcast", "ZeRO with offload_optimizer moves it off the device", frees=lambda case: case.size),
    Row("allgather_bucket", _SMALLER_UNITS, when=lambda case: case.fsdp),
    Row("allgather_bucket",
        "smaller stage3_prefetch_bucket_size and stage3_max_live_parameters gather fewer parameters ahead; a lower "
        "stage3_param_persistence_threshold keeps fewer", when=lambda case: case.stage == 3),
    Row("allgather_bucket", "a smaller allgather_bucket_size (now {gather:.0e} numbers)",
        when=lambda case: case.gather <= _SMALLER),
    Row("allgather_bucket", "a smaller allgather_bucket_size: {smaller} in place of {gather:.0e} numbers",
        frees=lambda case: _smaller(case.gather, case.size)),
    Row("reduce_bucket", _SMALLER_UNITS, when=lambda case: case.fsdp),
    Row("reduce_bucket", "a smaller reduce_bucket_size (now {reduce:.0e} numbers)",
        when=lambda case: case.reduce <= _SMALLER),
    Row("reduce_bucket", "a smaller reduce_bucket_size: {smaller} in place of {reduce:.0e} numbers",
        frees=lambda case: _smaller(case.reduce, case.size)),
    Row("fp32_logits",
        "a fused or chunked linear cross-entropy (Liger kernel; use_liger_kernel=True of a Trainer) never "
        "materializes them; a smaller micro-batch with more accumulation makes them proportionally smaller",
        frees=lambda case: case.size),
    Row("first_step_states",
        "they stay allocated: more ranks make each one's shard smaller, an 8-bit optimizer makes them smaller, "
        "CPUOffloadPolicy (FSDP2) or CPUOffload moves them off the device", when=lambda case: case.fsdp),
    Row("first_step_states",
        "they stay allocated: a higher ZeRO stage divides them among the ranks, an 8-bit optimizer makes them "
        "smaller, offload_optimizer moves them off the device"),
    Row("checkpoint_saving",
        "save less often, or a sharded state dict instead of a full one; a save that does not fit fails the run, so "
        "keep that much free", when=lambda case: case.fsdp),
    Row("checkpoint_saving",
        "save less often, or without gathering the weights (stage3_gather_16bit_weights_on_model_save: false); a "
        "save that does not fit fails the run, so keep that much free"),
    Row("recomputation", "it is the cost of gradient checkpointing: checkpoint smaller pieces to make it smaller"),
    Row("loss_scale_overflow", "nothing, if it is rare: the scale was lowered; bf16 needs no loss scale"),
    Row("longer_batch",
        "truncate to a max_length, group by length or pack, so that no batch is far longer than the others; gradient "
        "checkpointing makes each position cheaper"),
    # After a failed allocation.
    Row("checkpointing",
        "Gradient checkpointing: keep only the inputs of the layers and recompute the rest in the backward.",
        "model.gradient_checkpointing_enable()",
        lambda case: not case.oom.checkpointing, lambda case: case.oom.parts.get("activations", 0), "at most"),
    Row("micro_batch", "A smaller micro-batch, {half} instead of {rows}, with {more} times the accumulation steps.",
        _MICRO_BATCH, lambda case: case.rows > 1, _half, "about"),
    Row("micro_batch", "A smaller micro-batch, with more accumulation steps.", _MICRO_BATCH,
        lambda case: not case.rows),
    Row("sequence", "Shorter sequences: group batches by length{longest}.",
        when=_is_long, frees=lambda case: case.sizes.get("excess", 0), bound="about"),
    Row("chunked_loss",
        "Compute the loss in chunks, or fused with the last layer, so that the logits never exist as a whole "
        "(Liger kernel, cut cross-entropy). The figure is for one copy.",
        when=lambda case: case.kind == "logits" or case.oom.vocabulary > _LARGE_VOCABULARY,
        frees=_logits, bound="about"),
    Row("zero", "ZeRO stage {next_stage}: the {split} are split over the {world} ranks.",
        "zero_optimization.stage: {next_stage}",
        lambda case: case.world > 1 and case.stage < 3 and not case.fsdp,
        lambda case: round(_split(case)[case.stage] * (1 - 1 / case.world)), "about"),
    Row("offload", "Keep parameters, gradients and optimizer states in host memory.",
        "fully_shard(..., offload_policy=CPUOffloadPolicy())",
        lambda case: case.on_gpu and case.fsdp, lambda case: sum(_split(case)), "at most"),
    Row("offload", "Keep the optimizer's states in host memory and compute the update there.",
        "zero_optimization.offload_optimizer.device: cpu",
        lambda case: case.on_gpu and not case.offloads, lambda case: case.states, "about"),
    Row("fused", "A fused optimizer updates in place, without temporaries.", "torch.optim.AdamW(..., fused=True)",
        # One kernel: PyTorch's ``fused``, or a class such as DeepSpeed's ``FusedAdam``.
        lambda case: "fused" not in (case.oom.optimizer_implementation + case.oom.optimizer_class).lower(),
        lambda case: case.oom.parameter_bytes if case.oom.optimizer_implementation == "foreach" else 0, "at most"),
    Row("eight_bit", "An optimizer with 8-bit states.", "bitsandbytes.optim.AdamW8bit",
        frees=lambda case: round(case.own_states * _STATES_8BIT), bound="about"),
    Row("buckets", "Smaller FSDP units: wrap each layer, so that fewer parameters are gathered and reduced at once.",
        "fully_shard(layer)", lambda case: case.fsdp),
    Row("buckets", "Smaller buckets{bucket}.",
        "zero_optimization.reduce_bucket_size, allgather_bucket_size, stage3_prefetch_bucket_size"),
    Row("expandable_segments", "Expandable segments keep free memory in one piece.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        lambda case: case.on_gpu and not case.oom.expandable,
        lambda case: max(0, case.oom.usable_free_bytes - case.oom.largest_free_bytes), "at most"),
    Row("leak",
        "Find what the script keeps from step to step: losses or outputs that are not detached, lists of tensors, "
        "caches. Recorded stacks name the line that allocated it.",
        when=lambda case: "leak" in case.sizes, frees=lambda case: case.sizes["leak"], bound="about"),
    Row("processes", "End or move the other processes on this device: {others}.",
        when=lambda case: "others" in case.sizes, frees=lambda case: case.sizes["others"], bound="about"),
    Row("outside",
        "Check what else uses device memory: other processes (nvidia-smi), NCCL channels and buffers, CUDA graphs, "
        "libraries with their own allocators.",
        "NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS",
        frees=lambda case: case.sizes.get("outside") or case.sizes.get("elsewhere", 0), bound="at most"),
    Row("limit", "Raise the limit: ulimit -v, the cgroup's memory limit, or vm.overcommit_memory.",
        when=lambda case: not case.on_gpu),
    Row("limit", "Raise the limit on this process.", "torch.cuda.set_per_process_memory_fraction",
        frees=lambda case: min(
            max(0, case.oom.capacity_bytes - case.oom.device_total_bytes), case.oom.device_free_bytes),
        bound="at most"),
    Row("request", "Check the line that allocates it: it requests more than the device has."),
    Row("device", "Use a device with more memory, more devices, a smaller model, or LoRA."),
    Row("checkpoint", "Save shards instead of a whole model.", "StateDictOptions(full_state_dict=False)",
        lambda case: case.fsdp),
    Row("checkpoint", "Save shards instead of a whole model.",
        "stage3_gather_16bit_weights_on_model_save: false"),
)
# fmt: on

_ORDER: dict[str, tuple[str, ...]] = {
    "fragmentation": ("expandable_segments", "micro_batch", "checkpointing"),
    "limit": ("limit",),
    "longer_batch": ("sequence", "checkpointing", "micro_batch", "chunked_loss", "offload", "zero"),
    "activations": ("checkpointing", "micro_batch", "chunked_loss", "zero", "offload", "expandable_segments"),
    "logits": ("chunked_loss", "micro_batch", "sequence", "checkpointing"),
    "optimizer_states": ("zero", "offload", "eight_bit", "micro_batch"),
    "optimizer_temporaries": ("fused", "zero", "offload", "eight_bit"),
    "buckets": ("buckets", "expandable_segments", "micro_batch"),
    "leak": ("leak",),
    "checkpoint": ("checkpoint", "zero", "offload"),
    "outside": ("outside", "micro_batch"),
    "other_process": ("processes",),
    "too_large": ("zero", "offload", "eight_bit", "device"),
    "unknown": ("expandable_segments", "micro_batch", "checkpointing", "zero", "offload"),
}
"""Remedies for a failed allocation in the order to try them, by verdict."""


def remedies(oom: Oom, verdict: OomVerdict, around: OomContext = ALONE) -> list[Remedy]:
    """Return the remedies in the order to try them, without those that do not apply or are already in use."""
    names = _ORDER[verdict.kind]
    if verdict.kind == "too_large" and oom.requested_bytes > (oom.capacity_bytes or oom.device_total_bytes):
        names = ("request",)
    elif oom.limit and "limit" not in names and oom.measure == "cuda":
        names = (*names, "limit")
    return _choose(names, _case(around, 0, oom, verdict.kind))


def remedy_of(pattern: str, size: int, hello: Hello | None) -> Remedy:
    """Return the remedy for a pattern of ``size`` bytes; its text is empty if none is known."""
    name = "temporaries" if pattern in ("foreach_temporaries", "optimizer_temporaries") else pattern
    return next(iter(_choose([name], _case(OomContext(hello), size))), Remedy(pattern, ""))


def _choose(names: Iterable[str], case: Case) -> list[Remedy]:
    values = {**case._asdict(), **case.remarks}
    found: list[Remedy] = []
    for name in names:
        row = next((row for row in TABLE if row.name == name and row.when(case)), None)
        if row is not None:
            frees = row.frees(case)
            text, setting = row.text.format_map(values), row.setting.format_map(values)
            found.append(Remedy(name, text, setting, frees, row.bound if frees else ""))
    return found


def _case(around: OomContext, size: int, oom: Oom = _NO_OOM, kind: str = "") -> Case:
    hello, parts, largest = around.hello, oom.parts, oom.largest_shape
    config = hello.deepspeed_config if hello is not None else None
    section: Any = (config or {}).get("zero_optimization")
    zero: dict[str, Any] = section if isinstance(section, dict) else {}
    offload: Any = zero.get("offload_optimizer")

    def number(option: str, default: int = _BUCKET) -> int:
        value = zero.get(option, default)
        return int(value) if isinstance(value, int | float) and value > 0 else default

    adam = "adam" in oom.optimizer_class.lower() and oom.phase == "optimizer" and not oom.steps_done
    coming = 8 * oom.trainable if adam else 0
    own_states = parts.get("optimizer_states", 0)
    stage = (hello.zero_stage or 0) if hello is not None else 0
    rows = oom.batch_shape[0] if oom.batch_shape else (hello.micro_batch or 0 if hello is not None else 0)
    bucket = zero.get("reduce_bucket_size")
    processes = sorted(around.processes, key=lambda process: -process.used_bytes)[:3]
    remarks = {
        "smaller": f"{_SMALLER:.0e}",
        "half": f"{rows // 2}",
        "more": f"{-(-rows // (rows // 2))}" if rows > 1 else "",
        "next_stage": f"{stage + 1}",
        "split": {0: "optimizer states", 1: "gradients", 2: "parameters"}.get(stage, ""),
        "longest": f" or cut them at {largest[1]:,}, the longest so far" if len(largest) == 2 else "",
        "bucket": f" (reduce_bucket_size is {bucket:,.0f} elements)" if isinstance(bucket, int | float) else "",
        "others": ", ".join(f"{one.name or 'a process'} (pid {one.pid})" for one in processes if one.rank != oom.rank),
    }
    return Case(
        kind=kind,
        size=size,
        oom=oom,
        sizes=facts(oom, around) if kind else {},
        framework=hello.framework if hello is not None else "",
        world=hello.world_size if hello is not None else 1,
        stage=stage,
        gather=number("allgather_bucket_size"),
        reduce=number("reduce_bucket_size"),
        sub_group=number("sub_group_size", _SUB_GROUP),
        offloads=isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme"),
        rows=rows,
        states=own_states + parts.get("master_copies", 0) or coming,
        own_states=own_states or coming,
        remarks=remarks,
    )
