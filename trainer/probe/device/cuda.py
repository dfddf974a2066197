"""Memory of a rank on a GPU: the figures of PyTorch's CUDA caching allocator.

A phase's peak needs the allocator's peaks reset at the phase's start. The script under observation may read and reset
the same counters, so the two entry points behind ``torch.cuda.memory_stats`` and ``reset_peak_memory_stats`` are
wrapped: it goes on seeing the peaks since *its own* last reset.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from .reading import Reading

_READ = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESET = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_FOLD_AT_LATEST = 4096

_UNKNOWN = {"all": {"current": -1, "peak": -1}}

Stats = dict[str, Any]


class ScriptPeaks:
    """The peaks the script would see without ftmon: the highest of all samples since its own last reset."""

    def __init__(self) -> None:
        self._samples: deque[Stats] = deque()
        self._places: list[tuple[str, str]] = []
        self._highest: list[int] = []
        self._lock = threading.Lock()

    def note(self, stats: Stats) -> None:
        """Keep a sample taken just before the probe resets the peaks."""
        self._samples.append(stats)
        if len(self._samples) >= _FOLD_AT_LATEST:
            self.fold()

    def restart(self) -> None:
        """The script has reset its peaks: what was before counts no more."""
        with self._lock:
            self._samples.clear()
            self._highest.clear()

    def raise_in(self, stats: Stats) -> Stats:
        """Raise every peak in a fresh ``stats`` to what it would be without the probe's resets; returns ``stats``."""
        self.fold()
        for (name, pool), highest in zip(self._places, self._highest, strict=False):
            group = stats.get(name, {})
            figures = group.get(pool, {}) if pool else group
            if figures.get("peak", highest) < highest:
                figures["peak"] = highest
        return stats

    def fold(self) -> None:
        """Reduce the samples to their highest; the publisher does it now and then, to spare the training thread."""
        with self._lock:
            while self._samples:
                stats = self._samples.popleft()
                if not self._places:
                    self._places = _places_of_peaks(stats)
                peaks = [stats[name][pool]["peak"] if pool else stats[name]["peak"] for name, pool in self._places]
                self._highest = list(map(max, self._highest, peaks)) if self._highest else peaks


def _places_of_peaks(stats: Stats) -> list[tuple[str, str]]:
    """List where an allocator's statistics have peaks, as (name, pool); the pool is empty where there are none."""
    places: list[tuple[str, str]] = []
    for name, group in stats.items():
        if isinstance(group, dict):
            places += [(name, "")] if "peak" in group else [(name, pool) for pool in group]
    return places


class CudaMemory:
    """The CUDA back end for one device.

    Args:
        core: the ``torch._C`` module.
        device: the device's index.
        on_script_reset: called with the figures as they were, just before the script's own reset takes place.
    """

    measure = "cuda"

    def __init__(self, core: Any, device: int, on_script_reset: Callable[[Stats], None]) -> None:
        self.device_index = device
        self._stats: Callable[[int], Stats] = core._cuda_memoryStats
        self._reset: Callable[[int], None] = core._cuda_resetPeakMemoryStats
        self._script = ScriptPeaks()
        self._note = self._script.note
        self._on_script_reset = on_script_reset
        self._wrap(core)

    def sample(self) -> Stats:
        """Return the allocator's nested statistics and begin new peaks."""
        index = self.device_index
        stats = self._stats(index)
        self._reset(index)
        self._note(stats)
        return stats

    def read(self, sample: Stats) -> Reading:
        """Pick the figures ftmon shows out of the allocator's statistics; an empty one is that of a fresh process."""
        if not sample:
            return Reading(0, 0, 0, 0, 0, 0, 0, 0)
        allocated, reserved = sample["allocated_bytes"]["all"], sample["reserved_bytes"]["all"]
        active, blocks = sample["active_bytes"]["all"], sample["allocation"]["all"]
        requested = sample.get("requested_bytes", _UNKNOWN)["all"]
        return Reading(
            allocated["current"],
            allocated["peak"],
            reserved["current"],
            reserved["peak"],
            active["current"],
            active["peak"],
            requested["current"],
            requested["peak"],
            -1,
            -1,
            blocks["allocated"],
            blocks["freed"],
            allocated["allocated"],
            sample.get("num_alloc_retries", 0),
            sample.get("num_ooms", 0),
        )

    def tidy(self) -> None:
        """Do what the training thread has left undone; for the publisher."""
        self._script.fold()

    def now(self) -> Reading:
        """Read the figures of this moment without touching the peaks."""
        return self.read(self._stats(self.device_index))

    def _wrap(self, core: Any) -> None:
        for name in _READ:
            if hasattr(core, name):
                setattr(core, name, self._reading(getattr(core, name)))
        for name in _RESET:
            if hasattr(core, name):
                setattr(core, name, self._resetting(getattr(core, name)))

    def _reading(self, real: Callable[[int], Stats]) -> Callable[[int], Stats]:
        def stats(device: int) -> Stats:
            found = real(device)
            return self._script.raise_in(found) if device == self.device_index else found

        return stats

    def _resetting(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            if device == self.device_index:
                self._on_script_reset(self._stats(device))
                self._script.restart()
            real(device)

        return reset
