"""Effect of a hold on the other ranks: the time limit of their collectives."""

import sys
from typing import Any

from ....protocol.text import duration
from ..device.backend import backend_of


def peers(world_size: int) -> tuple[float, str]:
    """Return the timeout of the default process group in seconds (0: not known), and its effect in words."""
    if world_size < 2:
        return 0.0, "there are no other ranks"
    seconds, backend = _timeout()
    waits = "the other ranks wait in their next collective"
    if not seconds:
        return 0.0, f"{waits}, and give up after their process group's timeout"
    if backend == "nccl":
        how = "NCCL's watchdog then ends their processes, and the launcher this one too"
    else:
        how = f"their collective ({backend}) then fails with an error, and the launcher ends this one too"
    return seconds, f"{waits} for at most {duration(seconds)} (the process group's timeout); {how}"


def _timeout() -> tuple[float, str]:
    dist: Any = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_initialized():
            return 0.0, ""
        import torch

        group = dist.distributed_c10d._get_default_group()
        backend = backend_of("cuda" if torch.cuda.is_initialized() else "cpu")
        device = torch.device("cuda" if "nccl" in backend else "cpu")
        options = group._get_backend(device).options
        return options._timeout.total_seconds(), backend
    except Exception:  # private names of PyTorch: without them the figure is not known
        return 0.0, ""
