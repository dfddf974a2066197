"""Refuses training without DeepSpeed in a script that is run up to ``deepspeed.initialize``."""

import contextlib
import importlib
import sys
from collections.abc import Generator
from typing import Any

_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "--deepspeed with ZeRO stage 0"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "--deepspeed with ZeRO stage 3"),
    ("torch.distributed.fsdp", "fully_shard", "--deepspeed with ZeRO stage 3"),
)
"""Modules, their wrappers of models, and the nearest supported setting."""


@contextlib.contextmanager
def refused(error: type[BaseException]) -> Generator[None]:
    """Raise ``error`` in the body if a model is wrapped by DDP or FSDP, or gradients are computed.

    ``torch.distributed.init_process_group`` does nothing there, as the dry run has joined its process group already.
    """
    import torch
    import torch.distributed as dist

    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        kept.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def stop(text: str) -> Any:
        def stopped(*_: Any, **__: Any) -> Any:
            raise error(text)

        return stopped

    for module, name, nearest in _WRAPPERS:
        wrapper = getattr(importlib.import_module(module), name, None)
        text = f"{name} is not predicted, only deepspeed.initialize is: {nearest} is nearest to it"
        if isinstance(wrapper, type):
            replace(wrapper, "__init__", stop(text))
        elif wrapper is not None:
            replace(sys.modules[module], name, stop(text))
    replace(
        torch.autograd,
        "backward",
        stop("it trains without deepspeed.initialize; only training with it can be predicted"),
    )
    replace(dist, "init_process_group", lambda *_, **__: None)
    try:
        yield
    finally:
        for owner, name, value in reversed(kept):
            setattr(owner, name, value)
