"""Memory of a rank without a GPU: glibc's own figures, and the kernel's high-water mark of the resident set.

``allocated`` is the memory that malloc has handed out (``uordblks + hblkhd`` of mallinfo2(3)), ``reserved`` its total
(``arena + hblkhd``). glibc keeps no peak of either; the peak is that of the resident set, reset through
``/proc/self/clear_refs`` ("5", proc(5)).
"""

import ctypes
import os
import resource
from pathlib import Path
from typing import Any, ClassVar

from . import rusage
from .reading import Reading

_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Mallinfo2(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


class CpuMemory:
    """The CPU back end. ``sample`` is for the training thread, ``read`` for the publisher."""

    measure = "glibc"
    device_index = 0

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        # glibc 2.33 brought mallinfo2; elsewhere (older glibc, musl) the resident set stands in for both figures.
        self._mallinfo: Any = getattr(libc, "mallinfo2", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo2
            self._mallinfo.argtypes = ()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._clear = self._open_clear()
        self._floor_kib = 0
        if self._clear is not None:
            rusage.install()
            rusage.note(rusage.real_getrusage(resource.RUSAGE_SELF).ru_maxrss)
            os.pwrite(self._clear, b"5", 0)
            # ru_maxrss never falls below the process's mark before exec; the kernel keeps that separately.
            inherited = rusage.real_getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._floor_kib = inherited if inherited > _high_water_kib() + 1024 else 0

    @property
    def has_peaks(self) -> bool:
        """Whether the kernel lets this process reset its high-water mark; without it a peak is often unknown."""
        return self._clear is not None

    def sample(self) -> tuple[int, int, int, int]:
        """Return (allocated, reserved, resident, resident peak since the last sample) in bytes; begins a new peak."""
        resident = int(os.pread(self._statm, 64, 0).split(b" ", 2)[1]) * _PAGE
        peak_kib = rusage.real_getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak_kib <= self._floor_kib:
            peak_kib = _high_water_kib()
        clear = self._clear
        if clear is not None:
            if peak_kib > rusage.highest_kib:
                rusage.highest_kib = peak_kib
            os.pwrite(clear, b"5", 0)
        elif peak_kib <= rusage.highest_kib:
            peak_kib = 0  # never reset and not raised in this phase: this phase's own peak is not known
        else:
            rusage.highest_kib = peak_kib
        if self._mallinfo is None:
            return resident, resident, resident, peak_kib * 1024
        info = self._mallinfo()
        mapped = info.hblkhd
        return info.uordblks + mapped, info.arena + mapped, resident, peak_kib * 1024

    def read(self, sample: tuple[int, int, int, int]) -> Reading:
        """Convert a sample to a ``Reading``."""
        allocated, reserved, resident, peak = sample
        return Reading(
            allocated=allocated,
            allocated_peak=allocated,
            reserved=reserved,
            reserved_peak=reserved,
            resident=resident,
            resident_peak=max(resident, peak),
        )

    def tidy(self) -> None:
        """Do nothing: no work is deferred here."""

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._statm)
        if self._clear is not None:
            os.close(self._clear)

    @staticmethod
    def _open_clear() -> int | None:
        try:
            descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            before = rusage.real_getrusage(resource.RUSAGE_SELF).ru_maxrss
            rusage.note(before)
            os.pwrite(descriptor, b"5", 0)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


def _high_water_kib() -> int:
    return _proc_kib("/proc/self/status", "VmHWM:")


def _proc_kib(path: str, field: str) -> int:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0
