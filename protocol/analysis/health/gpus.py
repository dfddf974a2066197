"""Faults of GPUs, from NVML and the driver's log: throttling, memory errors, XIDs.

- throttling: a thermal, power-brake or hardware slowdown reason in at least half of the samples of ``WINDOW_S``
  seconds while the GPU computes. A power cap alone does not count: it is normal under full load. Resolved if none
  occurred for ``WINDOW_S``.
- memory errors: uncorrectable ECC errors since the driver was loaded; row remappings that are pending or failed.
- XIDs: as reported by the driver, except those that result from a process's death (``IGNORED``).
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...messages.control import Severity
from ...messages.health import DeviceHealth, Xid
from ...messages.telemetry import DeviceSample
from ...text import counted, sanitize
from ..findings import Finding
from ..findings.detector import Detector, Handler
from ..findings.kind import Kind, Shown
from ..text.words import Words
from .xids import IGNORED, meaning, of_the_program

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


def _gpu(facts: DeviceFacts) -> str:
    return f"GPU {facts.index} of {facts.host}"


def _throttling(finding: Finding) -> Words:
    facts: DeviceFacts = finding.facts
    others = f" (the host's other GPUs: {facts.others_sm_clock_mhz})" if facts.others_sm_clock_mhz else ""
    figures = [
        *([f"{facts.temperature_c:.0f} °C"] if facts.temperature_c is not None else []),
        *([f"{facts.power_w:.0f} W"] if facts.power_w is not None else []),
        *([f"SM clock {facts.sm_clock_mhz} MHz{others}"] if facts.sm_clock_mhz else []),
    ]
    seen = f": {', '.join(figures)}" if figures else ""
    return Words(
        f"{_gpu(facts)} is throttled: {', '.join(facts.reasons)}",
        f"For most of the last 20 s its clock was reduced while computing{seen}.",
        "Heat: check fans, air flow and neighbouring cards. Power brake or hardware slowdown: check the power supply "
        "and its cables. The whole run is as slow as its slowest GPU.",
        "It is no longer throttled.",
    )


def _memory_errors(finding: Finding) -> Words:
    facts: DeviceFacts = finding.facts
    parts: list[str] = []
    if facts.uncorrected:
        new = f", {facts.new_errors} of them during this run" if facts.new_errors else ", none of them during this run"
        errors = counted(facts.uncorrected, "uncorrectable ECC error")
        parts.append(f"{errors} since its driver was loaded{new}")
    if facts.remap_failed:
        parts.append("a memory row could not be remapped")
    if facts.remap_pending:
        parts.append("a memory row waits to be remapped at the next reset")
    wrong = " Results computed with it cannot be trusted." if facts.new_errors or facts.remap_failed else ""
    return Words(
        f"{_gpu(facts)} has memory errors: {parts[0] if parts else 'none'}",
        f"{'; '.join(parts)}.{wrong}",
        "Drain the host and reset the GPU (nvidia-smi -r); if errors recur, or remapping failed, have it replaced.",
        "NVML reports no errors any more.",
    )


def _xid(finding: Finding) -> Words:
    facts: XidFacts = finding.facts
    where = f"GPU {facts.index} of {facts.host}" if facts.index >= 0 else f"{facts.bus or 'a GPU'} of {facts.host}"
    again = f", {facts.count} times" if facts.count > 1 else ""
    line = f' The driver\'s line: "{sanitize(facts.text, 300)}".' if facts.text else ""
    remedy = (
        "Run with CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer, to find the kernel."
        if of_the_program(facts.code)
        else "Drain the host, reset the GPU (nvidia-smi -r) or reboot, and have it tested (dcgmi diag -r 3)."
    )
    return Words(f"XID {facts.code} on {where}{again}: {facts.meaning}", f"{facts.meaning}.{line}", remedy)


_SHOWN: dict[str, Shown] = {
    "index": Shown("GPU"),
    "bus": Shown("PCI bus"),
    "code": Shown("XID"),
    "reasons": Shown("slowed by"),
    "temperature_c": Shown("temperature", "°C"),
    "power_w": Shown("power", "W"),
    "power_limit_w": Shown("power limit", "W"),
    "sm_clock_mhz": Shown("clock", "MHz"),
    "others_sm_clock_mhz": Shown("the others' clock", "MHz"),
    "uncorrected": Shown("uncorrected errors"),
    "remap_pending": Shown("a row remap is pending"),
    "remap_failed": Shown("a row remap failed"),
}


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


class Gpus(Detector):
    """Judges every GPU of every host of a run."""

    kinds = (
        Kind(
            "gpu_throttling",
            DeviceFacts,
            _throttling,
            shown=_SHOWN,
            limits={"throttled while computing": f"half of {WINDOW_S:g} s"},
        ),
        Kind("gpu_memory_errors", DeviceFacts, _memory_errors),
        Kind("gpu_xid", XidFacts, _xid, lasting=True),
    )

    def __init__(self) -> None:
        self._gpus: dict[tuple[str, int], _Gpu] = {}
        self._xids: dict[tuple[str, str, int], int] = {}

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method for each type of message."""
        return {DeviceSample: self.sample, DeviceHealth: self.health, Xid: self.xid}

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
        is_over = count >= FEWEST and not hindered
        facts = self._facts(sample, reasons=hindered[-1][3] if hindered else ())
        return self._change("gpu_throttling", gpu, facts, bad, is_over, "warning")

    def health(self, message: DeviceHealth) -> list[Finding]:
        """Check NVML's figures of a GPU's memory."""
        gpu = self._gpus.setdefault((message.host, message.index), _Gpu())
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
        return self._change("gpu_memory_errors", gpu, facts, bad, not bad, severity)

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
    def _change(
        kind: str, gpu: _Gpu, facts: DeviceFacts, bad: bool, is_over: bool, severity: Severity
    ) -> list[Finding]:
        """Return the finding that a condition is new, has changed, or is over; an empty list otherwise."""
        known = gpu.standing.get(kind)
        key = f"{facts.host}:{facts.index}"
        if bad and (known is None or _figures(kind, known) != _figures(kind, facts)):
            gpu.standing[kind] = facts
            return [Finding(kind, facts, "updated" if known is not None else "raised", severity, key=key)]
        if is_over and known is not None:
            del gpu.standing[kind]
            return [Finding(kind, known, "resolved", severity, key=key)]
        return []


def _figures(kind: str, facts: DeviceFacts) -> object:
    """Return the figures whose change updates an active finding."""
    if kind == "gpu_throttling":
        return facts.reasons
    return facts.uncorrected, facts.remap_pending, facts.remap_failed
