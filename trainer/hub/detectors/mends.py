"""What a person would try against each pattern, in the words of the framework in use, and what it would save."""

from typing import Any, NamedTuple

from ....protocol.telemetry import Hello

_BUCKET = 500_000_000
"""DeepSpeed's default for both bucket sizes, in numbers."""
_SMALLER = 200_000_000
_SUB_GROUP = 1_000_000_000


class Mend(NamedTuple):
    """What to try, as a sentence, and how many bytes that saves (0: does not follow from the numbers)."""

    text: str
    saves_bytes: int = 0


def mend_of(pattern: str, size: int, hello: Hello | None) -> Mend:
    """Say what to try against a pattern that takes ``size`` bytes."""
    make = {
        "foreach_temporaries": _foreach,
        "optimizer_temporaries": _foreach,
        "gradient_upcast": _upcast,
        "allgather_bucket": _gather,
        "reduce_bucket": _reduce,
    }.get(pattern)
    if make is not None:
        return make(size, hello)
    text = _SIMPLE.get(pattern, "")
    return Mend(text, size if pattern == "fp32_logits" else 0)


_SIMPLE = {
    "fp32_logits": (
        "a fused or chunked linear cross-entropy (Liger kernel; use_liger_kernel=True of a Trainer) never makes them "
        "whole; a smaller micro-batch with more accumulation makes them smaller in proportion"
    ),
    "first_step_states": (
        "they stay: a higher ZeRO stage divides them among the ranks, an 8-bit optimizer makes them smaller, "
        "offload_optimizer moves them"
    ),
    "checkpoint_saving": (
        "save less often, or without gathering the weights (stage3_gather_16bit_weights_on_model_save: false); a save "
        "that does not fit fails the run, so keep that much free"
    ),
    "recomputation": "it is what gradient checkpointing costs: checkpoint smaller pieces to make it smaller",
    "loss_scale_overflow": "nothing, while it is rare: the scale was lowered; bf16 needs no loss scale",
    "longer_batch": (
        "cut at a max_length, group by length or pack, so that no batch is far longer than the others; gradient "
        "checkpointing makes each position cheaper"
    ),
}


def _foreach(size: int, hello: Hello | None) -> Mend:
    framework = hello.framework if hello is not None else ""
    text = {
        "transformers": 'optim="adamw_torch_fused" in the TrainingArguments takes none',
        "deepspeed": (
            "fused=True in torch.optim.AdamW takes none, nor does DeepSpeed's FusedAdam "
            '("optimizer": {"type": "AdamW"} without torch_adam)'
        ),
    }.get(framework, "torch.optim.AdamW(..., fused=True) takes none")
    return Mend(text, size)


def _upcast(size: int, hello: Hello | None) -> Mend:
    zero, world = _zero(hello), hello.world_size if hello is not None else 1
    stage = hello.zero_stage if hello is not None else None
    if stage == 3:
        now = _number(zero, "sub_group_size", _SUB_GROUP)
        saves = size - size * _SMALLER // now if now > _SMALLER and size >= 4 * _SMALLER else 0
        return Mend(f"a smaller sub_group_size (now {now:.0e}): the copy is made for one sub-group at a time", saves)
    if stage:
        return Mend(
            "offload_optimizer moves it off the device; ZeRO stage 3 makes it for one sub_group_size at a time; more "
            "ranks make each one's partition smaller",
            size,
        )
    saves = size - size // world if world > 1 else 0
    return Mend(f"ZeRO stage 1 or 2 divides it among the {world} ranks; offload_optimizer moves it", saves)


def _gather(size: int, hello: Hello | None) -> Mend:
    if hello is not None and hello.zero_stage == 3:
        return Mend(
            "smaller stage3_prefetch_bucket_size and stage3_max_live_parameters gather fewer parameters ahead; a lower "
            "stage3_param_persistence_threshold keeps fewer"
        )
    return _bucket(size, hello, "allgather_bucket_size")


def _reduce(size: int, hello: Hello | None) -> Mend:
    return _bucket(size, hello, "reduce_bucket_size")


def _bucket(size: int, hello: Hello | None, option: str) -> Mend:
    now = _number(_zero(hello), option, _BUCKET)
    if now <= _SMALLER:
        return Mend(f"a smaller {option} (now {now:.0e} numbers)")
    return Mend(f"a smaller {option}: {_SMALLER:.0e} in place of {now:.0e} numbers", size - size * _SMALLER // now)


def _zero(hello: Hello | None) -> dict[str, Any]:
    config = hello.deepspeed_config if hello is not None else None
    section = (config or {}).get("zero_optimization")
    return section if isinstance(section, dict) else {}


def _number(section: dict[str, Any], name: str, default: int) -> int:
    value = section.get(name, default)
    return int(value) if isinstance(value, int | float) and value > 0 else default
