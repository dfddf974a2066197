"""Who a rank is: what its hello says."""

import os
import platform
import socket
import sys
import time
from typing import Any

import msgspec

from ...protocol.process import this_process
from ...protocol.telemetry import DeviceInfo, Hello, MemoryMeasure, SelfDump
from .roles import parse_rank

_PACKAGES = ("ftmon", "torch", "deepspeed", "transformers", "accelerate")


class About:
    """What is known of this rank; ``facts`` holds fields of ``Hello`` that become known as the script goes on."""

    def __init__(self, rank: int, local_rank: int, world_size: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.process = this_process()
        self.host = socket.gethostname()
        self.facts: dict[str, Any] = {"framework": "pytorch"}

    @classmethod
    def of_this_process(cls) -> "About":
        """Read the launcher's environment, or ask torch.distributed where the script set it up itself."""
        place = parse_rank(os.environ)
        if place is None:
            distributed: Any = sys.modules.get("torch.distributed")
            if distributed is not None and distributed.is_available() and distributed.is_initialized():
                rank, world = distributed.get_rank(), distributed.get_world_size()
                return cls(rank, int(os.environ.get("LOCAL_RANK") or rank), world)
        return cls(*(place or (0, 0, 1)))

    @property
    def identity(self) -> str:
        """The sender's name in every header, and the identity of the command socket."""
        return f"rank-{self.rank}-{self.process.pid}-{self.process.start_ticks}"

    def hello(
        self, device: DeviceInfo, measure: MemoryMeasure, sends_logs: bool, self_dump: SelfDump | None = None
    ) -> Hello:
        """Make the hello of this moment."""
        return Hello(
            rank=self.rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            host=self.host,
            pid=self.process.pid,
            start_ticks=self.process.start_ticks,
            device=device,
            memory_measure=measure,
            time=time.time(),
            versions=_versions(),
            argv=list(sys.argv),
            backend=_backend(),
            sends_logs=sends_logs,
            self_dump=self_dump,
            **self.facts,
        )


def plain(value: Any) -> Any:
    """Reduce a framework's configuration to what msgpack carries; what it does not becomes its ``str``."""
    return msgspec.to_builtins(value, enc_hook=str, str_keys=True)


def describe_model(module: Any) -> dict[str, Any]:
    """Give a model's name and its parameter counts (ZeRO-3's partitioned parameters at their full size)."""
    parameters = list(module.parameters())
    sizes = [int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters]
    trainable = sum(size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad)
    config = getattr(module, "config", None)
    name = str(getattr(config, "_name_or_path", "") or "") or type(module).__name__
    return {"model": name, "parameters": sum(sizes), "trainable_parameters": trainable}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def _backend() -> str:
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return str(distributed.get_backend())
    except (RuntimeError, ValueError, AttributeError):
        pass
    return ""
