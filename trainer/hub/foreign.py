"""Reports the ranks of a run that was started without ftmon, from observations of their processes (``ftmon watch``).

Each rank gets a ``Hello``, and heartbeats whose progress is that of ``host.inspection.outside``: the tracker, the
judge and everything above them work as for ranks with a probe, with the limits of ranks whose steps are unknown. A
rank into which the probe was injected (Python 3.14) reports itself from its own ``Hello`` on.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterable

import pynvml

from ...protocol.host.machine import cpu_model, memory_limit
from ...protocol.host.process import ProcessId
from ...protocol.messages import wire
from ...protocol.messages.telemetry import DeviceInfo, Goodbye, Heartbeat, Hello
from ...protocol.messages.wire import Message
from ...protocol.run.rundir import Foreign, ForeignRank
from ..host import loop, processes
from ..host.foreign import Job, find_jobs, python_version, readable_environments
from ..host.hardware.gpus import Nvml
from ..host.inspection.inspect import DumpTarget
from ..host.inspection.outside import Observed, Observer
from .core import Core
from .ranks import identity_of

LOOK_SECONDS = 1.0
DEVICE_SECONDS = 10.0  # Interval at which NVML is asked for the device of ranks that use none yet


class ForeignRanks:
    """Observes the ranks and passes messages about them to ``accept``. Main loop only.

    ``ended`` is called with a rank and whether its process ended with exit code 0, if that is known.
    """

    def __init__(
        self,
        core: Core,
        foreign: Foreign,
        accept: Callable[[Message, float, str, bytes], None],
        note: Callable[[Message], None],
    ) -> None:
        self._core = core
        self._accept = accept
        self._note = note
        self.observer = Observer()
        self.launcher, self.nccl = foreign.launcher, foreign.nccl
        self._ranks = {each.rank: each for each in foreign.ranks}
        self._hellos: dict[int, Hello] = {}
        self._ended: set[int] = set()
        self._probed: set[tuple[int, int]] = set()  # Pid and start time of ranks whose probe reports
        self._under_way = False
        self._next = self._next_devices = 0.0

    def targets(self) -> list[DumpTarget]:
        """Return the processes of the ranks without a probe."""
        found = [each for each in self._ranks.values() if _key(each.process) not in self._probed]
        return [DumpTarget(each.rank, each.process.pid, each.process.start_ticks, None) for each in found]

    def heard(self, hello: Hello) -> None:
        """Record that a rank's probe reports."""
        self._probed.add((hello.pid, hello.start_ticks))

    def tick(self, now: float) -> None:
        """Start a look if one is due; ``now`` is ``time.monotonic``."""
        self._note_ends()
        if not self._under_way and now >= self._next:
            loop.start(self._look(now))

    async def _look(self, now: float) -> None:
        self._under_way, self._next = True, now + LOOK_SECONDS
        missing = [each for each in self._ranks.values() if each.rank not in self._hellos]
        asks = now >= self._next_devices and any(hello.device.kind == "cpu" for hello in self._hellos.values())
        restarted = bool(self._ended) and self.launcher is not None

        def look() -> tuple[dict[int, DeviceInfo], list[Observed], list[ForeignRank]]:
            ranks = self._restarted() if restarted else []
            devices = devices_of(list(self._ranks.values())) if missing or asks else {}
            return devices, self.observer.look(self.targets()), ranks

        try:
            devices, observed, ranks = await loop.in_thread(look, self._core.post, "outside", ({}, [], []))
        finally:
            self._under_way = False
        if asks or missing:
            self._next_devices = now + DEVICE_SECONDS
        for rank in ranks:
            self._ranks[rank.rank] = rank
            self._ended.discard(rank.rank)
            self._hellos.pop(rank.rank, None)
        for each in self._ranks.values():
            self._introduce(each, devices.get(each.rank))
        for one in observed:
            self._beat(one)

    def _introduce(self, each: ForeignRank, device: DeviceInfo | None) -> None:
        known = self._hellos.get(each.rank)
        changed = device is not None and known is not None and device != known.device
        if _key(each.process) in self._probed or each.rank in self._ended or not (known is None or changed):
            return
        if device is None and known is None:
            device = _host_device()
        launcher = self.launcher
        major, minor = python_version(each.process.pid)
        hello = Hello(
            rank=each.rank,
            local_rank=each.local_rank,
            world_size=each.world_size,
            host=socket.gethostname(),
            pid=each.process.pid,
            start_ticks=each.process.start_ticks,
            device=device or _host_device(),
            memory_measure="cuda" if device is not None and device.kind == "cuda" else "glibc",
            time=time.time(),
            versions={"python": f"{major}.{minor}"},
            argv=self._core.file.command,
            backend="nccl" if self.nccl else "",
            launch=f"{launcher.pid}-{launcher.start_ticks}" if launcher is not None else "",
        )
        self._hellos[each.rank] = hello
        self._send(hello, hello)

    def _beat(self, one: Observed) -> None:
        hello = self._hellos.get(one.rank)
        if hello is None or one.rank in self._ended:
            return
        inside = one.place.words if one.place.doing == "collective" else ""
        beat = Heartbeat(
            rank=one.rank,
            step=1,
            phase=one.phase,
            phase_started=one.since,
            progress=one.progress,
            time=time.time(),
            collective=inside,
            last_collective=inside,
            resident=one.resident,
        )
        self._send(hello, beat)

    def _send(self, hello: Hello, message: Message) -> None:
        self._accept(message, time.time(), identity_of(hello), wire.encode_body(message))

    def _note_ends(self) -> None:
        """Note how ranks ended: without a probe they send no goodbye."""
        for rank, tracked in self._core.analysis.tracker.ranks.items():
            if rank in self._hellos and rank not in self._ended and tracked.ended:
                self._ended.add(rank)
                code, number = tracked.exit_status
                if (code, number) != (None, None) and tracked.goodbye is None:
                    reason = "finished" if code == 0 else "failed"
                    self._note(Goodbye(rank, time.time(), 0, reason))

    def _restarted(self) -> list[ForeignRank]:
        """Return ranks that the launcher has started anew in place of ended ones."""
        assert self.launcher is not None
        table = processes.table()
        below = {each.pid: each for each in processes.descendants([self.launcher.pid], table)}
        jobs: list[Job] = find_jobs(table, readable_environments(below))
        found = [job.place(rank) for job in jobs for rank in job.ranks if rank in self._ended]
        return [each for each in found if each.process != self._ranks[each.rank].process]


def _key(process: ProcessId) -> tuple[int, int]:
    return process.pid, process.start_ticks


def _host_device() -> DeviceInfo:
    return DeviceInfo("cpu", 0, cpu_model(), memory_limit())


def devices_of(ranks: Iterable[ForeignRank]) -> dict[int, DeviceInfo]:
    """Return the GPU that each rank uses by NVML, by rank; of several, the one with most memory in use by it."""
    by_pid = {each.process.pid: each.rank for each in ranks}
    found: dict[int, tuple[int, DeviceInfo]] = {}
    try:
        with contextlib.closing(Nvml()) as nvml:
            samples = nvml.samples(socket.gethostname(), time.time(), by_pid)
    except pynvml.NVMLError:
        return {}
    for sample in samples:
        for process in sample.processes:
            if process.rank is not None and process.used_bytes >= found.get(process.rank, (0,))[0]:
                device = DeviceInfo("cuda", sample.index, sample.name, sample.total_bytes, sample.uuid)
                found[process.rank] = process.used_bytes, device
    return {rank: device for rank, (_, device) in found.items()}
