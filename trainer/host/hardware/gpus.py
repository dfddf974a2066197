"""This host's GPUs: samples and memory faults from NVML, memory after a kill, and the driver's errors (XIDs)."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import pynvml

from ....protocol.messages.telemetry import DeviceHealth, DeviceSample, ProcessMemory, Xid
from ....protocol.text import gib, sanitize
from .host import read_records

T = TypeVar("T")

# nvml.h, nvmlClocksEventReasons: bit and name. Idle is not throttling.
_REASONS = (
    *((0x2, "application clocks"), (0x4, "power cap"), (0x8, "hardware slowdown"), (0x10, "sync boost")),
    *((0x20, "thermal (software)"), (0x40, "thermal (hardware)"), (0x80, "power brake"), (0x100, "display clocks")),
)


class Nvml:
    """NVML, opened. Not thread-safe; use it from one thread. Raises ``pynvml.NVMLError`` without a working driver."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._handles: list[Any] = []
        self._names: list[tuple[str, str]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            # A GPU that fell off the bus has no handle; the others are still watched.
            handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            self._handles.append(handle)
            queries = (pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetUUID)
            name, uuid = ("" if handle is None else _text(_ask(query, handle)) for query in queries)
            self._names.append((name or f"GPU {index}", uuid))

    def close(self) -> None:
        """Shut NVML down."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def samples(self, host: str, now: float, rank_of: dict[int, int]) -> list[DeviceSample]:
        """Sample every GPU that answers; raise ``pynvml.NVMLError`` if none does any more.

        If NVML reports pids of another namespace (in some containers), no process has a rank.
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
            *(host, "gpu", index, name, now, used, total, uuid),
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
        *(host, index, now, uuid),
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
    mask = _ask(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))  # absent in older versions
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


_POLL_SECONDS = 0.2


class GpuUse(NamedTuple):
    """One sample of all GPUs of this host."""

    held: dict[int, int]  # Bytes held by each requested pid that NVML lists
    used: dict[int, int]  # Memory in use on each GPU, by all processes
    devices: frozenset[int] = frozenset()  # The GPUs on which they hold it


def gpu_use(pids: Collection[int]) -> GpuUse | None:
    """Sample the GPUs; None without NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    held: dict[int, int] = {}
    used: dict[int, int] = {}
    devices: set[int] = set()
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            used[index] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids:
                    devices.add(index)
                    held[process.pid] = held.get(process.pid, 0) + int(process.usedGpuMemory or 0)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return GpuUse(held, used, frozenset(devices))


def wait_until_free(pids: Collection[int], seconds: float) -> GpuUse | None:
    """Sample until none of ``pids`` holds GPU memory, for ``seconds`` at most; return the last sample."""
    deadline = time.monotonic() + seconds
    while True:
        found = gpu_use(pids)
        if found is None or not found.held or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_SECONDS)


def verdict(before: GpuUse | None, after: GpuUse | None) -> tuple[bool, str]:
    """Return whether memory is known to be still held after a kill, from samples before and after, and the text.

    In a container NVML may list the pids of another namespace, or none: if the processes were not found before the
    kill, their absence afterwards proves nothing, and the devices' totals decide.
    """
    if before is None or after is None:
        return False, "NVML cannot tell whether GPU memory is free"
    if after.held:
        listed = ", ".join(f"{gib(size)} of pid {pid}" for pid, size in after.held.items())
        return True, f"NVML still lists {listed}"
    # Other GPUs are excluded, because another user's process that starts there would make a kill appear failed.
    theirs = before.devices or before.used.keys()
    was, now = (sum(look.used.get(device, 0) for device in theirs) for look in (before, after))
    fell = f"the GPUs' memory in use went from {gib(was)} to {gib(now)}"
    if before.held:
        return False, f"their GPU memory is free: {fell}"
    return False, f"NVML does not list this host's processes (another pid namespace?), but {fell}"


_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)[^)]*\): (?P<code>\d+)")
"""As in ``NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.``"""
_MOST = 256  # Maximum number of records read per call


def read_xid(record: str, host: str, now: float) -> Xid | None:
    """Parse one record of ``/dev/kmsg`` (or a plain log line); None if it is not an XID."""
    text = record.split(";", 1)[-1].split("\n", 1)[0]
    found = _LINE.search(text)
    if found is None:
        return None
    return Xid(host, now, int(found["code"]), -1, found["bus"], sanitize(text[found.start() :], 400))


class Xids:
    """Watches for XIDs in the kernel log, if permitted, else in NVML's events; those logged before are ignored.

    Use it from one thread, and ``close`` it. ``log`` differs only in tests.
    """

    def __init__(self, host: str, log: str = "/dev/kmsg") -> None:
        self._host = host
        self._events: Any = None
        self._handles: list[Any] = []
        self._log: int | None = None
        try:
            self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            self._register()

    def poll(self) -> list[Xid]:
        """Return the errors since the last call; never waits."""
        return self._from_log() if self._log is not None else self._from_nvml()

    def close(self) -> None:
        """Close the log and NVML."""
        if self._log is not None:
            os.close(self._log)
            self._log = None
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            self._events = None

    def _from_log(self) -> list[Xid]:
        assert self._log is not None
        lines = islice(read_records(self._log), _MOST)
        return [xid for line in lines if (xid := read_xid(line, self._host, time.time())) is not None]

    def _register(self) -> None:
        try:
            pynvml.nvmlInit()
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return
        for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0):
            # A consumer card may not support the event; the others are still watched.
            with contextlib.suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                self._handles.append(handle)
        self._events = events

    def _from_nvml(self) -> list[Xid]:
        found: list[Xid] = []
        if self._events is None or not self._handles:
            return found
        for _ in range(_MOST):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                index = int(pynvml.nvmlDeviceGetIndex(event.device))
            except (pynvml.NVMLError, AttributeError):
                break
            found.append(Xid(self._host, time.time(), int(event.eventData), index))
        return found
