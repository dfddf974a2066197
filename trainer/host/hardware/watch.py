"""Runs in threads what may block: statvfs of a dead network disk must not delay the hub or GPU samples.

NVML calls take milliseconds, and tens of milliseconds while the driver is busy, too long for the hub's main loop.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import pynvml

from ....protocol.messages.telemetry import DeviceHealth, DeviceSample, DiskSpace, Xid
from .gpus import Nvml, Xids
from .host import Disks, HostLoad

INTERVAL_S = 2.0
_KEPT = 4096  # Maximum number of messages kept between polls; the oldest are dropped first
M = TypeVar("M")


class _Watch(threading.Thread, Generic[M]):
    """A thread that collects messages; ``start`` it, ``poll`` it, ``close`` it."""

    def __init__(self, name: str, host: str, close_seconds: float) -> None:
        super().__init__(name=name, daemon=True)
        self._host = host
        self._close_seconds = close_seconds
        self._found: deque[M] = deque(maxlen=_KEPT)
        self._ending = threading.Event()

    def poll(self) -> list[M]:
        """Return the messages since the last call, oldest first; never waits."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        """End the thread; waits 2 s at most (a call may hang, and the thread is a daemon)."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout=self._close_seconds)


class HostWatch(_Watch[DiskSpace | Xid]):
    """Watches this host's disks and the GPU driver's errors. ``rank_pids`` is called from this thread."""

    def __init__(self, host: str, run: Path, rank_pids: Callable[[], dict[int, int]]) -> None:
        super().__init__("host-watch", host, 0.5)
        self.disks = Disks(host, run, rank_pids)

    def run(self) -> None:
        """Watch until closed."""
        xids = Xids(self._host)
        failures = 0
        while not self._ending.is_set():
            try:
                self._found.extend(xids.poll())
                space = self.disks.measure()
                if space is not None:
                    self._found.append(space)
            except Exception:
                failures += 1
                if failures < 5:
                    traceback.print_exc(file=sys.stderr)
            self._ending.wait(INTERVAL_S)
        xids.close()


RETRY_SECONDS = 30.0  # Seconds between attempts to open NVML after it failed, since the driver may recover
HEALTH_SECONDS = 10.0  # Seconds between queries of memory faults, which change slowly
HEALTH_SENT_SECONDS = 60.0  # Seconds after which unchanged faults are sent again


class DeviceSampler(_Watch[DeviceSample | DeviceHealth]):
    """Samples this host's GPUs through NVML, if any, and the host itself.

    ``rank_pids`` is called from this thread before each sample.
    """

    def __init__(self, host: str, rank_pids: Callable[[], dict[int, int]], interval_s: float = 1.0) -> None:
        super().__init__("devices", host, 2.0)
        self._rank_pids = rank_pids
        self._interval_s = interval_s
        self._health_due = 0.0
        self._health: dict[int, DeviceHealth] = {}
        self._nvml: Nvml | None = None
        self._retry_at = 0.0

    def run(self) -> None:
        """Sample until closed."""
        load = HostLoad()
        due = time.monotonic()
        while not self._ending.is_set():
            self._found.extend(self._sample(load))
            self._found.extend(self._sample_health())
            # Fixed schedule: a sample longer than the interval skips turns instead of delaying later ones.
            due = max(due + self._interval_s, time.monotonic())
            self._ending.wait(due - time.monotonic())
        if self._nvml is not None:
            self._nvml.close()

    def _sample(self, load: HostLoad) -> list[DeviceSample]:
        try:
            pids = self._rank_pids()
        except RuntimeError:
            # The main loop changed its table while it was read; the next sample reads it again.
            pids = {}
        rank_of = {pid: rank for rank, pid in pids.items()}
        now = time.time()
        samples = self._sample_gpus(now, rank_of)
        # A file in /proc can vanish between two reads; the next sample includes the host again.
        with contextlib.suppress(OSError):
            samples.append(load.sample(self._host, now, rank_of))
        return samples

    def _sample_health(self) -> list[DeviceHealth]:
        """Query memory faults if due; return those that changed or must be repeated."""
        if self._nvml is None or time.monotonic() < self._health_due:
            return []
        self._health_due = time.monotonic() + HEALTH_SECONDS
        found: list[DeviceHealth] = []
        for one in self._nvml.health(self._host, time.time()):
            before = self._health.get(one.index)
            same = before is not None and msgspec.structs.replace(one, time=before.time) == before
            if before is None or not same or one.time - before.time >= HEALTH_SENT_SECONDS:
                self._health[one.index] = one
                found.append(one)
        return found

    def _sample_gpus(self, now: float, rank_of: dict[int, int]) -> list[DeviceSample]:
        if self._nvml is None and time.monotonic() < self._retry_at:
            return []
        try:
            self._nvml = self._nvml or Nvml()
            return self._nvml.samples(self._host, now, rank_of)
        except pynvml.NVMLError:
            if self._nvml is not None:
                self._nvml.close()
                self._nvml = None
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return []
