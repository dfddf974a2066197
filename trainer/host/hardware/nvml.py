"""Reads this host's GPUs through NVML; a figure that a device or driver does not provide is None, never a guess."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from ....protocol.messages.health import DeviceHealth
from ....protocol.messages.telemetry import DeviceSample, ProcessMemory
from ....protocol.text import sanitize

T = TypeVar("T")

# nvml.h, nvmlClocksEventReasons: bit and name. Idle is not throttling.
_REASONS = (
    (0x2, "application clocks"),
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal (software)"),
    (0x40, "thermal (hardware)"),
    (0x80, "power brake"),
    (0x100, "display clocks"),
)


class Nvml:
    """NVML, opened. Not thread-safe; use it from one thread.

    Raises:
        pynvml.NVMLError: no driver is installed, or it does not answer.
    """

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._handles: list[Any] = []
        self._names: list[tuple[str, str]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            # A GPU that fell off the bus has no handle; the others are still watched.
            handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            self._handles.append(handle)
            name = _text(_ask(pynvml.nvmlDeviceGetName, handle)) if handle is not None else ""
            uuid = _text(_ask(pynvml.nvmlDeviceGetUUID, handle)) if handle is not None else ""
            self._names.append((name or f"GPU {index}", uuid))

    def close(self) -> None:
        """Shut NVML down."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def samples(self, host: str, now: float, rank_of: dict[int, int]) -> list[DeviceSample]:
        """Sample every GPU that answers.

        Args:
            host: Name of this host, for the samples.
            now: Seconds since the epoch, for the samples.
            rank_of: The run's ranks by pid in this namespace. If NVML reports pids of another namespace (in some
                containers), none match, and its processes have rank None.

        Raises:
            pynvml.NVMLError: no device answers any more.
        """
        samples: list[DeviceSample] = []
        failed: pynvml.NVMLError | None = None
        for index, handle in enumerate(self._handles):
            if handle is None:
                continue
            try:
                samples.append(self._sample(index, handle, host, now, rank_of))
            except pynvml.NVMLError as error:
                failed = error
        if failed is not None and not samples:
            raise failed
        return samples

    def health(self, host: str, now: float) -> list[DeviceHealth]:
        """Return memory faults of every GPU with a handle; values that NVML does not provide are None."""
        return [
            _health(index, handle, self._names[index][1], host, now)
            for index, handle in enumerate(self._handles)
            if handle is not None
        ]

    def _sample(self, index: int, handle: Any, host: str, now: float, rank_of: dict[int, int]) -> DeviceSample:
        used, total = _memory(handle)
        name, uuid = self._names[index]
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
        limit = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        temperature = _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        return DeviceSample(
            host=host,
            kind="gpu",
            index=index,
            name=name,
            time=now,
            used_bytes=used,
            total_bytes=total,
            uuid=uuid,
            utilization_percent=float(rates.gpu) if rates is not None else None,
            power_w=power / 1000 if power is not None else None,
            power_limit_w=limit / 1000 if limit is not None else None,
            temperature_c=float(temperature) if temperature is not None else None,
            sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            throttle_reasons=_reasons(handle),
            processes=_processes(handle, rank_of),
        )


def _health(index: int, handle: Any, uuid: str, host: str, now: float) -> DeviceHealth:
    rows: Any = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
    return DeviceHealth(
        host=host,
        index=index,
        time=now,
        uuid=uuid,
        ecc_corrected=_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ecc_uncorrected=_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        remap_pending=bool(rows[2]) if rows is not None else False,
        remap_failed=bool(rows[3]) if rows is not None else False,
    )


def _errors(handle: Any, kind: int) -> int | None:
    return _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_VOLATILE_ECC)


def reasons_in_words(mask: int) -> list[str]:
    """Return the names of NVML's clock event (throttle) reasons; empty for an idle GPU."""
    return [word for bit, word in _REASONS if mask & bit]


def _ask(function: Callable[..., T], *args: Any) -> T | None:
    """Call NVML; return None if this device, driver or library does not support the query."""
    try:
        return function(*args)
    except (pynvml.NVMLError, AttributeError, ValueError):
        return None


def _text(value: str | bytes | None) -> str:
    return sanitize(value.decode(errors="replace") if isinstance(value, bytes) else value or "", 120)


def _memory(handle: Any) -> tuple[int, int]:
    """Return (used, total) bytes as nvidia-smi shows them.

    Version 1 of the call counts memory reserved by the driver as used; version 2, like nvidia-smi's ``Used``, does not.
    """
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used), int(memory.total)


def _reasons(handle: Any) -> list[str]:
    ask = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    mask = _ask(ask, handle) if ask is not None else None
    if mask is None:
        mask = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return reasons_in_words(int(mask)) if mask else []


def _processes(handle: Any, rank_of: dict[int, int]) -> list[ProcessMemory]:
    found = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    processes: list[ProcessMemory] = []
    for process in found:
        pid = int(process.pid)
        name = _text(_ask(pynvml.nvmlSystemGetProcessName, pid)).split(" ")[0].rsplit("/", 1)[-1]
        processes.append(ProcessMemory(pid, int(process.usedGpuMemory or 0), rank_of.get(pid), name))
    return processes
