"""Host memory of offloading, and disk space of checkpoints."""

import msgspec

MASTER_BYTES, STATE_BYTES, GRADIENT_BYTES, WEIGHT_BYTES = 4, 8, 4, 2
"""Bytes per parameter: fp32 master copy, Adam's two fp32 states, fp32 gradient on the host, bf16 weight."""


def pinned_bytes(size_bytes: int, round_below_bytes: int | None = None) -> int:
    """Return the memory of a pinned tensor: PyTorch's pinned allocator rounds up to a power of two.

    Args:
        round_below_bytes: ``pinned_max_round_threshold_mb``: larger requests are not rounded. None: all are rounded.
    """
    if size_bytes <= 0:
        return 0
    if round_below_bytes is not None and size_bytes > round_below_bytes:
        return -(-size_bytes // 4096) * 4096
    return 1 << (size_bytes - 1).bit_length()


class HostMemory(msgspec.Struct, frozen=True):
    """Host memory of all ranks of one host, bytes."""

    optimizer_bytes: int
    """Master copies, states and gradients of an offloaded optimizer."""
    parameter_bytes: int
    """Offloaded parameters."""
    pinned_loss_bytes: int
    """Memory added by the rounding of pinned buffers."""
    process_bytes: int
    """The processes themselves."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return self.optimizer_bytes + self.parameter_bytes + self.pinned_loss_bytes + self.process_bytes


def host_memory(
    trainable: int,
    ranks: int,
    ranks_on_host: int,
    stage: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    parameters: int = 0,
    pinned: bool = False,
    process_bytes: int = 2 * 2**30,
) -> HostMemory:
    """Return the host memory of a training with Adam under ZeRO.

    Args:
        offload_parameters: whether the bf16 weights are on the CPU too (ZeRO-3).
        parameters: number of all parameters, if they are offloaded; 0: ``trainable``.
        pinned: DeepSpeed's ``pin_memory``: a rank's share of each buffer is rounded up to a power of two.
        process_bytes: resident memory of one rank's process with torch and DeepSpeed; an assumption, not a measurement.
    """
    split = ranks if stage >= 1 else 1
    share = -(-trainable // split)
    buffers: list[int] = []
    optimizer = 0
    if offload_optimizer:
        buffers += [share * GRADIENT_BYTES]
        optimizer = share * (MASTER_BYTES + STATE_BYTES + GRADIENT_BYTES)
    weights = 0
    if offload_parameters and stage == 3:
        weights = -(-(parameters or trainable) // ranks) * WEIGHT_BYTES
        buffers.append(weights)
    loss = sum(pinned_bytes(size) - size for size in buffers) if pinned else 0
    return HostMemory(
        *(part * ranks_on_host for part in (optimizer, weights, loss, process_bytes)),
    )


def checkpoint_bytes(
    parameters: int,
    trainable: int,
    kept: int = 1,
    weight_bytes: int = WEIGHT_BYTES,
    state_bytes: float = MASTER_BYTES + STATE_BYTES,
    exported: bool = False,
) -> int:
    """Return the disk space of checkpoints, over all ranks.

    Args:
        kept: number of checkpoints kept; while one is written there is one more.
        state_bytes: optimizer states per trained parameter, including the master copy; 0: the checkpoint has none.
        exported: whether a model folder in the training precision is written too.
    """
    weights = parameters * weight_bytes
    return (weights + round(trainable * state_bytes)) * (kept + 1) + (weights if exported else 0)
