"""GPU memory of a training process outside PyTorch's reserved memory (NVML): the CUDA context and NCCL's buffers."""

from .figure import Figure

MIB = 2**20
_CONTEXT_BYTES = 1256 * MIB
"""One rank: context, loaded modules, cuBLAS, a communicator without peers. An out-of-memory event on an H200 with
18,904 MiB reserved left 128,973,930,496 bytes free of 139.80 GiB (torch 2.11, CUDA 13, DeepSpeed 0.19)."""
_PEER_BYTES = 586 * MIB
"""Per neighbour in NCCL's ring. Each of four ranks on NVSwitch has two: 2,428 MiB in 8 of 8 measured ranks."""
_OFFLOAD_BYTES = 42 * MIB
"""Additional bytes with the optimizer on the CPU: 2,470 MiB in total in 4 of 4 measured ranks."""


def beside_pytorch(ranks_on_host: int, hosts: int = 1, offload: bool = False, device: str = "NVIDIA H200") -> Figure:
    """Return the bytes that one training process uses on its GPU outside PyTorch's reserved memory.

    Args:
        offload: whether the optimizer is on the CPU.
    """
    ranks = ranks_on_host * hosts
    neighbours = min(max(0, ranks - 1), 2)
    value = _CONTEXT_BYTES + neighbours * _PEER_BYTES + (_OFFLOAD_BYTES if offload else 0)
    like_measured = "H200" in device or "H100" in device or "H800" in device
    if like_measured and hosts == 1 and ranks_on_host in (1, 4):
        return Figure(value, 0.03, "measured on H200s, torch 2.11, CUDA 13")
    if like_measured and hosts == 1 and ranks_on_host < 4:
        return Figure(value, 0.1, "between one and four ranks measured on H200s, by neighbours in NCCL's ring")
    if like_measured and hosts == 1:
        return Figure(value, 0.3, "four ranks measured on H200s; more may use NVLink SHARP or trees")
    where = "several hosts" if hosts > 1 else "this GPU"
    return Figure(value, 0.4, f"measured on H200s of one host, not on {where}")
