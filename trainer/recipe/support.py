"""What ranks, attention heads and optimizers support; folders that replace others. Nothing here imports torch."""

import shutil
from pathlib import Path

import msgspec

from .config.schema import Config

SMALL_STATES = ("adamw_bf16", "adamw_8bit")  # kinds with running averages of 2 bytes or 1
NO_MASTERS = " without master weights"
ROUND_ROBIN = " in round-robin order"
SEQUENCES = "training.sequence_parallel_size"
TARGET_ROWS = 32  # Rows of a step where ``training.grad_accumulation`` is ``auto``
LEAST_STEPS = 10  # Steps that small data leave in an epoch; then a step has fewer rows


def ranks_refusal(ranks: int, size: int) -> str:
    """Return the reason why ``ranks`` ranks cannot form groups of ``size``; empty if they can."""
    if ranks % size == 0:
        return ""
    near = max(size, ranks // size * size)
    return f"is {size}, but {ranks} rank{'s are' * (ranks != 1) or ' is'} not a multiple of it; use run.ranks={near}"


def heads_refusal(heads: int, key_value_heads: int, size: int) -> str:
    """Return the reason why attention heads cannot be divided among ``size`` ranks; empty if they can.

    Query heads are divided. Key and value heads are divided too, or repeated if there are fewer than ranks.
    """

    def refuse(count: int, name: str) -> str:
        fits = [one for one in range(2, heads + 1) if _divides(heads, key_value_heads, one)]
        fix = f"use {', '.join(map(str, fits[:6]))} or 1" if fits else "use 1"
        return f"is {size}, which cannot divide the model's {count} {name} heads; {fix}"

    if heads % size:
        return refuse(heads, "attention")
    return "" if _divides(heads, key_value_heads, size) else refuse(key_value_heads, "key/value")


def _divides(heads: int, key_value_heads: int, size: int) -> bool:
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


def zero_stage(config: Config, ranks: int) -> int:
    """Return the ZeRO stage that DeepSpeed runs for a resolved configuration on ``ranks`` ranks.

    DeepSpeed 0.19.8's stage 0 in half precision takes a step when it is made (``fp16/unfused_optimizer.py``,
    ``initialize_optimizer_states``: one weight decay, and the first update has 0.74 of its size), and in fp16 divides
    by a loss scale that it has not multiplied with. Stage 1 has neither, and on one rank costs no more. Stage 2 on one
    rank partitions nothing, and copies each gradient through its buckets.
    """
    stage, training = config.zero.stage, config.training
    if training.precision == "fp32" or config.optimizer.master_weights == "none":
        return stage
    if stage == 0:
        return 1
    alone = ranks == 1 and stage == 2 and training.precision == "bf16" and not config.zero.offload_optimizer
    return 1 if alone and config.zero.grad_accum_dtype in ("auto", "fp32") else stage


def in_bf16_optimizer(config: Config, ranks: int) -> bool:
    """Return whether DeepSpeed runs its ``BF16_Optimizer``: stage 1 in bf16 with fp32 weights and gradients.

    Every rank has the gradients of all weights in it, and updates an equal part.
    """
    in_fp32 = config.optimizer.master_weights == "fp32" and config.zero.grad_accum_dtype in ("auto", "fp32")
    in_bf16 = config.training.precision == "bf16" and not config.zero.offload_optimizer
    return zero_stage(config, ranks) == 1 and in_bf16 and in_fp32


def settle_batch(config: Config, rows: int = 0) -> Config:
    """Return a resolved configuration whose ``training.grad_accumulation`` is a number.

    ``auto`` makes ``training.total_batch``, or a step of ``TARGET_ROWS`` rows of ``training.sequence_length`` tokens
    over all ranks. Of small data, an epoch of ``rows`` rows (0: not known), it takes half, a quarter, ... of them, so
    that the epoch has ``LEAST_STEPS`` steps: powers of two, so that most numbers of ranks make the same batch.
    """
    training = config.training
    if training.grad_accumulation != "auto":
        return config
    target = training.total_batch or TARGET_ROWS
    while rows and not training.total_batch and target > 1 and target * LEAST_STEPS > rows:
        target //= 2
    micro_step = training.micro_batch * max(1, config.run.ranks // training.sequence_parallel_size)
    number = max(1, round(target / micro_step))
    return msgspec.structs.replace(config, training=msgspec.structs.replace(training, grad_accumulation=number))


def learning_rate(config: Config) -> float:
    """Return the peak learning rate. LoRA's best rate is about ten times that of all weights (arXiv 2405.09673)."""
    lr = config.optimizer.lr
    return lr if lr != "auto" else 2e-4 if config.lora.rank else 2e-5


def states(config: Config) -> str:
    """Return the name of a checkpoint's kind of optimizer states: only a run with the same kind can load them."""
    kind = config.optimizer.kind if config.optimizer.kind in (*SMALL_STATES, "muon") else "adamw"
    if config.zero.stage in (1, 2) and config.deepspeed.get("zero_optimization", {}).get("round_robin_gradients"):
        # DeepSpeed 0.19 lays partitions out in this order, and writes the map of a partition without it.
        kind += ROUND_ROBIN
    return kind if config.optimizer.master_weights == "fp32" else f"{kind}{NO_MASTERS}"


def state_bytes(config: Config) -> float:
    """Return the bytes of optimizer states per trained parameter in a checkpoint, master copy included.

    For Muon this is an upper bound: hidden matrices have one running average instead of two.
    """
    # 8-bit averages have an fp32 scale for each block of 256.
    averages = {"adamw_bf16": 4.0, "adamw_8bit": 2 + 2 * 4 / 256}.get(config.optimizer.kind, 8.0)
    # ZeRO keeps and writes a flat fp32 copy of fp32 weights too.
    has_masters = config.optimizer.master_weights == "fp32" and bool(
        config.training.precision != "fp32" or config.zero.stage
    )
    return averages + 4 * has_masters


def converts(held: str) -> bool:
    """Return whether DeepSpeed's universal format converts states of this name to another number of ranks."""
    return held == "adamw"


def replace_folder(path: Path, by: Path | None = None) -> None:
    """Remove a folder that may exist, and rename another one to its name.

    Renamed first: an interrupted removal leaves no folder that looks like a checkpoint.
    """
    going = path.with_name(path.name + ".old")
    shutil.rmtree(going, ignore_errors=True)
    if path.exists():
        path.rename(going)
    if by is not None:
        by.rename(path)
    shutil.rmtree(going, ignore_errors=True)
