"""Compatibility of optimizers with ZeRO stages, offload, adapters and precision. Nothing here imports torch.

docs/training.md, Optimizers, has the same as a table.
"""

from ..config.schema import Config

SMALL_STATES = ("adamw_bf16", "adamw_8bit")
"""Kinds with running averages of 2 bytes or 1."""


def refusal(config: Config, precision: str) -> tuple[str, str] | None:
    """Return the dotted path of a setting that is incompatible with the optimizer, and why; None: no such setting.

    Args:
        config: the configuration.
        precision: ``training.precision`` with ``auto`` resolved.
    """
    kind, zero = config.optimizer.kind, config.zero
    if kind in (*SMALL_STATES, "muon"):
        if zero.offload_optimizer:
            return "zero.offload_optimizer", f"cannot be used with optimizer.kind={kind}; use optimizer.kind=auto"
        if zero.offload_parameters:
            return "zero.offload_parameters", f"cannot be used with optimizer.kind={kind}; use optimizer.kind=auto"
        if precision == "fp16":
            return "training.precision", f"fp16 cannot be used with optimizer.kind={kind}; use bf16"
    if config.optimizer.master_weights == "none":
        return _without_masters(config, precision)
    if kind == "muon":
        if config.lora.rank:
            return "optimizer.kind", "muon cannot be used with lora.rank: it is for whole matrices; use auto"
        if zero.stage and config.optimizer.max_grad_norm:
            # stage_1_and_2.py and stage3.py compute the norm over the orthogonalized update.
            return (
                "optimizer.max_grad_norm",
                "must be 0 with optimizer.kind=muon and zero.stage 1 to 3: DeepSpeed would clip Muon's updates, which "
                "have a norm of their own, instead of the gradients",
            )
    return None


def states(config: Config) -> str:
    """Return the name of a checkpoint's kind of optimizer states: only a run with the same kind can load them."""
    kind = config.optimizer.kind if config.optimizer.kind in (*SMALL_STATES, "muon") else "adamw"
    return kind if config.optimizer.master_weights == "fp32" else f"{kind} without master weights"


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


def _without_masters(config: Config, precision: str) -> tuple[str, str] | None:
    """Return a setting that is incompatible with ``optimizer.master_weights=none``, and why; None: no such setting."""
    path, zero = "optimizer.master_weights", config.zero
    if config.optimizer.kind not in SMALL_STATES:
        return path, f"none needs optimizer.kind={' or '.join(SMALL_STATES)}, which round stochastically"
    if precision != "bf16":
        return path, f"none needs training.precision=bf16, not {precision}"
    if config.lora.rank:
        return path, "none cannot be used with lora.rank: adapters are small, and the frozen base has no copy in fp32"
    if zero.stage == 1 and zero.grad_accum_dtype == "fp32":
        # engine.py, _do_optimizer_sanity_check selects BF16_Optimizer, which keeps an fp32 copy.
        return (
            "zero.grad_accum_dtype",
            "fp32 needs fp32 master weights at zero.stage 1; leave it out, or use zero.stage=2",
        )
    return None
