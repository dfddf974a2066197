"""Figures of a memory back end at one moment, the same for every back end."""

from typing import Any, NamedTuple, Protocol


class Reading(NamedTuple):
    """Bytes now, and at the highest since the reading before; -1: this back end does not measure it.

    The counts are totals since the process began.
    """

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    active: int = -1
    active_peak: int = -1
    requested: int = -1
    requested_peak: int = -1
    resident: int = -1
    resident_peak: int = -1
    allocations: int = 0
    frees: int = 0
    allocated_bytes: int = 0
    retries: int = 0
    ooms: int = 0

    def without_peaks(self) -> "Reading":
        """Return the same figures with each peak set to the present value."""
        return self._replace(
            allocated_peak=self.allocated,
            reserved_peak=self.reserved,
            active_peak=self.active,
            requested_peak=self.requested,
            resident_peak=self.resident,
        )


class MemoryBackend(Protocol):
    """A memory back end: ``sample`` is cheap and for the training thread, ``read`` converts it on another one."""

    measure: Any
    device_index: int

    def sample(self) -> Any:
        """Sample the figures of this moment, raw, and begin a new peak."""
        ...

    def tidy(self) -> None:
        """Finish work that the training thread has deferred."""
        ...

    def read(self, sample: Any) -> Reading:
        """Convert a raw sample to a ``Reading``."""
        ...
