"""Checks that the settings of a configuration are compatible.

A refusal is a ``ConfigError`` whose text names the place and the dotted path.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.errors import UsageError
from .. import faults
from ..config.load import Loaded
from ..config.schema import Config, Lora
from ..data.messages import parse
from ..support import SEQUENCES, SMALL_STATES, heads_refusal, ranks_refusal, settle_batch


def check_batch(loaded: Loaded, ranks: int) -> None:
    """Refuse a ``training.total_batch`` that the other settings do not yield."""
    run = msgspec.structs.replace(loaded.config.run, ranks=ranks)
    training = settle_batch(msgspec.structs.replace(loaded.config, run=run)).training
    sharing = training.sequence_parallel_size
    total = training.micro_batch * training.micro_steps * ranks // sharing
    if training.total_batch not in (0, total) and ranks % sharing == 0:
        raise loaded.error(
            "training.total_batch",
            f"is {training.total_batch}, but micro_batch {training.micro_batch} x grad_accumulation "
            f"{training.micro_steps} x {ranks} rank{'s' * (ranks != 1)}"
            f"{f' / sequence_parallel_size {sharing}' * (sharing > 1)} is {total}",
        )


def check_settings(loaded: Loaded, device: str) -> None:
    """Refuse settings that exclude each other, or that ``device`` (``cuda`` or ``cpu``) does not support."""
    _refuse(loaded, _rules(loaded.config, device == "cpu"))


_Rule = tuple[object, str, str]  # Whether a setting is refused, its dotted path, and why


def _refuse(loaded: Loaded, rules: Iterable[_Rule]) -> None:
    for refused, path, text in rules:
        if refused:
            raise loaded.error(path, text)


def _rules(config: Config, on_cpu: bool) -> Iterator[_Rule]:
    model, zero, lora, training, optimizer = config.model, config.zero, config.lora, config.training, config.optimizer
    yield zero.offload_optimizer and zero.stage == 0, "zero.offload_optimizer", "needs zero.stage 1, 2 or 3"
    yield zero.offload_parameters and zero.stage != 3, "zero.offload_parameters", "needs zero.stage 3"
    on_cpu_in_fp16, text = on_cpu and training.precision == "fp16", "torch_fused does not do fp16 on the CPU; use torch"
    yield on_cpu_in_fp16 and optimizer.kind == "torch_fused", "optimizer.kind", text
    yield on_cpu and model.attention == "flash_attention_2", "model.attention", "flash_attention_2 needs a GPU"
    for name, default in msgspec.structs.asdict(Lora()).items():
        text = "needs lora.rank above 0: without it all weights are trained"
        yield not lora.rank and getattr(lora, name) != default, f"lora.{name}", text
    # peft 0.21 computes the norms of weights that ZeRO-3 has partitioned (tuners/lora/dora.py, get_weight_norm).
    text = "dora cannot be used with zero.stage=3; use zero.stage=2, or lora.kind=lora"
    yield lora.kind == "dora" and zero.stage == 3, "lora.kind", text
    if model.quantization != "none":
        key = "model.quantization"
        yield not lora.rank, key, "needs lora.rank above 0: weights held in 4 bits cannot be trained"
        yield not model.name, key, "needs a model.name: random weights are not quantized"
        yield zero.stage == 3, key, "cannot be used with zero.stage=3, which partitions the base; use 2"
        yield util.find_spec("bitsandbytes") is None, key, "needs bitsandbytes; run: pip install 'ftmon[qlora]'"
    if model.gradient_checkpointing == "none":
        text = "needs model.gradient_checkpointing: layers or selective"
        yield model.checkpoint_every > 1, "model.checkpoint_every", text
        text = "is inputs, those of recomputed layers; set model.gradient_checkpointing"
        yield model.activation_offload == "inputs", "model.activation_offload", text
    budget, compiles = "model.activation_memory_budget", model.compile == "layers"
    if model.activation_memory_budget < 1:
        excluded = model.compile == "off" or (model.compile == "auto" and (on_cpu or uncompiled(config)))
        yield excluded, budget, "needs model.compile=layers; without it use model.gradient_checkpointing"
        text = "cannot be used with model.gradient_checkpointing, which keeps less; use one of them"
        yield model.gradient_checkpointing != "none", budget, text
    if compiles:
        key = "model.compile"
        text = "needs data.packing=true: padded batches differ in length, and each would be compiled anew"
        yield not config.data.packing, key, text
        yield model.quantization != "none", key, "cannot be used with model.quantization"
        text = "cannot be used with gradient_checkpointing=selective; use model.activation_memory_budget"
        yield model.gradient_checkpointing == "selective", key, text
        text = "cannot be used with optimizer.kind=muon on the CPU, where nothing is compiled then; use off"
        yield on_cpu and optimizer.kind == "muon", key, text
    text = "cannot be used with lora.rank: the embeddings of new tokens would not be trained; train all weights"
    yield config.tokenizer.special_tokens and lora.rank, "tokenizer.special_tokens", text
    blank = any(not token.strip() for token in config.tokenizer.special_tokens)
    yield blank, "tokenizer.special_tokens", "has a token without a visible character"
    yield on_cpu_in_fp16, "training.precision", "fp16 is not for the CPU; use fp32 or bf16"
    warmup = config.schedule.warmup_steps
    text = f"is {warmup}, more than training.max_steps, which is {training.max_steps}"
    yield warmup != "auto" and 0 < training.max_steps < warmup, "schedule.warmup_steps", text


def settle_compile(config: Config, compiler: bool, note: Callable[[str], None]) -> Config:
    """Return a resolved configuration whose ``model.compile`` is ``off`` if it is ``auto`` and excluded; note why.

    ``compiler``: whether the C compiler that it needs is there. On the CPU layers are not compiled unless asked for.
    """
    if config.model.compile != "auto":
        return config
    reason = uncompiled(config) or ("" if compiler else "no C compiler (gcc, clang or $CC) is found")
    on_gpu = config.run.device != "cpu"
    if on_gpu and not reason:
        return config
    if on_gpu:
        note(f"decoder layers are not compiled (model.compile): {reason}")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, compile="off"))


def uncompiled(config: Config) -> str:
    """Return the setting that excludes compiled layers; empty if none does."""
    model = config.model
    for excluded, setting in (
        (not config.data.packing, "data.packing=false"),
        (model.quantization != "none", f"model.quantization={model.quantization}"),
        (model.gradient_checkpointing == "selective", "model.gradient_checkpointing=selective"),
        (config.training.sequence_parallel_size > 1, "training.sequence_parallel_size"),
        (bool(config.debug.lengths), "debug.lengths"),
    ):
        if excluded:
            return f"it cannot be used with {setting}"
    return ""


def check_dtypes(loaded: Loaded, precision: str) -> None:
    """Refuse data types of ZeRO that the training precision (``bf16``, ``fp16`` or ``fp32``) excludes."""
    zero = loaded.config.zero
    known, key, kept = ("auto", "fp32", precision), "zero.grad_accum_dtype", zero.grad_accum_dtype
    text = f"is {{}}, but training.precision is {precision}; use fp32"
    own = f"is {kept}, but without master weights stage 0 accumulates in {precision}; use zero.stage=2"
    pure = zero.stage == 0 and loaded.config.optimizer.master_weights == "none"
    _refuse(
        loaded,
        (
            (kept not in known, key, text.format(kept)),
            (zero.communication_dtype not in known, "zero.communication_dtype", text.format(zero.communication_dtype)),
            (pure and kept not in ("auto", precision), key, own),
        ),
    )


def check_fault(loaded: Loaded, ranks: int) -> None:
    """Refuse a fault that is impossible with this number of ranks and steps."""
    if not loaded.config.debug.fault:
        return
    try:
        fault = faults.parse(loaded.config.debug.fault, ranks)
    except UsageError as error:
        raise loaded.error("debug.fault", str(error)) from None
    steps = loaded.config.training.max_steps
    if steps and fault.step > steps:
        raise loaded.error("debug.fault", f"comes at step {fault.step}, but training ends at step {steps}")


def check_lengths(loaded: Loaded, precision: str) -> None:
    """Refuse ``debug.lengths`` with settings under which lengths are not measured."""
    config = loaded.config
    lengths = config.debug.lengths
    if not lengths:
        return
    for refused, text in (
        (max(lengths) > config.training.sequence_length, "go up to training.sequence_length"),
        (not config.training.max_steps, "need training.max_steps, the steps at each length"),
        (config.model.compile == "layers", "go with model.compile=off: layers would be compiled for each length"),
        (precision == "fp16", "go with bf16 or fp32: a step that overflows in fp16 is not counted"),
        (config.training.sequence_parallel_size > 1, "go with training.sequence_parallel_size=1"),
    ):
        if refused:
            raise loaded.error("debug.lengths", text)


def optimizer_refusal(config: Config, precision: str) -> tuple[str, str] | None:
    """Return the dotted path of a setting that is incompatible with the optimizer, and why; None: no such setting.

    docs/training.md, Optimizers, has the same as a table.
    """
    return next(((path, text) for refused, path, text in _optimizer_rules(config, precision) if refused), None)


def _optimizer_rules(config: Config, precision: str) -> Iterator[_Rule]:
    kind, zero, adapts = config.optimizer.kind, config.zero, config.lora.rank > 0
    if kind in (*SMALL_STATES, "muon"):
        unfit = f"cannot be used with optimizer.kind={kind}; use"
        yield zero.offload_optimizer, "zero.offload_optimizer", f"{unfit} optimizer.kind=auto"
        yield zero.offload_parameters, "zero.offload_parameters", f"{unfit} optimizer.kind=auto"
        yield precision == "fp16", "training.precision", f"fp16 {unfit} bf16"
    if config.optimizer.master_weights == "none":
        path, kinds = "optimizer.master_weights", " or ".join(SMALL_STATES)
        yield kind not in SMALL_STATES, path, f"none needs optimizer.kind={kinds}, which round stochastically"
        yield precision != "bf16", path, f"none needs training.precision=bf16, not {precision}"
        text = "none cannot be used with lora.rank: adapters are small, and the frozen base has no copy in fp32"
        yield adapts, path, text
        # engine.py, _do_optimizer_sanity_check selects BF16_Optimizer, which keeps an fp32 copy.
        text = "fp32 needs fp32 master weights at zero.stage 1; leave it out, or use zero.stage=2"
        yield zero.stage == 1 and zero.grad_accum_dtype == "fp32", "zero.grad_accum_dtype", text
    elif kind == "muon":
        text = "muon cannot be used with lora.rank: it is for whole matrices; use auto"
        yield adapts, "optimizer.kind", text
        # stage_1_and_2.py and stage3.py compute the norm over the orthogonalized update.
        text = (
            "must be 0 with optimizer.kind=muon and zero.stage 1 to 3 or zero.grad_accum_dtype=bf16: DeepSpeed would "
            "clip Muon's updates, which have a norm of their own, instead of the gradients"
        )
        in_bf16 = precision == "bf16" and zero.grad_accum_dtype == "bf16"
        yield (zero.stage or in_bf16) and config.optimizer.max_grad_norm, "optimizer.max_grad_norm", text


_HEADS = ("num_attention_heads", "n_head", "num_heads")  # Names of the number of query heads in transformers


def refusal(config: Config, ranks: int, precision: str) -> tuple[str, str] | None:
    """Return the dotted path of a setting that excludes sequence parallelism, and the reason; None: no such setting."""
    size = config.training.sequence_parallel_size
    if size == 1:
        return None
    if text := ranks_refusal(ranks, size):
        return SEQUENCES, text
    model = config.model
    for path, refused, text in (
        ("model.attention", model.attention in ("eager", "flash_attention_2"), f"{model.attention}; use auto"),
        ("model.compile", model.compile == "layers", "compiled layers; use off"),
        ("model.quantization", model.quantization != "none", f"{model.quantization}; use none"),
        ("training.precision", precision == "fp16", "fp16; use bf16"),
    ):
        if refused:
            what, _, fix = text.partition("; ")
            return path, f"{what} cannot be used with {SEQUENCES}={size}: it has not been shown to be right; {fix}"
    heads = _heads_of(config)
    text = heads_refusal(*heads, size) if heads is not None else ""
    return (SEQUENCES, text) if text else None


def _heads_of(config: Config) -> tuple[int, int] | None:
    """Return the numbers of query and of key/value heads if they can be read without torch or a network."""
    found: Any = config.model.config
    if config.model.name:
        try:
            found = parse((Path(config.model.name).expanduser() / "config.json").read_text())
        except (OSError, ValueError):
            return None
    if isinstance(found, Mapping) and isinstance(found.get("text_config"), Mapping):
        found = found["text_config"]
    if not isinstance(found, Mapping):
        return None
    heads = next((found[name] for name in _HEADS if isinstance(found.get(name), int)), None)
    groups = found.get("num_key_value_heads")
    if heads is None or heads < 1:
        return None
    return heads, groups if isinstance(groups, int) and groups > 0 else heads
