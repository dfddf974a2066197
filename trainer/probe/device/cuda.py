"""Memory of a rank on a GPU: the figures of PyTorch's CUDA caching allocator.

A phase's peak needs the allocator's peaks reset at the phase's start. The script under observation may read and reset
the same counters, so the two entry points behind ``torch.cuda.memory_stats`` and ``reset_peak_memory_stats`` are
wrapped: the script still gets the peaks since *its own* last reset.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy

from . import allocator_stats
from .allocator_stats import Layout, Place, Stats
from .reading import Reading
from .stats_source import Sample, StatsSource

_READ = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESET = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_APPLY_AT_LATEST = 4096

_UNKNOWN = {"all": {"current": -1, "peak": -1}}
_FIGURES: list[Place] = [
    ("allocated_bytes", "all", "current"),
    ("allocated_bytes", "all", "peak"),
    ("reserved_bytes", "all", "current"),
    ("reserved_bytes", "all", "peak"),
    ("active_bytes", "all", "current"),
    ("active_bytes", "all", "peak"),
    ("requested_bytes", "all", "current"),
    ("requested_bytes", "all", "peak"),
    ("allocation", "all", "allocated"),
    ("allocation", "all", "freed"),
    ("allocated_bytes", "all", "allocated"),
    ("num_alloc_retries", "", ""),
    ("num_ooms", "", ""),
]
"""Statistics of a ``Reading``, in its order; the resident set (after the first eight) is no part of them."""

Pick = Callable[[bytes], tuple[int, ...]]


class ScriptPeaks:
    """The peaks the script would see without ftmon: the highest of all samples since its own last reset."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._places: list[Place] = []
        self._highest: list[int] = []
        """Highest values of the dictionaries, at each of those places."""
        self._copied: Any = None
        """Highest values of the copies, at each place of their layout."""
        self._lock = threading.Lock()

    def note(self, sample: Sample) -> None:
        """Keep a sample taken just before the probe resets the peaks; the first is a dictionary."""
        self._samples.append(sample)
        if len(self._samples) >= _APPLY_AT_LATEST:
            self.apply_samples()

    def restart(self) -> None:
        """Discard the earlier peaks: the script has reset them."""
        with self._lock:
            self._samples.clear()
            self._highest.clear()
            self._copied = None

    def raise_in(self, stats: Stats, layout: Layout | None = None) -> Stats:
        """Raise every peak in a fresh ``stats`` to its value without the probe's resets; return ``stats``."""
        self.apply_samples()
        highest = dict(zip(self._places, self._highest, strict=False))
        copied = self._copied
        if layout is not None and copied is not None:
            for place in self._places:
                highest[place] = max(highest.get(place, 0), int(copied[layout.places[place]]))
        for (name, pool, _), peak in highest.items():
            group = stats.get(name, {})
            figures = group.get(pool, {}) if pool else group
            if figures.get("peak", peak) < peak:
                figures["peak"] = peak
        return stats

    def apply_samples(self) -> None:
        """Reduce the samples to their highest; the publisher does it now and then, to spare the training thread."""
        copies: list[bytes] = []
        with self._lock:
            while self._samples:
                sample = self._samples.popleft()
                if isinstance(sample, bytes):
                    copies.append(sample)
                    continue
                self._places = self._places or allocator_stats.peaks_in(sample)
                peaks = [allocator_stats.value_of(sample, place) for place in self._places]
                self._highest = list(map(max, self._highest, peaks)) if self._highest else peaks
            if copies:
                highest = numpy.frombuffer(b"".join(copies), numpy.int64).reshape(len(copies), -1).max(axis=0)
                self._copied = highest if self._copied is None else numpy.maximum(self._copied, highest)


class CudaMemory:
    """The CUDA back end for one device.

    Args:
        core: the ``torch._C`` module.
        device: the device's index.
        devices: number of devices that the process sees.
        on_script_reset: called with the figures as they were, just before the script's own reset takes place.
    """

    measure = "cuda"

    def __init__(self, core: Any, device: int, devices: int, on_script_reset: Callable[[Stats], None]) -> None:
        self.device_index = device
        self._stats: Callable[[int], Stats] = core._cuda_memoryStats
        self._reset: Callable[[int], None] = core._cuda_resetPeakMemoryStats
        self._source = StatsSource(self._stats, device, devices)
        self._pick: Pick | None = None
        self._script = ScriptPeaks()
        self._note = self._script.note
        self._on_script_reset = on_script_reset
        self._wrap(core)

    def sample(self) -> Sample:
        """Return the allocator's statistics and begin new peaks."""
        found = self._source.read()
        self._reset(self.device_index)
        self._note(found)
        return found

    def read(self, sample: Sample) -> Reading:
        """Pick the figures ftmon shows out of the allocator's statistics; an empty one is that of a fresh process."""
        if not sample:
            return Reading(0, 0, 0, 0, 0, 0, 0, 0)
        if isinstance(sample, bytes):
            if self._pick is None:
                assert self._source.layout is not None
                self._pick = self._source.layout.picker(_FIGURES)
            figures = self._pick(sample)
            return Reading._make((*figures[:8], -1, -1, *figures[8:]))
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
        """Finish work that the training thread has deferred; for the publisher."""
        self._script.apply_samples()
        self._source.check()

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
            return self._script.raise_in(found, self._source.layout) if device == self.device_index else found

        return stats

    def _resetting(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            if device == self.device_index:
                self._on_script_reset(self._stats(device))
                self._script.restart()
            real(device)

        return reset
