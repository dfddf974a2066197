"""What to try after an out-of-memory error, in order, with the bytes each would free where the numbers say so."""

from collections.abc import Iterator

import msgspec

from ..oom import Mend, OomKind, OomVerdict
from ..telemetry import Hello, Oom
from .verdict import ALONE, Around, elements, facts

_STATES_8BIT = 0.75
"""Adam's two states take 8 bytes a number in fp32, and 2 in 8 bits."""

_LARGE_VOCABULARY = 30_000
_MICRO_BATCH = "train_micro_batch_size_per_gpu, gradient_accumulation_steps"

_ORDER: dict[OomKind, tuple[str, ...]] = {
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


def mends(oom: Oom, verdict: OomVerdict, around: Around = ALONE) -> list[Mend]:
    """List what to try, in the order a person should; what does not apply, or is done already, is left out."""
    found = {mend.kind: _plain(mend) for mend in _possible(oom, verdict, around)}
    if verdict.kind == "too_large" and oom.requested_bytes > (oom.capacity_bytes or oom.device_total_bytes):
        return [found["request"]]
    names = list(_ORDER[verdict.kind])
    if oom.limit and "limit" not in names and oom.measure == "cuda":
        names.append("limit")
    return [found[name] for name in names if name in found]


def _plain(mend: Mend) -> Mend:
    return mend if mend.frees_bytes else msgspec.structs.replace(mend, bound="")


def _possible(oom: Oom, verdict: OomVerdict, around: Around) -> Iterator[Mend]:
    sizes = facts(oom, around)
    yield from _of_the_batch(oom, verdict, around.hello, sizes)
    yield from _of_what_is_held(oom, around.hello)
    on_gpu = oom.measure == "cuda"
    if on_gpu and not oom.expandable:
        yield Mend(
            "expandable_segments",
            "Let segments grow instead of lying apart, so that free memory is in one piece.",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            max(0, oom.usable_free_bytes - oom.largest_free_bytes),
            "at most" if oom.usable_free_bytes > oom.largest_free_bytes else "",
        )
    if "leak" in sizes:
        yield Mend(
            "leak",
            "Find what the script keeps from step to step: losses or outputs that are not detached, lists of tensors, "
            "caches. Recorded stacks name the line that allocated what stays.",
            frees_bytes=sizes["leak"],
            bound="about",
        )
    if "others" in sizes:
        pids = ", ".join(
            f"{process.name or 'a process'} (pid {process.pid})"
            for process in sorted(around.processes, key=lambda process: -process.used_bytes)[:3]
            if process.rank != oom.rank
        )
        yield Mend(
            "processes", f"End or move what else is on this device: {pids}.", frees_bytes=sizes["others"], bound="about"
        )
    yield Mend(
        "outside",
        "See what else takes device memory: other processes (nvidia-smi), NCCL channels and buffers, CUDA graphs, "
        "libraries with allocators of their own.",
        "NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS",
        sizes.get("outside") or sizes.get("elsewhere", 0),
        "at most",
    )
    yield _limit(oom)
    yield Mend("request", "Look at the line that asks for it: it wants more than the device has.")
    yield Mend("device", "Use a device with more memory, more devices, a smaller model, or LoRA.")
    yield Mend(
        "checkpoint", "Save shards instead of a whole model.", "stage3_gather_16bit_weights_on_model_save: false"
    )


def _limit(oom: Oom) -> Mend:
    if oom.measure != "cuda":
        text = "Raise the limit: ulimit -v, the control group's memory limit, or vm.overcommit_memory."
        return Mend("limit", text)
    beyond = min(max(0, oom.capacity_bytes - oom.device_total_bytes), oom.device_free_bytes)
    setting = "torch.cuda.set_per_process_memory_fraction"
    return Mend("limit", "Raise the limit on this process.", setting, beyond, "at most" if beyond else "")


def _of_the_batch(oom: Oom, verdict: OomVerdict, hello: Hello | None, sizes: dict[str, int]) -> Iterator[Mend]:
    activations = oom.parts.get("activations", 0)
    if not oom.checkpointing:
        yield Mend(
            "checkpointing",
            "Gradient checkpointing: keep the inputs of the layers only and compute the rest again in the backward.",
            "model.gradient_checkpointing_enable()",
            activations,
            "at most" if activations else "",
        )
    shape = oom.batch_shape
    rows = shape[0] if shape else (hello.micro_batch or 0 if hello is not None else 0)
    held = activations or sizes.get("logits", 0)
    if rows > 1:
        half = rows // 2
        yield Mend(
            "micro_batch",
            f"A smaller micro-batch, {half} instead of {rows}, with {-(-rows // half)} times the accumulation steps.",
            _MICRO_BATCH,
            round(held * (1 - half / rows)),
            "about" if held else "",
        )
    elif not rows:
        yield Mend("micro_batch", "A smaller micro-batch, with more accumulation steps.", _MICRO_BATCH)
    if len(shape) == 2 and (rows <= 1 or elements(oom.largest_shape) < elements(shape)):
        longest = f" or cut them at {oom.largest_shape[1]:,}, the longest so far" if len(oom.largest_shape) == 2 else ""
        yield Mend(
            "sequence",
            f"Shorter sequences: bring batches of like length together{longest}.",
            frees_bytes=sizes.get("excess", 0),
            bound="about" if sizes.get("excess") else "",
        )
    if verdict.kind == "logits" or oom.vocabulary > _LARGE_VOCABULARY:
        computed = elements(shape) * oom.vocabulary * 4 if len(shape) == 2 else 0
        logits = sizes.get("logits") or computed or oom.requested_bytes
        yield Mend(
            "chunked_loss",
            "Compute the loss in chunks, or fused with the last layer, so that the logits never exist as a whole "
            "(Liger kernel, cut cross-entropy). The figure is of one copy of them.",
            frees_bytes=logits,
            bound="about",
        )


def _of_what_is_held(oom: Oom, hello: Hello | None) -> Iterator[Mend]:
    parts = oom.parts
    states = parts.get("optimizer_states", 0) + parts.get("master_copies", 0)
    adam = "adam" in oom.optimizer.lower()
    coming = 8 * oom.trainable if adam and oom.phase == "optimizer" and not oom.steps_done else 0
    stage = hello.zero_stage if hello is not None else None
    world = hello.world_size if hello is not None else 1
    if world > 1 and (stage is None or stage < 3):
        sharded = {0: states or coming, 1: parts.get("gradients", 0), 2: parts.get("parameters", 0)}
        saved = round(sharded.get(stage or 0, 0) * (1 - 1 / world))
        what = {0: "optimizer states", 1: "gradients", 2: "parameters"}[stage or 0]
        yield Mend(
            "zero",
            f"ZeRO stage {(stage or 0) + 1}: the {what} are split over the {world} ranks.",
            f"zero_optimization.stage: {(stage or 0) + 1}",
            saved,
            "about" if saved else "",
        )
    if oom.measure == "cuda" and not _offloads(hello):
        held = states or coming
        yield Mend(
            "offload",
            "Keep the optimizer's states in the host's memory; the update is computed there.",
            "zero_optimization.offload_optimizer.device: cpu",
            held,
            "about" if held else "",
        )
    if "fused" not in oom.optimizer.lower():
        saved = oom.parameter_bytes if "foreach" in oom.optimizer else 0
        yield Mend(
            "fused",
            "A fused optimizer updates in place, without temporaries.",
            "torch.optim.AdamW(..., fused=True)",
            saved,
            "at most" if saved else "",
        )
    own_states = parts.get("optimizer_states", 0) or coming
    saved = round(own_states * _STATES_8BIT)
    yield Mend(
        "eight_bit",
        "An optimizer with 8-bit states.",
        "bitsandbytes.optim.AdamW8bit",
        saved,
        "about" if saved else "",
    )
    ds = hello.deepspeed_config if hello is not None else None
    zero = ds.get("zero_optimization") if isinstance(ds, dict) else None
    size = zero.get("reduce_bucket_size") if isinstance(zero, dict) else None
    known = f" (reduce_bucket_size is {size:,.0f} elements)" if isinstance(size, int | float) else ""
    yield Mend(
        "buckets",
        f"Smaller buckets{known}.",
        "zero_optimization.reduce_bucket_size, allgather_bucket_size, stage3_prefetch_bucket_size",
    )


def _offloads(hello: Hello | None) -> bool:
    config = hello.deepspeed_config if hello is not None else None
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    return isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")
