"""Keeps the latest state of every rank and of its device's processes, for reports of failed allocations."""

import msgspec

from ...messages.control import RankState
from ...messages.oom import OomReport, RankMoment
from ...messages.telemetry import DeviceSample, Heartbeat, Hello, Oom, ProcessMemory, Step
from ..deaths.facts import HostPressure
from ..oom.verdict import OomContext
from ..oom.words import explain
from ..remedies import remedies

_RANKS = 512
_PROCESSES = 32
_FULL = 0.95
_FRESH_S = 5.0


class LatestByRank:
    """The latest messages of each rank and each device; one assignment per message."""

    def __init__(self) -> None:
        self._hellos: dict[int, Hello] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._steps: dict[int, Step] = {}
        self._gpus: dict[str, DeviceSample] = {}
        self._hosts: dict[str, DeviceSample] = {}

    def hello(self, hello: Hello) -> None:
        """Record a rank's device, and forget the state of an earlier process of that rank."""
        known = self._hellos.get(hello.rank)
        if known is not None and (known.pid, known.start_ticks) != (hello.pid, hello.start_ticks):
            self._beats.pop(hello.rank, None)
            self._steps.pop(hello.rank, None)
        self._hellos[hello.rank] = hello

    def beat(self, beat: Heartbeat) -> None:
        """Keep a rank's current phase and step."""
        self._beats[beat.rank] = beat

    def step(self, step: Step) -> None:
        """Keep a rank's last step."""
        self._steps[step.rank] = step

    def sample(self, sample: DeviceSample) -> None:
        """Keep the latest sample of a device."""
        if sample.kind == "gpu":
            self._gpus[sample.uuid or f"{sample.host} {sample.index}"] = sample
        else:
            self._hosts[sample.host] = sample

    def report(self, t: float, oom: Oom, states: dict[int, RankState]) -> OomReport:
        """Return the report of a failed allocation, with the state of all ranks at ``t``."""
        hello = self._hellos.get(oom.rank)
        if hello is not None and not oom.capacity_bytes:  # of a probe that did not report the device
            oom = msgspec.structs.replace(oom, measure=hello.memory_measure)
        sample = self._device_of(hello, oom.measure) if hello is not None else None
        processes = _largest(sample)
        # Any process may use host memory; for a device, only the processes that compute on it are listed.
        around = OomContext(hello, processes if oom.measure == "cuda" else ())
        verdict = explain(oom, around)
        ranks = sorted(self._hellos.keys() | self._beats.keys() | states.keys())[:_RANKS]
        return OomReport(
            rank=oom.rank,
            step=oom.step,
            phase=oom.phase,
            time=oom.time,
            oom=oom,
            verdict=verdict,
            remedies=remedies(oom, verdict, around),
            ranks=[self._moment(t, rank, states.get(rank), oom) for rank in ranks],
            processes=processes,
            device_used_bytes=sample.used_bytes if sample is not None else 0,
        )

    def pressure(self, t: float, rank: int) -> HostPressure | None:
        """Return the use of a rank's host memory just before ``t``; None if it was not full, or unknown."""
        hello = self._hellos.get(rank)
        sample = self._hosts.get(hello.host) if hello is not None else None
        if sample is None or t - sample.time > _FRESH_S or sample.used_bytes < _FULL * sample.total_bytes:
            return None
        held = next((process.used_bytes for process in sample.processes if process.rank == rank), 0)
        return HostPressure(max(0.0, t - sample.time), sample.used_bytes, sample.total_bytes, held)

    def _moment(self, t: float, rank: int, state: RankState | None, oom: Oom) -> RankMoment:
        hello, beat, step = self._hellos.get(rank), self._beats.get(rank), self._steps.get(rank)
        sample = self._device_of(hello, hello.memory_measure) if hello is not None else None
        peak = step.peak_phase if step is not None else None
        if rank == oom.rank:  # its own report is newer than its last heartbeat
            beat = Heartbeat(
                rank, oom.step, oom.phase, 0.0, 0, oom.time, oom.micro_step,
                allocated=oom.allocated_bytes, reserved=oom.reserved_bytes,
            )  # fmt: skip
        return RankMoment(
            rank,
            state.state if state is not None else "starting",
            beat.step if beat is not None else step.step + 1 if step is not None else 0,
            beat.phase if beat is not None else "",
            beat.micro_step if beat is not None else 0,
            beat.allocated if beat is not None else 0,
            beat.reserved if beat is not None else 0,
            peak.peak_span.peak if peak is not None else 0,
            list(step.batch_shape) if step is not None else [],
            beat.collective if beat is not None else "",
            round(max(0.0, t - beat.time), 3) if beat is not None else 0.0,
            f"{hello.host} {hello.device.kind} {hello.device.index}" if hello is not None else "",
            sample.used_bytes if sample is not None else 0,
            sample.total_bytes if sample is not None else 0,
        )

    def _device_of(self, hello: Hello, measure: str) -> DeviceSample | None:
        if measure != "cuda":
            return self._hosts.get(hello.host)
        # CUDA numbers the visible devices, NVML all devices: only the UUID is the same for both.
        return self._gpus.get(hello.device.uuid) or self._gpus.get(f"{hello.host} {hello.device.index}")


def _largest(sample: DeviceSample | None) -> list[ProcessMemory]:
    if sample is None:
        return []
    return sorted(sample.processes, key=lambda process: -process.used_bytes)[:_PROCESSES]
