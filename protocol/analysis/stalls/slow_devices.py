"""Finds reasons in NVML's samples why a rank's device computes slowly: throttling, lower clocks, other processes."""

from typing import Any, NamedTuple

from ...telemetry import DeviceSample, Hello

CLOCK_SHARE = 0.92
"""An SM clock below this share of the other ranks' clocks is a reason."""
_NO_REASON = ("application clocks", "sync boost", "display clocks")
"""Limits set by a user on purpose."""


class SlowDeviceReason(NamedTuple):
    """Why a device is slow: a clause (empty: no reason found), and the figures."""

    words: str
    evidence: dict[str, Any]


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

    def why(self, rank: int) -> SlowDeviceReason:
        """Return why a rank's device is slower than the other ranks'."""
        mine = self._of(rank)
        if mine is None:
            return SlowDeviceReason("", {})
        words: list[str] = []
        reasons = [reason for reason in mine.throttle_reasons if reason not in _NO_REASON]
        evidence: dict[str, Any] = {"device": f"{mine.host} GPU {mine.index}", "throttle_reasons": reasons}
        others = [one for other in self._devices if other != rank and (one := self._of(other)) is not None]
        # A limit that applies to all devices does not explain why this one is slower.
        own = [reason for reason in reasons if not all(reason in one.throttle_reasons for one in others) or not others]
        if own:
            words.append(f"throttled: {', '.join(own)}")
        clocks = sorted(one.sm_clock_mhz for one in others if one.sm_clock_mhz)
        if mine.sm_clock_mhz and clocks:
            usual = clocks[len(clocks) // 2]
            evidence |= {"sm_clock_mhz": mine.sm_clock_mhz, "others_sm_clock_mhz": usual}
            if mine.sm_clock_mhz < CLOCK_SHARE * usual:
                words.append(f"clocked at {mine.sm_clock_mhz} MHz, others {usual}")
        strangers = [process for process in mine.processes if process.rank is None]
        if strangers:
            evidence["other_processes"] = [process.pid for process in strangers[:8]]
            words.append(f"shared with {len(strangers)} process{'es' if len(strangers) > 1 else ''} of others")
        if mine.temperature_c is not None:
            evidence["temperature_c"] = mine.temperature_c
        return SlowDeviceReason(f"its GPU is {'; '.join(words)}" if words else "", evidence)

    def _of(self, rank: int) -> DeviceSample | None:
        host, uuid, index = self._devices.get(rank, ("", "", -1))
        return self._samples.get((host, uuid)) if uuid else self._by_index.get((host, index))
