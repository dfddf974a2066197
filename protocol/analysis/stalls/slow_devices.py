"""Finds reasons in NVML's samples why a rank's device computes slowly: throttling, lower clocks, other processes."""

import msgspec

from ...messages.telemetry import DeviceSample, Hello

CLOCK_SHARE = 0.92
"""An SM clock below this share of the other ranks' clocks is a reason."""
_NO_REASON = ("application clocks", "sync boost", "display clocks")
"""Limits set by a user on purpose."""


class DeviceFacts(msgspec.Struct, frozen=True):
    """Possible reasons why a rank's device is slow."""

    host: str
    index: int
    throttle_reasons: list[str]
    own_reasons: list[str]
    """Those that do not apply to all other ranks' devices too."""
    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    """None: not compared."""
    others_sm_clock_mhz: int | None = None
    """Median of the other ranks' devices."""
    strangers: list[int] = []
    """Pids of processes on it that are of no rank."""

    @property
    def is_clocked_lower(self) -> bool:
        """Whether its clock is clearly lower than the others'."""
        own, others = self.sm_clock_mhz, self.others_sm_clock_mhz
        return own is not None and others is not None and own < CLOCK_SHARE * others

    @property
    def is_slow(self) -> bool:
        """Whether any reason was found."""
        return bool(self.own_reasons or self.strangers) or self.is_clocked_lower


class SlowDevices:
    """Keeps the latest sample of every rank's device."""

    def __init__(self) -> None:
        self._devices: dict[int, tuple[str, str, int]] = {}
        self._samples: dict[tuple[str, str], DeviceSample] = {}
        self._by_index: dict[tuple[str, int], DeviceSample] = {}

    def hello(self, hello: Hello) -> None:
        """Record the device of a rank."""
        if hello.device.kind == "cuda":
            self._devices[hello.rank] = hello.host, hello.device.uuid, hello.device.index

    def sample(self, sample: DeviceSample) -> None:
        """Keep a sample of a GPU."""
        if sample.kind == "gpu":
            self._samples[sample.host, sample.uuid] = sample
            self._by_index[sample.host, sample.index] = sample

    def why(self, rank: int) -> DeviceFacts | None:
        """Return why a rank's device may be slower than the other ranks'; None without a sample of it."""
        mine = self._of(rank)
        if mine is None:
            return None
        others = [one for other in self._devices if other != rank and (one := self._of(other)) is not None]
        reasons = [reason for reason in mine.throttle_reasons if reason not in _NO_REASON]
        # A limit that applies to all devices does not explain why this one is slower.
        own = [reason for reason in reasons if not all(reason in one.throttle_reasons for one in others) or not others]
        clocks = sorted(one.sm_clock_mhz for one in others if one.sm_clock_mhz)
        compared = bool(mine.sm_clock_mhz and clocks)
        return DeviceFacts(
            mine.host,
            mine.index,
            reasons,
            own,
            mine.temperature_c,
            mine.sm_clock_mhz if compared else None,
            clocks[len(clocks) // 2] if compared else None,
            [process.pid for process in mine.processes if process.rank is None],
        )

    def _of(self, rank: int) -> DeviceSample | None:
        host, uuid, index = self._devices.get(rank, ("", "", -1))
        return self._samples.get((host, uuid)) if uuid else self._by_index.get((host, index))
