"""Faults of GPUs, from NVML and the driver's log: throttling, memory errors, XIDs.

- throttling: a thermal, power-brake or hardware slowdown reason in at least half of the samples of ``WINDOW_S``
  seconds while the GPU computes. A power cap alone does not count: it is normal under full load. Resolved if none
  occurred for ``WINDOW_S``.
- memory errors: uncorrectable ECC errors since the driver was loaded; row remappings that are pending or failed.
- XIDs: as reported by the driver, except those that result from a process's death (``IGNORED``).
"""

from collections import deque
from typing import Any, Literal

import msgspec

from ...messages.health import DeviceHealth, Xid
from ...messages.telemetry import DeviceSample
from ..findings import Finding
from .xids import IGNORED, meaning

WINDOW_S = 20.0
FEWEST = 10
BUSY_PERCENT = 50.0
HINDERING = ("hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake")
"""NVML's reasons for unintended slowdown; a power cap is normal under full load."""

State = Literal["raised", "updated", "resolved"]


class DeviceFacts(msgspec.Struct, frozen=True):
    """The GPU, and its figures."""

    host: str
    index: int
    name: str = ""
    reasons: tuple[str, ...] = ()
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    others_sm_clock_mhz: int | None = None
    """Median of the host's other busy GPUs."""
    uncorrected: int | None = None
    new_errors: int = 0
    remap_pending: bool = False
    remap_failed: bool = False


class XidFacts(msgspec.Struct, frozen=True):
    """A driver error."""

    host: str
    code: int
    index: int
    """NVML's index of the GPU; -1: unknown."""
    bus: str
    count: int
    text: str
    """The driver's line."""
    meaning: str


class _Gpu:
    def __init__(self) -> None:
        self.samples: deque[tuple[float, bool, bool, tuple[str, ...]]] = deque()
        """Time, whether it computed, whether it was throttled, and the reasons."""
        self.last: DeviceSample | None = None
        self.first_errors: int | None = None
        self.standing: dict[str, DeviceFacts] = {}

    @property
    def busy(self) -> bool:
        return self.last is not None and (self.last.utilization_percent or 0.0) >= BUSY_PERCENT


class Gpus:
    """Judges every GPU of every host of a run."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[str, int], _Gpu] = {}
        self._xids: dict[tuple[str, str, int], int] = {}

    def sample(self, sample: DeviceSample) -> list[Finding]:
        """Check one sample for throttling."""
        if sample.kind != "gpu":
            return []
        gpu = self._gpus.setdefault((sample.host, sample.index), _Gpu())
        gpu.last = sample
        reasons = tuple(reason for reason in sample.throttle_reasons if reason in HINDERING)
        gpu.samples.append((sample.time, gpu.busy, bool(reasons), reasons))
        while gpu.samples and gpu.samples[0][0] < sample.time - WINDOW_S:
            gpu.samples.popleft()
        count = len(gpu.samples)
        hindered = [one for one in gpu.samples if one[2]]
        busy = sum(one[1] for one in gpu.samples)
        bad = count >= FEWEST and 2 * len(hindered) >= count and 2 * busy >= count
        over = count >= FEWEST and not hindered
        facts = self._facts(sample, reasons=hindered[-1][3] if hindered else ())
        return self._settle("gpu_throttling", gpu, facts, bad, over, "warning")

    def health(self, message: DeviceHealth) -> list[Finding]:
        """Check NVML's figures of a GPU's memory."""
        gpu = self._gpus.setdefault((message.host, message.index), _Gpu())
        return self._memory(message, gpu)

    def xid(self, message: Xid) -> list[Finding]:
        """Process an error reported by the driver."""
        if message.code in IGNORED:
            return []
        gpu = message.bus or str(message.index)
        key = message.host, gpu, message.code
        self._xids[key] = count = self._xids.get(key, 0) + 1
        what, severity = meaning(message.code)
        facts = XidFacts(message.host, message.code, message.index, message.bus, count, message.text, what)
        state: State = "raised" if count == 1 else "updated"
        name = f"{message.host}:{gpu}:{message.code}"
        return [Finding("gpu_xid", facts, state, severity, key=name)]

    def _memory(self, message: DeviceHealth, gpu: _Gpu) -> list[Finding]:
        errors = message.ecc_uncorrected
        if gpu.first_errors is None:
            gpu.first_errors = errors
        new = max(0, (errors or 0) - (gpu.first_errors or 0))
        bad = bool(errors) or message.remap_pending or message.remap_failed
        facts = self._facts(
            gpu.last,
            message,
            uncorrected=errors,
            new_errors=new,
            remap_pending=message.remap_pending,
            remap_failed=message.remap_failed,
        )
        severity: Literal["warning", "error"] = "error" if new or message.remap_failed else "warning"
        return self._settle("gpu_memory_errors", gpu, facts, bad, not bad, severity)

    def _facts(self, sample: DeviceSample | None, health: DeviceHealth | None = None, **fields: Any) -> DeviceFacts:
        host, index = (health.host, health.index) if health is not None else ("", 0)
        if sample is None:
            return DeviceFacts(host, index, **fields)
        clocks = sorted(
            one.last.sm_clock_mhz
            for (host, index), one in self._gpus.items()
            if host == sample.host
            and index != sample.index
            and one.busy
            and one.last is not None
            and one.last.sm_clock_mhz
        )
        return DeviceFacts(
            sample.host,
            sample.index,
            sample.name,
            temperature_c=sample.temperature_c,
            power_w=sample.power_w,
            power_limit_w=sample.power_limit_w,
            sm_clock_mhz=sample.sm_clock_mhz,
            others_sm_clock_mhz=clocks[len(clocks) // 2] if clocks else None,
            **fields,
        )

    @staticmethod
    def _settle(kind: Any, gpu: _Gpu, facts: DeviceFacts, bad: bool, over: bool, severity: Any) -> list[Finding]:
        """Return the finding that a condition is new, has changed, or is over; an empty list otherwise."""
        known = gpu.standing.get(kind)
        key = f"{facts.host}:{facts.index}"
        if bad and (known is None or _figures(kind, known) != _figures(kind, facts)):
            gpu.standing[kind] = facts
            return [Finding(kind, facts, "updated" if known is not None else "raised", severity, key=key)]
        if over and known is not None:
            del gpu.standing[kind]
            return [Finding(kind, known, "resolved", severity, key=key)]
        return []


def _figures(kind: str, facts: DeviceFacts) -> object:
    """Return the figures whose change updates an active finding."""
    if kind == "gpu_throttling":
        return facts.reasons
    return facts.uncorrected, facts.remap_pending, facts.remap_failed
