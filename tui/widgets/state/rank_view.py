"""The values of one rank for a card, a row or a heat cell."""

from dataclasses import dataclass

TROUBLE = ("waiting", "hung", "held", "stopped", "gone", "unreachable")
"""Rank states shown in place of power and temperature."""


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment. Bytes, seconds, percent, watts and degrees Celsius; None: not known."""

    rank: int
    device: str
    """``GPU 0`` or ``CPU``."""
    host: str = ""
    """Empty if the run has one host only."""
    state: str = "starting"
    text: str = ""
    """Reason of its state."""
    state_seconds: float | None = None
    """Seconds for which it has been in trouble."""
    measure: str = "cuda"
    capacity: int = 0
    allocated: int = 0
    peak: int = 0
    peak_phase: str = ""
    """The phase of the peak."""
    behind: int = 0
    """Reserved memory on a GPU, resident set on a CPU."""
    spikes: int = 0
    shares: tuple[tuple[str, float], ...] = ()
    step_seconds: float | None = None
    utilization: float | None = None
    power: float | None = None
    temperature: float | None = None
    throttled: str = ""
    host_memory: tuple[int, int] | None = None
    """Used and total bytes of the host, for a rank on the CPU."""

    @property
    def in_trouble(self) -> bool:
        """Whether its state needs attention."""
        return self.state in TROUBLE

    @property
    def share(self) -> float:
        """The rank's peak as a share of its device's capacity."""
        return self.peak / self.capacity if self.capacity else 0.0

    @property
    def words(self) -> tuple[str, str]:
        """Names of the solid and the lighter part of its memory."""
        return ("alloc", "rsvd") if self.measure == "cuda" else ("in use", "resident")
