"""Faults of GPUs, from NVML and the driver's log: throttling, memory errors, XIDs.

- throttling: a thermal, power-brake or hardware slowdown reason in at least half of the samples of ``WINDOW_S``
  seconds while the GPU computes. A power cap alone does not count: it is normal under full load. Resolved if none
  occurred for ``WINDOW_S``.
- memory errors: uncorrectable ECC errors since the driver was loaded; row remappings that are pending or failed.
- XIDs: as reported by the driver, except those that result from a process's death (``IGNORED``).

Disks about to fill: by free space, by its rate of decrease, and by the size of earlier bursts of writing.

A finding is about one volume of one host that the run writes to.

- *rate*: free space has decreased in each quarter of the last ``LEAST_S`` seconds or longer, and will be used up at
  that rate within ``HORIZON_S`` and within ``LOOKAHEAD`` times the duration of the decrease. A checkpoint being written
  does not count, unless it takes a third of the space that was free when it started. Neither do the first of several
  kept checkpoints: with fewer than ``FEWEST_BURSTS`` bursts, the rate is that of the latest burst.
- *next write*: at least two bursts of ``BURST_BYTES`` or more were written (a checkpoint, at ``BURST_PER_S`` or more
  without a pause of ``BURST_GAP_S``), and the free space ``SETTLED_S`` after the last is less than the largest burst.
- *low*: little space is free, regardless of the rate.

Resolved if none of these has held for ``CALM_S``.

Checkpoints that could not be written: the run continues, and its progress since the last complete one is not saved.
Raised at the first failure, updated at each further one, resolved by the next complete checkpoint.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import msgspec

from ...messages.control import Severity
from ...messages.telemetry import Checkpoint, CheckpointFailed, DeviceHealth, DeviceSample, DiskSpace, Volume, Xid
from ...text import counted, duration, gib, sanitize
from ..findings.finding import Detector, Finding, Handler, Kind, Shown
from ..words import Words
from .series import Judge

# Meanings of NVIDIA's XID numbers for training: docs.nvidia.com/deploy/xid-errors.
IGNORED = frozenset((45,))  # preemptive cleanup: the driver closes the channels of a process that has ended

_OF_THE_PROGRAM = {
    13: "an illegal instruction or address in a kernel, of the program most often",
    31: "a memory page fault of a kernel: an illegal address, of the program most often",
    43: "a program's channel was stopped after a fault of its own",
    68: "a fault of the video decoder",
}
_OF_THE_DEVICE = {
    48: "an uncorrectable (double bit) memory error",
    61: "an internal micro-controller halt",
    62: "an internal micro-controller halt",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of correctable memory errors",
    94: "a contained uncorrectable memory error: the program using that memory is ended",
    95: "an uncontained uncorrectable memory error: the GPU must be reset",
    109: "a context switch timed out",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) failed",
    140: "an unrecovered memory error",
    149: "an NVLink fault",
}
_MILD = frozenset((63, 92))


def meaning(code: int) -> tuple[str, Severity]:
    """Return the meaning of an XID, as text, and its severity."""
    if code in _OF_THE_DEVICE:
        return _OF_THE_DEVICE[code], "warning" if code in _MILD else "error"
    return _OF_THE_PROGRAM.get(code, "see NVIDIA's list of XID errors"), "warning"


WINDOW_S = 20.0
FEWEST = 10
BUSY_PERCENT = 50.0
HINDERING = ("hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake")
"""NVML's reasons for unintended slowdown; a power cap is normal under full load."""

KEPT_S = 900.0
LEAST_S = 8.0
DISKS_FEWEST = 4
HORIZON_S = 1200.0
LOOKAHEAD = 2.0
LEAST_FALL = 8 * 2**20
BURST_BYTES = 256 * 2**20
BURST_PER_S = 2 * 2**20  # minimum decrease in bytes per second that is part of a burst; logs write less
BURST_GAP_S = 10.0
FEWEST_BURSTS = 5
SETTLED_S = 30.0
CALM_S = 20.0
LOW_SHARE = 0.02
LOW_BYTES = 2 * 2**30
NONE_BYTES = 64 * 2**20

Why = Literal["rate", "next write", "low"]


class DeviceFacts(msgspec.Struct, frozen=True):
    """The GPU, and its figures."""

    host: str
    index: int
    name: str = ""
    reasons: tuple[str, ...] = ()
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    others_sm_clock_mhz: int | None = None  # median of the host's other busy GPUs
    uncorrected: int | None = None
    new_errors: int = 0
    remap_pending: bool = False
    remap_failed: bool = False


class XidFacts(msgspec.Struct, frozen=True):
    """A driver error."""

    host: str
    code: int
    index: int  # NVML's index of the GPU; -1: unknown
    bus: str
    count: int
    text: str  # the driver's line
    meaning: str


def _gpu(facts: DeviceFacts) -> str:
    return f"GPU {facts.index} of {facts.host}"


def _throttling(facts: DeviceFacts, _: Finding) -> Words:
    others = f" (the host's other GPUs: {facts.others_sm_clock_mhz})" if facts.others_sm_clock_mhz else ""
    figures = [
        *([f"{facts.temperature_c:.0f} °C"] if facts.temperature_c is not None else []),
        *([f"{facts.power_w:.0f} W"] if facts.power_w is not None else []),
        *([f"SM clock {facts.sm_clock_mhz} MHz{others}"] if facts.sm_clock_mhz else []),
    ]
    seen = f": {', '.join(figures)}" if figures else ""
    return Words(
        f"{_gpu(facts)} is throttled: {', '.join(facts.reasons)}",
        f"For most of the last 20 s its clock was reduced while computing{seen}.",
        "Heat: check fans, air flow and neighbouring cards. Power brake or hardware slowdown: check the power supply "
        "and its cables. The whole run is as slow as its slowest GPU.",
        "It is no longer throttled.",
    )


def _memory_errors(facts: DeviceFacts, _: Finding) -> Words:
    parts: list[str] = []
    if facts.uncorrected:
        new = f", {facts.new_errors} of them during this run" if facts.new_errors else ", none of them during this run"
        errors = counted(facts.uncorrected, "uncorrectable ECC error")
        parts.append(f"{errors} since its driver was loaded{new}")
    if facts.remap_failed:
        parts.append("a memory row could not be remapped")
    if facts.remap_pending:
        parts.append("a memory row waits to be remapped at the next reset")
    wrong = " Results computed with it cannot be trusted." if facts.new_errors or facts.remap_failed else ""
    return Words(
        f"{_gpu(facts)} has memory errors: {parts[0] if parts else 'none'}",
        f"{'; '.join(parts)}.{wrong}",
        "Drain the host and reset the GPU (nvidia-smi -r); if errors recur, or remapping failed, have it replaced.",
        "NVML reports no errors any more.",
    )


def _xid(facts: XidFacts, _: Finding) -> Words:
    where = f"{f'GPU {facts.index}' if facts.index >= 0 else facts.bus or 'a GPU'} of {facts.host}"
    again = f", {facts.count} times" if facts.count > 1 else ""
    line = f' The driver\'s line: "{sanitize(facts.text, 300)}".' if facts.text else ""
    remedy = (
        "Run with CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer, to find the kernel."
        if facts.code in _OF_THE_PROGRAM
        else "Drain the host, reset the GPU (nvidia-smi -r) or reboot, and have it tested (dcgmi diag -r 3)."
    )
    return Words(f"XID {facts.code} on {where}{again}: {facts.meaning}", f"{facts.meaning}.{line}", remedy)


class _Gpu:
    def __init__(self) -> None:
        self.samples: deque[tuple[float, bool, bool, tuple[str, ...]]] = deque()
        """Time, whether it computed, whether it was throttled, and the reasons."""
        self.last: DeviceSample | None = None
        self.first_errors: int | None = None
        self.standing: dict[str, Finding] = {}  # by kind

    @property
    def busy(self) -> bool:
        return self.last is not None and (self.last.utilization_percent or 0.0) >= BUSY_PERCENT


class Gpus(Detector):
    """Judges every GPU of every host of a run."""

    kinds = (
        Kind(
            "gpu_throttling",
            DeviceFacts,
            _throttling,
            shown={
                "index": Shown("GPU"),
                "bus": Shown("PCI bus"),
                "code": Shown("XID"),
                "reasons": Shown("slowed by"),
                "temperature_c": Shown("temperature", "°C"),
                "power_w": Shown("power", "W"),
                "power_limit_w": Shown("power limit", "W"),
                "sm_clock_mhz": Shown("clock", "MHz"),
                "others_sm_clock_mhz": Shown("the others' clock", "MHz"),
                "uncorrected": Shown("uncorrected errors"),
                "remap_pending": Shown("a row remap is pending"),
                "remap_failed": Shown("a row remap failed"),
            },
            limits={"throttled while computing": f"half of {WINDOW_S:g} s"},
        ),
        Kind("gpu_memory_errors", DeviceFacts, _memory_errors),
        Kind("gpu_xid", XidFacts, _xid, lasting=True),
    )

    def __init__(self) -> None:
        self._gpus: defaultdict[tuple[str, int], _Gpu] = defaultdict(_Gpu)
        self._xids: Counter[str] = Counter()

    def handlers(self) -> Mapping[type, Handler]:
        return {DeviceSample: self.sample, DeviceHealth: self.health, Xid: self.xid}

    def sample(self, sample: DeviceSample) -> list[Finding]:
        """Check one sample for throttling."""
        if sample.kind != "gpu":
            return []
        gpu = self._gpus[sample.host, sample.index]
        gpu.last = sample
        reasons = tuple(reason for reason in sample.throttle_reasons if reason in HINDERING)
        gpu.samples.append((sample.time, gpu.busy, bool(reasons), reasons))
        while gpu.samples and gpu.samples[0][0] < sample.time - WINDOW_S:
            gpu.samples.popleft()
        count = len(gpu.samples)
        hindered = [one for one in gpu.samples if one[2]]
        busy = sum(one[1] for one in gpu.samples)
        bad = count >= FEWEST and 2 * len(hindered) >= count and 2 * busy >= count
        is_over = count >= FEWEST and not hindered
        facts = self._facts(sample.host, sample.index, sample, reasons=hindered[-1][3] if hindered else ())
        return self._change("gpu_throttling", gpu, facts, bad, is_over, "warning")

    def health(self, message: DeviceHealth) -> list[Finding]:
        """Check NVML's figures of a GPU's memory."""
        gpu = self._gpus[message.host, message.index]
        errors = message.ecc_uncorrected
        if gpu.first_errors is None:
            gpu.first_errors = errors
        new = max(0, (errors or 0) - (gpu.first_errors or 0))
        bad = bool(errors) or message.remap_pending or message.remap_failed
        facts = self._facts(
            message.host,
            message.index,
            gpu.last,
            uncorrected=errors,
            new_errors=new,
            remap_pending=message.remap_pending,
            remap_failed=message.remap_failed,
        )
        severity: Severity = "error" if new or message.remap_failed else "warning"
        return self._change("gpu_memory_errors", gpu, facts, bad, not bad, severity)

    def xid(self, message: Xid) -> list[Finding]:
        """Process an error reported by the driver."""
        if message.code in IGNORED:
            return []
        key = f"{message.host}:{message.bus or message.index}:{message.code}"
        self._xids[key] += 1
        what, severity = meaning(message.code)
        count = self._xids[key]
        facts = XidFacts(message.host, message.code, message.index, message.bus, count, message.text, what)
        return [Finding("gpu_xid", facts, "raised" if count == 1 else "updated", severity, key=key)]

    def _facts(self, host: str, index: int, sample: DeviceSample | None, **fields: Any) -> DeviceFacts:
        if sample is None:
            return DeviceFacts(host, index, **fields)
        others = [one for (on, number), one in self._gpus.items() if on == host and number != index and one.busy]
        clocks = sorted(one.last.sm_clock_mhz for one in others if one.last is not None and one.last.sm_clock_mhz)
        own = {name: getattr(sample, name) for name in ("temperature_c", "power_w", "power_limit_w", "sm_clock_mhz")}
        median = clocks[len(clocks) // 2] if clocks else None
        return DeviceFacts(host, index, sample.name, others_sm_clock_mhz=median, **own, **fields)

    @staticmethod
    def _change(
        kind: str, gpu: _Gpu, facts: DeviceFacts, bad: bool, is_over: bool, severity: Severity
    ) -> list[Finding]:
        """Return the finding that a condition is new, has changed, or is over; an empty list otherwise."""
        known = gpu.standing.get(kind)
        if bad and (known is None or _figures(known.facts) != _figures(facts)):
            state = "updated" if known is not None else "raised"
            gpu.standing[kind] = Finding(kind, facts, state, severity, key=f"{facts.host}:{facts.index}")
            return [gpu.standing[kind]]
        return [gpu.standing.pop(kind).over()] if is_over and known is not None else []


def _figures(facts: DeviceFacts) -> object:
    """Return the figures whose change updates an active finding."""
    return facts.reasons, facts.uncorrected, facts.remap_pending, facts.remap_failed


class DiskFacts(msgspec.Struct, frozen=True):
    """Free space of a volume, and its rate of decrease."""

    host: str
    path: str  # the run's directory on it
    use: str  # the directory's purpose: `run directory`, `output`, `working directory`, `TMPDIR`, `/dev/shm`
    why: Why
    free_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    full_in_s: float | None = None
    burst_bytes: int = 0


def _disk(facts: DiskFacts, _: Finding) -> Words:
    left = f"{gib(facts.free_bytes)} of {gib(facts.total_bytes)} left"
    where = f"{sanitize(facts.path, 120)} ({facts.use}) on {facts.host}"
    if facts.why == "rate" and facts.full_in_s is not None:
        title = f"disk full in {duration(facts.full_in_s)} at {gib(facts.bytes_per_s * 60)}/min: {where}"
    elif facts.why == "next write":
        title = f"the next checkpoint will not fit, {left}: {where}"
    else:
        title = f"disk nearly full, {left}: {where}"
    burst = f" The largest single write was {gib(facts.burst_bytes)}, more than is left." if facts.burst_bytes else ""
    return Words(
        title,
        f"{left}.{burst} Most trainings end if a checkpoint or a log cannot be written.",
        "Free space there, keep fewer checkpoints (save_total_limit), or have them written elsewhere.",
        "There is enough free space again.",
    )


class _Volume:
    def __init__(self) -> None:
        self.samples: deque[tuple[float, int]] = deque()
        self.standing: Finding | None = None
        self.calm_since: float | None = None
        self.sent = 0.0
        self.bursts: list[int] = []
        self.burst_from: int | None = None
        self.fell_at = 0.0

    def add(self, t: float, free: int) -> None:
        since, before = self.samples[-1] if self.samples else (t, free)
        self.samples.append((t, free))
        while self.samples[0][0] < t - KEPT_S:
            self.samples.popleft()
        if before - free > BURST_PER_S * (t - since):
            if self.burst_from is None:
                self.burst_from = before
            self.fell_at = t
        elif self.burst_from is not None and t - self.fell_at > BURST_GAP_S:
            written = self.burst_from - min(one for at, one in self.samples if at >= self.fell_at)
            self.burst_from = None
            if written >= BURST_BYTES:
                self.bursts = [*self.bursts[-3:], written]

    def falling(self) -> tuple[float, float] | None:
        """Return the current decrease of free space as (bytes per second, duration in seconds); None: no decrease."""
        samples = self.samples
        if len(samples) < DISKS_FEWEST:
            return None
        last_t, last = samples[-1]
        start = len(samples) - 1
        highest = last
        # Search back for the start of the decrease; pauses, and rises by up to a tenth, do not end it.
        for at in range(len(samples) - 2, -1, -1):
            free = samples[at][1]
            if free < highest - (highest - last) // 10 - 2**20:
                break
            if free > highest:
                highest, start = free, at
        bursts, latest = self._bursts(start)
        if 1 < bursts < FEWEST_BURSTS:
            start = latest  # decreases before a pause are not part of the current rate
        begun, top = samples[start]
        lasted = last_t - begun
        if lasted < LEAST_S or top - last < LEAST_FALL or len(samples) - start < DISKS_FEWEST:
            return None
        edges = [self._at(begun + lasted * share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        if any(later >= earlier for earlier, later in pairwise(edges)):
            return None
        return (top - last) / lasted, lasted

    def _bursts(self, start: int) -> tuple[int, int]:
        """Return the number of bursts since the sample ``start``, and the index of the latest burst's first sample.

        A decrease at most of the samples is one burst. Between bursts little is written for ``BURST_GAP_S``.
        """
        samples = list(self.samples)[start:]
        drops = [before[1] - after[1] for before, after in pairwise(samples)]
        if not drops:
            return 0, start
        least = sum(drops) / len(drops) / 4
        falls = [drop > least for drop in drops]
        if 2 * sum(falls) >= len(falls):
            return 1, start
        bursts, latest, fell_at = 0, start, samples[0][0] - 2 * BURST_GAP_S
        for at, is_falling in enumerate(falls):
            if is_falling:
                if samples[at][0] - fell_at > BURST_GAP_S:
                    bursts, latest = bursts + 1, start + at
                fell_at = samples[at + 1][0]
        return bursts, latest

    def _at(self, t: float) -> int:
        return min(self.samples, key=lambda one: abs(one[0] - t))[1]


class Disks(Detector):
    """Judges every volume of every host of a run."""

    kinds = (
        Kind(
            "disk_filling",
            DiskFacts,
            _disk,
            shown={
                "use": Shown("used for"),
                "total_bytes": Shown("in total", "bytes"),
                "bytes_per_s": Shown("written", "bytes/s"),
                "burst_bytes": Shown("next checkpoint", "bytes"),
            },
            limits={
                "full at the present rate": f"within {HORIZON_S / 60:g} min",
                "free": f"below {LOW_SHARE:.0%} and {gib(LOW_BYTES, 0)}",
            },
        ),
    )

    def __init__(self) -> None:
        self._volumes: defaultdict[tuple[str, str], _Volume] = defaultdict(_Volume)

    def handlers(self) -> Mapping[type, Handler]:
        return {DiskSpace: self.space}

    def space(self, message: DiskSpace) -> list[Finding]:
        """Process one measurement of a host's volumes."""
        found: list[Finding] = []
        for one in message.volumes:
            volume = self._volumes[message.host, one.path]
            volume.add(message.time, one.free_bytes)
            found += self._judge(message, one, volume)
        return found

    def _judge(self, message: DiskSpace, one: Volume, volume: _Volume) -> list[Finding]:
        facts, known, t = _facts(message, one, volume), volume.standing, message.time
        if facts is None:
            return self._calm(t, volume)
        volume.calm_since = None
        gone = one.free_bytes < min(NONE_BYTES, one.total_bytes // 100)
        soon = facts.full_in_s is not None and facts.full_in_s < 120
        severity: Severity = "error" if gone or soon else known.severity if known is not None else "warning"
        if known is not None and severity == known.severity and t - volume.sent < 30:
            return []
        state = "raised" if known is None else "updated"
        volume.sent = t
        volume.standing = Finding("disk_filling", facts, state, severity, key=f"{facts.host}:{facts.path}")
        return [volume.standing]

    def _calm(self, t: float, volume: _Volume) -> list[Finding]:
        if volume.standing is None:
            return []
        if volume.calm_since is None:
            volume.calm_since = t
        if t - volume.calm_since < CALM_S:
            return []
        known, volume.standing = volume.standing, None
        return [known.over()]


def _facts(message: DiskSpace, one: Volume, volume: _Volume) -> DiskFacts | None:
    free = one.free_bytes
    fall = volume.falling()
    rate = fall[0] if fall is not None else 0.0
    full_in = free / rate if rate > 0 else None

    def made(why: Why, burst: int = 0) -> DiskFacts:
        return DiskFacts(message.host, one.path, one.use, why, free, one.total_bytes, rate, full_in, burst)

    if fall is not None and full_in is not None and full_in < min(HORIZON_S, LOOKAHEAD * fall[1]):
        return made("rate")
    if free < min(LOW_BYTES, LOW_SHARE * one.total_bytes):
        return made("low")
    settled = message.time - volume.fell_at > SETTLED_S
    if len(volume.bursts) >= 2 and settled and free < max(volume.bursts):
        return made("next write", max(volume.bursts))
    return None


class CheckpointFacts(msgspec.Struct, frozen=True):
    """The failures, and the newest complete checkpoint."""

    path: str  # the intended path of the latest failed one
    error: str
    first_step: int  # step of the first failed one
    step: int  # step of the latest failed one
    failures: int  # number of consecutive failures
    kept: str  # the newest complete checkpoint; empty: none


class Checkpoints(Judge):
    """Judges the checkpoints of one job."""

    def failed(self, message: CheckpointFailed) -> list[Finding]:
        before: CheckpointFacts | None = self.standing.facts if self.standing is not None else None
        first, count = (before.first_step, before.failures + 1) if before is not None else (message.step, 1)
        facts = CheckpointFacts(message.path, message.error, first, message.step, count, message.kept)
        state = "raised" if before is None else "updated"
        self.standing = Finding("checkpoint_failed", facts, state, "error", step=message.step)
        return [self.standing]

    def complete(self, message: Checkpoint) -> list[Finding]:
        return self._end()


def _checkpoint(facts: CheckpointFacts, _: Finding) -> Words:
    error, path = sanitize(facts.error, 120), sanitize(facts.path, 160)
    again = f"{facts.failures} checkpoints in a row" if facts.failures > 1 else "a checkpoint"
    kept = f"The newest complete one is {sanitize(facts.kept, 160)}." if facts.kept else "There is no complete one."
    return Words(
        f"{again} could not be written, at step {facts.step}: {error}",
        f"{path}: {error}. Training continues. {kept} What was trained since then is lost if the run ends now.",
        "Free space on that disk, or make its folder writable again; the next checkpoint is tried as planned.",
        "A later checkpoint is complete.",
    )


KINDS = (Kind("checkpoint_failed", CheckpointFacts, _checkpoint, shown={"kept": Shown("what is kept")}, lasting=True),)
