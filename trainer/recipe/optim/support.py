"""The optimizer states of each kind of optimizer. Nothing here imports torch."""

from ..config.schema import Config

SMALL_STATES = ("adamw_bf16", "adamw_8bit")
"""Kinds with running averages of 2 bytes or 1."""


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
