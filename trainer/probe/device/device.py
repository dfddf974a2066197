"""The device that this rank computes on, with its memory back end and device clock."""

import os
from collections.abc import Callable
from typing import Any

from ....protocol.host.host_memory import cpu_model, memory_limit
from ....protocol.messages.telemetry import DeviceInfo
from .cpu import CpuMemory
from .reading import MemoryBackend


def _no_event() -> Any:
    return None


class Device:
    """The rank's device: the CPU until the script has CUDA running.

    CUDA is never initialised from here: a script that forks, or means to train on the CPU, must stay able to.
    """

    def __init__(self) -> None:
        self.memory: MemoryBackend = CpuMemory()
        self.mark_event: Callable[[], Any] = _no_event
        self.events: Any = None
        self.blank: Any = {}
        """The raw CUDA sample of a process that has allocated nothing yet."""
        self.settled = False
        """Whether the device is final, so that hooks stop checking."""
        self.info = self._cpu_info()

    def settle(self, on_script_reset: Callable[[Any], None]) -> bool:
        """Check whether the script has CUDA running; return whether the back end changed."""
        import torch

        if torch.version.cuda is None:
            self.settled = True
            return False
        if not torch.cuda.is_initialized():
            return False
        from .cuda import CudaMemory
        from .events import CudaEvents

        core: Any = torch._C
        index = torch.cuda.current_device()
        self.settled = True
        self.events = CudaEvents(index)
        self.memory = CudaMemory(core, index, torch.cuda.device_count(), on_script_reset)
        self.mark_event = self.events.mark
        self.info = self._cuda_info(torch, index)
        return True

    @staticmethod
    def _cuda_info(torch: Any, index: int) -> DeviceInfo:
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        if uuid and not uuid.startswith("GPU-"):
            uuid = f"GPU-{uuid}"  # as NVML writes it
        return DeviceInfo("cuda", index, properties.name, int(properties.total_memory), uuid)

    @staticmethod
    def _cpu_info() -> DeviceInfo:
        local_rank = int(os.environ.get("LOCAL_RANK", "0") or 0)
        return DeviceInfo("cpu", local_rank, cpu_model(), memory_limit())
