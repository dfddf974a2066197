"""Host memory on its way out: projected to the time when none is left, before the kernel ends a process.

The growth of a host's memory in use is measured within one phase of its ranks: an evaluation that keeps all logits
fills it in seconds, a data set or a list that grows in minutes. Loading, start-up and checkpoints also take much at
once, and stop by themselves: they are not judged. Nor is an evaluation until it has taken more than the ones before.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from ...messages.telemetry import Activity, DeviceSample, Heartbeat, Hello
from ...text import duration, gib
from ..findings.finding import Detector, Finding, Handler, Kind, Shown
from ..words import Words

SOON_S = 300.0  # raised if none is left within this time at the present rate
OTHERS_SOON_S = 60.0  # the same if other programs take the memory: what they will do is not known
LEAST_SHARE = 0.4  # share of the memory in use below which nothing is raised
WINDOWS = {"eval": 8.0, "generate": 30.0}  # seconds of steady growth, by phase
WINDOW = 60.0  # the same in a training's other phases
NOT_JUDGED = frozenset(("init", "checkpoint"))
FEWEST = 8
OWN_SHARE = 0.4  # share of the growth that is the ranks' own; of less, others or loader workers take the memory
PARTS = 4  # parts of the window whose medians must rise, each by `EVEN` of the mean rise or more
EVEN = 0.3
MORE = 1.1  # times as much as an evaluation or a rollout took that has ended: the next one is judged from there


class HostMemoryFacts(msgspec.Struct, frozen=True):
    """The growth of a host's memory in use."""

    host: str
    free_bytes: int
    bytes_per_s: float
    full_in_s: float
    phase: str
    growing_rank: int | None  # whose resident memory grows most; None: it does not grow in the ranks' processes


class _Host:
    def __init__(self) -> None:
        self.samples: deque[tuple[float, int]] = deque()
        self.phase = ""
        self.began = self.risen = 0  # memory in use as the phase began, and its highest rise since
        self.rises: dict[str, int] = {}  # the highest rise of each phase that has ended
        self.standing: Finding | None = None

    def begin(self, phase: str, used: int) -> None:
        self.rises[self.phase] = max(self.rises.get(self.phase, 0), self.risen)
        self.phase, self.began, self.risen = phase, used, 0

    def repeats(self, free: int) -> bool:
        """Return whether the phase takes what such a phase took before it ended, and so much is free."""
        usual = MORE * self.rises.get(self.phase, 0) if self.phase in WINDOWS else 0
        return self.risen < usual < self.risen + free


def _growth(samples: Sequence[tuple[float, int]], window: float) -> float:
    """Return the even growth over a window in bytes per second; 0: there is none, or too few samples."""
    last = samples[-1][0] if samples else 0.0
    within = sum(time >= last - window for time, _ in samples)
    kept = list(samples)[-max(FEWEST, within) :]  # a busy host samples late
    if len(kept) < FEWEST or kept[-1][0] - kept[0][0] < 0.8 * window:
        return 0.0
    size = len(kept) // PARTS
    parts = [kept[place * size : (place + 1) * size] for place in range(PARTS)]
    levels = [median(used for _, used in part) for part in parts]
    rises = [after - before for before, after in pairwise(levels)]
    if min(rises) <= 0 or min(rises) < EVEN * sum(rises) / len(rises):
        return 0.0
    times = [median(t for t, _ in part) for part in parts]
    return (levels[-1] - levels[0]) / (times[-1] - times[0])


def _rise(samples: Sequence[tuple[float, int]], since: float) -> int:
    """Return by how much a size rose since a time."""
    sizes = [size for time, size in samples if time >= since]
    return max(0, sizes[-1] - sizes[0]) if sizes else 0


def _words(facts: HostMemoryFacts, _: Finding) -> Words:
    is_own = facts.growing_rank is not None
    who = f", most in rank {facts.growing_rank}" if is_own else ", but not in the ranks' own processes"
    during = {"eval": "during an evaluation", "generate": "during a rollout"}.get(facts.phase, "during the training")
    remedy = (
        "Keep no logits of an evaluation: compute its metrics batch by batch (Trainer: preprocess_logits_for_metrics), "
        "or evaluate fewer rows."
        if is_own and facts.phase == "eval"
        else "Look at the other programs on the host, and at the loader workers."
        if not is_own
        else "Look for a list or a cache that grows with each batch: losses kept with their graphs, a data set that "
        "keeps its items, loader workers that copy them."
    )
    return Words(
        f"memory of {facts.host} will be full in {duration(facts.full_in_s)}",
        f"{gib(facts.free_bytes)} are left, and its use grows by {gib(round(facts.bytes_per_s * 60))} a minute {during}"
        f"{who}. The kernel ends a process when none is left.",
        remedy,
        "It has stopped growing.",
    )


class HostMemory(Detector):
    """Judges the memory of each host."""

    kinds = (
        Kind(
            "host_memory_filling",
            HostMemoryFacts,
            _words,
            shown={"growing_rank": Shown("grows most in", "rank"), "phase": Shown("in phase")},
            limits={
                "full at the present rate": f"within {SOON_S / 60:g} min, by other programs {OTHERS_SOON_S / 60:g} min",
                "steady growth": f"{WINDOWS['eval']:g} s in an evaluation, {WINDOW:g} s in other phases",
                "memory in use": f"above {LEAST_SHARE:.0%}",
            },
        ),
    )

    def __init__(self) -> None:
        self._hosts: defaultdict[str, _Host] = defaultdict(_Host)
        self._host_of: dict[int, str] = {}
        self._phases: dict[int, str] = {}
        self._resident: defaultdict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=int(WINDOW)))
        """Time and size, as the host is sampled: a rank knows its size of the phase's beginning alone."""
        self._ends_at: dict[int, float] = {}  # when a rank's activity will end, if it says how much is done

    def handlers(self) -> Mapping[type, Handler]:
        return {Hello: self.hello, Heartbeat: self.beat, Activity: self.activity, DeviceSample: self.sample}

    def hello(self, hello: Hello) -> None:
        self._host_of[hello.rank] = hello.host

    def beat(self, beat: Heartbeat) -> None:
        if beat.phase != self._phases.get(beat.rank):
            self._ends_at.pop(beat.rank, None)
        self._phases[beat.rank] = beat.phase

    def activity(self, activity: Activity) -> None:
        if activity.over or not activity.done or not activity.total:
            self._ends_at.pop(activity.rank, None)
            return
        left = activity.seconds * (activity.total - activity.done) / activity.done
        self._ends_at[activity.rank] = activity.time + left

    def rank_ended(self, rank: int) -> list[Finding]:
        for known in (self._host_of, self._phases, self._resident, self._ends_at):
            known.pop(rank, None)
        return []

    def sample(self, sample: DeviceSample) -> list[Finding]:
        """Process a sample of a host's memory."""
        if sample.kind != "host":
            return []
        host = self._hosts[sample.host]
        ranks = [rank for rank, name in self._host_of.items() if name == sample.host]
        phase = self._phase(ranks)
        if phase != host.phase:
            for samples in (host.samples, *(self._resident[rank] for rank in ranks)):
                samples.clear()
            host.begin(phase, sample.used_bytes)
        host.risen = max(host.risen, sample.used_bytes - host.began)
        host.samples.append((sample.time, sample.used_bytes))
        for process in sample.processes:
            if process.rank is not None:
                self._resident[process.rank].append((sample.time, process.used_bytes))
        while host.samples[0][0] < sample.time - WINDOW:
            host.samples.popleft()
        window, free = WINDOWS.get(phase, WINDOW), sample.total_bytes - sample.used_bytes
        rate, growing = (0.0, None) if phase in NOT_JUDGED else self._rate(host, ranks, window, free)
        left = free / rate if rate > 0 else SOON_S
        ends = min((self._ends_at[rank] for rank in ranks if rank in self._ends_at), default=sample.time + SOON_S)
        limit = OTHERS_SOON_S if growing is None and host.standing is None else SOON_S
        soon = left < limit and sample.time + left < ends and sample.used_bytes > LEAST_SHARE * sample.total_bytes
        soon = soon and not host.repeats(free)
        if soon == (host.standing is not None):
            return []
        if host.standing is not None:
            standing, host.standing = host.standing, None
            return [standing.over()]
        facts = HostMemoryFacts(sample.host, free, rate, left, phase, growing)
        severity = "warning" if growing is None else "error"
        host.standing = Finding("host_memory_filling", facts, "raised", severity, key=sample.host)
        return [host.standing]

    def _phase(self, ranks: list[int]) -> str:
        """Return ``init``, ``checkpoint``, ``eval`` or ``generate`` if one of the ranks is in it, else ``training``."""
        phases = {self._phases.get(rank, "init") for rank in ranks} or {"init"}
        return next((phase for phase in ("init", "checkpoint", "eval", "generate") if phase in phases), "training")

    def _rate(self, host: _Host, ranks: list[int], window: float, free: int) -> tuple[float, int | None]:
        """Return the growth in bytes per second, and the rank that grows most if it is the ranks' own.

        Their own is seen even where other programs free memory meanwhile, or take still more. Where it rises less
        evenly than the host's, or was sampled for less time, its share is that of what both took in this time.
        """
        rates = {rank: _growth(self._resident[rank], window) for rank in ranks}
        own, rate = sum(rates.values()), _growth(host.samples, window)
        if not own and rate:
            firsts = [self._resident[rank][0][0] for rank in ranks if self._resident[rank]]
            since = max(*firsts, host.samples[-1][0] - window) if firsts else math.inf
            scale = rate / max(1, _rise(host.samples, since))
            rates = {rank: _rise(self._resident[rank], since) * scale for rank in ranks}
            own = sum(rates.values())
        rate = max(own, rate)
        is_own = own > 0 and (own >= OWN_SHARE * rate or own * SOON_S > free)
        return rate, max(rates, key=lambda one: rates[one]) if is_own else None
