"""Ranks that hold the others up: stragglers with their reasons, and a rank that stands at one line of its script.

After a straggler was found, its stack is sampled for some time to name the line. A rank that polls for a lock file, or
retries a download, keeps waking up, which counts as work: a hang is raised only after minutes. Which ranks wait, and
for which rank, is known after seconds and reported then: as ``info``, and as a warning after ``LONG_S``. A verdict on a
hang replaces it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...messages import control
from ...messages.control import Alert, Result, Severity
from ...messages.telemetry import DeviceSample, Hello, Step
from ...text import duration, ranks_in_words
from ..findings.alerts import Action, DiagnosticRequests
from ..findings.finding import Condition, Finding, Kind, Resolution, ResolvedWhy, Shown, resolved
from ..words import Words
from . import evidence
from .collectives import RankView
from .stragglers import (
    BATCH,
    BLOCK_US,
    EVERYWHERE,
    EXCESS_SHARE,
    EXCESS_US,
    FAST_BLOCKS,
    FAST_RATIO,
    LONG_BLOCKS,
    RATIO,
    StragglerFacts,
    StragglerFinding,
    Stragglers,
    work_of,
)

CLOCK_SHARE = 0.92  # an SM clock below this share of the other ranks' clocks is a reason
_NO_REASON = ("application clocks", "sync boost", "display clocks")  # limits set by a user on purpose
SAMPLES = 10
FEWEST = 3
_WAITING = {"collective", "exiting"}
_NOT_THE_DEVICE = ("data", BATCH, "idle")


class DeviceFacts(msgspec.Struct, frozen=True):
    """Possible reasons why a rank's device is slow."""

    host: str
    index: int
    throttle_reasons: list[str]
    own_reasons: list[str]  # those that do not apply to all other ranks' devices too
    temperature_c: float | None = None
    sm_clock_mhz: int | None = None  # none: not compared
    others_sm_clock_mhz: int | None = None  # median of the other ranks' devices
    strangers: list[int] = []  # pids of processes on it that are of no rank

    @property
    def is_clocked_lower(self) -> bool:
        """Whether its clock is clearly lower than the others'."""
        own, others = self.sm_clock_mhz, self.others_sm_clock_mhz
        return own is not None and others is not None and own < CLOCK_SHARE * others


class SlowDevices:
    """Keeps the latest sample of every rank's device."""

    def __init__(self) -> None:
        self._devices: dict[int, tuple[str, str | int]] = {}  # host and UUID of each rank's device, or its index
        self._samples: dict[tuple[str, str | int], DeviceSample] = {}

    def hello(self, hello: Hello) -> None:
        if hello.device.kind == "cuda":
            self._devices[hello.rank] = hello.host, hello.device.uuid or hello.device.index

    def sample(self, sample: DeviceSample) -> None:
        if sample.kind == "gpu":
            self._samples[sample.host, sample.uuid] = self._samples[sample.host, sample.index] = sample

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
        return self._samples.get(self._devices.get(rank, ("", -1)))


def usual_place(places: Sequence[evidence.Place], slow_at: str, share: float) -> str:
    """Return the most frequent line of the samples outside collectives; empty if none stands out.

    The samples are taken independently of the steps: the responsible line is in about ``share`` of them, the excess as
    a share of a step. A sample inside ``backward`` is not evidence for another phase.
    """
    waiting = _WAITING if slow_at in ("backward", EVERYWHERE) else {*_WAITING, "backward"}
    seen = Counter(place.text for place in places if place.text and place.doing not in waiting)
    text, count = seen.most_common(1)[0] if seen else ("", 0)
    return text if count >= max(FEWEST, 0.5 * share * len(places)) else ""


class SlowRankFacts(msgspec.Struct, frozen=True):
    """A straggler with its reasons."""

    straggler: StragglerFacts
    device: DeviceFacts | None = None  # state of its device; None: unknown, or its device does not explain it
    line: str = ""  # the most frequent line of its training thread; empty: unknown yet
    samples: int = 0


class SlowDetector:
    """Passes steps to ``Stragglers``, and adds reasons and lines to its findings."""

    def __init__(self, asks: DiagnosticRequests) -> None:
        self._asks = asks
        self._found: dict[int, Finding] = {}
        self._samples: dict[int, list[evidence.Place]] = {}  # sampled lines of each straggler that is being located
        self._awaited: set[int] = set()  # ranks whose samples have been requested and have not arrived
        self._judge = Stragglers()
        self._processes: dict[int, tuple[str, int, int, int]] = {}
        self._hindered = SlowDevices()

    def sample(self, sample: DeviceSample) -> None:
        """Record a sample of a device, as a possible reason for slowness."""
        self._hindered.sample(sample)

    def hello(self, hello: Hello) -> list[Finding]:
        """Register a rank; a new process of a known rank, or a new world size, resets all comparisons."""
        self._hindered.hello(hello)
        process = (hello.host, hello.pid, hello.start_ticks, hello.world_size)
        resized = any(other[3] != hello.world_size for other in self._processes.values())
        findings: list[Finding] = []
        if resized or self._processes.get(hello.rank, process) != process:
            self._processes.clear()
            findings = self._findings(self._judge.reset(), "restarted")
        self._processes[hello.rank] = process
        self._judge.device = hello.device.kind == "cuda"
        self._judge.add(hello.rank)
        return findings

    def drop(self, rank: int) -> list[Finding]:
        """Stop comparing with a rank that ended; return its resolved findings."""
        self._processes.pop(rank, None)
        ended = self._judge.remove(rank)
        return self._findings([ended] if ended is not None else [], "rank_ended")

    def step(self, t: float, step: Step) -> list[Finding]:
        """Process one step; the ranks are judged once the last of them has sent it."""
        found = self._judge.step(t, step.rank, step.step, work_of(step, self._judge.device))
        return self._findings(found) if found else []

    def tick(self) -> None:
        """Request samples from the stragglers that are being located."""
        for rank in self._samples:
            if rank not in self._awaited:
                self._awaited.add(rank)
                self._asks.add(Action(control.Stacks(quiet=True), (rank,), "the line at which a rank is slow"))

    def stacks(self, asked: Iterable[int], answers: Mapping[int, Result]) -> list[Finding]:
        """Process sampled stacks of stragglers; names the line once there are enough samples."""
        findings: list[Finding] = []
        self._awaited.difference_update(asked)
        for rank, answer in answers.items():
            places = self._samples.get(rank)
            if places is None or not answer.ok:
                continue
            threads = evidence.parse(str(answer.data.get("text", "")))
            thread = evidence.training_thread(threads, str(answer.data.get("thread", "")))
            places.append(evidence.where(thread.frames if thread is not None else ()))
            if len(places) >= SAMPLES:
                findings += self._place(rank, places)
        return findings

    def _place(self, rank: int, places: list[evidence.Place]) -> list[Finding]:
        del self._samples[rank]
        facts, known = self._judge.standing.get(rank), self._found.get(rank)
        if facts is None or known is None:
            return []
        line = usual_place(places, facts.slow_at, (facts.own_us - facts.others_us) / max(1, facts.step_us))
        if not line:
            return []
        found = msgspec.structs.replace(known.facts, line=line, samples=len(places))
        self._found[rank] = msgspec.structs.replace(known, facts=found)
        return [msgspec.structs.replace(known, facts=found, state="explained")]

    def restore(self, finding: Finding) -> None:
        """Restore a standing finding from the recording, so that it can end."""
        if finding.state != "resolved":
            self._judge.restore(finding.facts.straggler)

    def _findings(self, judged: list[StragglerFinding], why: ResolvedWhy = "calm") -> list[Finding]:
        findings: list[Finding] = []
        for one in judged:
            rank = one.facts.rank
            if one.state == "resolved":
                self._samples.pop(rank, None)
                self._found.pop(rank, None)
                findings.append(resolved(Condition("straggler", rank), Resolution(why, one.facts.step)))
            else:
                self._found[rank] = found = self._finding(one.facts)
                self._samples[rank] = []
                findings.append(found)
        return findings

    def _finding(self, facts: StragglerFacts) -> Finding:
        device = self._hindered.why(facts.rank) if facts.slow_at not in _NOT_THE_DEVICE else None
        return Finding("straggler", SlowRankFacts(facts, device), ranks=(facts.rank,), step=facts.step, rank=facts.rank)


_AT = {"idle": "between phases", BATCH: "between a batch and its forward", EVERYWHERE: "everywhere"}
_CAUSES = {
    "data": "Its data loading is slow: check its disk, its dataloader workers, and the size of its samples.",
    BATCH: "That is the loop's own work on a batch that the dataloader has delivered: collating, tokenizing, or moving "
    "it to the device.",
    "forward": "Its forward is slow: check clocks and throttle reasons, other processes on its device or cores, and "
    "whether its batches are longer than the others'.",
    "backward": "Its backward is slow: check clocks and throttle reasons, and other processes on its device or cores.",
    "optimizer": "Its optimizer step is slow: check offload (memory bandwidth, cores) and other processes there.",
    "idle": "That is code of the loop outside data, forward, backward and optimizer: logging, Python work, or batches "
    "that are read without a DataLoader.",
    EVERYWHERE: "All its phases are slow alike: check what else runs on its cores or device, a CPU quota, and clocks.",
}
_LONGER_BATCHES = 1.15
_MOST = 0.7


def _words(found: SlowRankFacts, _: Finding) -> Words:
    facts, why = found.straggler, _hindrance(found.device)
    at = _AT.get(facts.slow_at, f"at {facts.slow_at}")
    mine, theirs = facts.own_us, facts.others_us
    if facts.slow_at != EVERYWHERE:
        mine, theirs = (phases.get(facts.slow_at, 0) for phases in (facts.phases_us, facts.others_phases_us))
    title = f"rank {facts.rank} is slow {at}: {duration(mine * 1e-6)} a step, others {duration(theirs * 1e-6)}"
    parts = [title, why, f"in {found.line}" if found.line else ""]
    line = [f"It was seen most at {found.line}."] if found.line else []
    return Words("; ".join(filter(None, parts)), " ".join([_text(facts), *_causes(facts, why), *line]))


def _evidence(finding: Finding) -> dict[str, Any]:
    facts: SlowRankFacts = finding.facts
    device = {"device": _device(facts.device)} if facts.device is not None else {}
    line = {"at": facts.line, "samples": facts.samples} if facts.line else {}
    return {**_figures(facts.straggler), **device, **line}


def _hindrance(device: DeviceFacts | None) -> str:
    """Return the reason why a device is slow, as a clause; empty: none found."""
    if device is None:
        return ""
    reasons: list[str] = []
    if device.own_reasons:
        reasons.append(f"throttled: {', '.join(device.own_reasons)}")
    if device.is_clocked_lower:
        reasons.append(f"clocked at {device.sm_clock_mhz} MHz, others {device.others_sm_clock_mhz}")
    if device.strangers:
        count = len(device.strangers)
        reasons.append(f"shared with {count} process{'es' if count > 1 else ''} of others")
    return f"its GPU is {'; '.join(reasons)}" if reasons else ""


def _device(device: DeviceFacts) -> dict[str, Any]:
    found: dict[str, Any] = {"device": f"{device.host} GPU {device.index}", "throttle_reasons": device.throttle_reasons}
    if device.sm_clock_mhz is not None:
        found |= {"sm_clock_mhz": device.sm_clock_mhz, "others_sm_clock_mhz": device.others_sm_clock_mhz}
    if device.strangers:
        found["other_processes"] = device.strangers[:8]
    if device.temperature_c is not None:
        found["temperature_c"] = device.temperature_c
    return found


def _facts(alert: Alert) -> SlowRankFacts:
    """Return facts from an alert's evidence, sufficient to detect that it is resolved."""
    own, others, step = (round(1e3 * float(alert.evidence.get(name, 0))) for name in ("own_ms", "others_ms", "step_ms"))
    at = str(alert.evidence.get("slow_at", EVERYWHERE))
    return SlowRankFacts(StragglerFacts(alert.rank or 0, alert.step or 0, 0, own, others, 0, 0, step, at, {}, {}))


def _text(facts: StragglerFacts) -> str:
    step, own, others, waited, others_waited = (
        duration(us * 1e-6)
        for us in (facts.step_us, facts.own_us, facts.others_us, facts.waited_us, facts.others_waited_us)
    )
    clock = " of device time" if facts.device else ""
    if facts.measured:
        return (
            f"Of a step of {step} rank {facts.rank} works {own}{clock} and waits {waited} for other ranks; the others "
            f"work {others} and wait {others_waited} (over {facts.steps} steps)."
        )
    return (
        f"Of a step of {step} rank {facts.rank} takes {own}{clock} up to its first collective, the others {others}; "
        f"their phases with collectives last {others_waited}, its own {waited} (over {facts.steps} steps)."
    )


def _figures(facts: StragglerFacts) -> dict[str, Any]:
    found: dict[str, Any] = {
        "own_ms": _ms(facts.own_us),
        "others_ms": _ms(facts.others_us),
        "ratio": round(facts.own_us / max(1, facts.others_us), 3),
        "waited_ms": _ms(facts.waited_us),
        "others_waited_ms": _ms(facts.others_waited_us),
        "step_ms": _ms(facts.step_us),
        "slow_at": facts.slow_at,
        "own_ms_by_phase": {name: _ms(us) for name, us in facts.phases_us.items()},
        "others_ms_by_phase": {name: _ms(us) for name, us in facts.others_phases_us.items()},
        "window_steps": facts.steps,
        "clock": "device" if facts.device else "host",
        "waiting": "measured" if facts.measured else "bounded",
    }
    if facts.tokens and facts.others_tokens:
        found |= {"tokens": facts.tokens, "others_tokens": facts.others_tokens}
    if facts.off_cpu_us or facts.others_off_cpu_us:
        found |= {"off_cpu_ms": _ms(facts.off_cpu_us), "others_off_cpu_ms": _ms(facts.others_off_cpu_us)}
    return found


def _causes(facts: StragglerFacts, why: str) -> list[str]:
    found = [f"{why[0].upper()}{why[1:]}."] if why else []
    if facts.tokens and facts.tokens > _LONGER_BATCHES * facts.others_tokens > 0:
        found.append(f"Its batches hold {facts.tokens} tokens, the others' {facts.others_tokens}.")
    if facts.off_cpu_us - facts.others_off_cpu_us > _MOST * (facts.own_us - facts.others_us):
        found.append(
            f"Its training thread used no CPU for {duration(facts.off_cpu_us * 1e-6)} of that: it slept, or waited for "
            "a disk, the network, a lock or a CPU."
        )
    return found if why else [*found, _CAUSES.get(facts.slow_at, "")]


def _ms(us: int) -> float:
    return round(us / 1e3, 3)


_SHOWN: dict[str, Shown] = {
    "own_ms": Shown("own time per step", "ms"),
    "others_ms": Shown("the others' (median)", "ms"),
    "ratio": Shown("relative to usual", "times"),
    "waited_ms": Shown("waited for others", "ms"),
    "others_waited_ms": Shown("the others waited", "ms"),
    "slow_at": Shown("slow in"),
    "own_ms_by_phase": Shown("own time by phase", "ms"),
    "others_ms_by_phase": Shown("the others' by phase", "ms"),
    "clock": Shown("clock of"),
    "tokens": Shown("tokens per step"),
    "others_tokens": Shown("the others' tokens"),
    "off_cpu_ms": Shown("not on a processor", "ms"),
    "others_off_cpu_ms": Shown("the others not on one", "ms"),
    "samples": Shown("stacks seen there"),
    "other_processes": Shown("other processes on it"),
    "throttle_reasons": Shown("slowed by"),
}

EARLY_S = 15.0
LONG_S = 60.0
ORDINARY = frozenset(("eval", "checkpoint", "generate"))  # phases in which one rank may work while the others wait


class WaitedFor(msgspec.Struct, frozen=True):
    """Ranks that wait for others, and where those are."""

    waiting: tuple[int, ...]
    waited_for: tuple[int, ...]
    place: str  # of the first of them: `write_cache in cache.py:6`
    seconds: float
    polls: bool  # whether it keeps waking up there


def _waited_words(facts: WaitedFor, _: Finding) -> Words:
    has = "has" if len(facts.waited_for) == 1 else "have"
    does = f"{has} polled" if facts.polls else f"{has} been"
    return Words(
        f"{ranks_in_words(facts.waiting)} wait{'s' if len(facts.waiting) == 1 else ''} for "
        f"{ranks_in_words(facts.waited_for)}: {facts.place}",
        f"{ranks_in_words(facts.waited_for).capitalize()} {does} at that line for {duration(facts.seconds)}, and the "
        "others cannot go on. Nothing is ended for it.",
        "If it waits for a lock file, see whether the process that made it still lives (ftmon stacks).",
        "It has gone on.",
    )


KINDS = (
    Kind(
        "straggler",
        SlowRankFacts,
        _words,
        "slow",
        "own-work",
        evidence=_evidence,
        shown=_SHOWN,
        resolved={
            "calm": "As fast as the others again at step {0}.",
            "rank_ended": "The rank ended.",
            "restarted": "The ranks started anew.",
        },
        limits={
            "own work, of the others'": f"{RATIO:g} times",
            "excess": f"{EXCESS_SHARE:.0%} of the step, and {EXCESS_US / 1000:g} ms",
            "blocks in a row": f"{FAST_BLOCKS} of {BLOCK_US / 1e6:g} s at {FAST_RATIO:g} times",
            "or in all": f"{LONG_BLOCKS} but one",
        },
        restore=_facts,
    ),
    Kind(
        "waited_for",
        WaitedFor,
        _waited_words,
        resolved={"resumed": "It has gone on.", "superseded": "It is a hang."},
        shown={"polls": Shown("keeps waking up"), "place": Shown("at"), "waited_for": Shown("waited for")},
        limits={"at one line, others waiting": f"{EARLY_S:g} s; a warning after {LONG_S:g} s"},
    ),
)
_CONDITION = Condition("waited_for")


class WaitDetector:
    """Finds ranks at one line for which all others wait."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, float]] = {}  # where each awaited rank stands, and since when
        self._raised: tuple[tuple[int, ...], Severity] | None = None

    def tick(self, now: float, views: Sequence[RankView], is_hang: bool) -> list[Finding]:
        """Look at all ranks; ``is_hang``: a verdict on a hang stands."""
        late = [] if is_hang else _waited_for(views)
        places = {view.rank: view.evidence.place.line or view.evidence.place.at for view in late if view.evidence}
        self._places = {
            rank: self._places[rank] if rank in self._places and self._places[rank][0] == place else (place, now)
            for rank, place in places.items()
        }
        stood = min((now - since for _, since in self._places.values()), default=0.0)
        if not late or stood < EARLY_S:
            return self._end("superseded" if is_hang else "resumed") if not late else []
        first, ranks = late[0].evidence, tuple(sorted(places))
        severity: Severity = "warning" if stood >= LONG_S else "info"
        if first is None or self._raised == (ranks, severity):
            return []
        self._raised = ranks, severity
        waiting = tuple(sorted(view.rank for view in views if not view.finished and view.rank not in places))
        facts = WaitedFor(waiting, ranks, first.place.text, stood, first.restless or first.work == "works")
        return [Finding("waited_for", facts, "raised", severity, ranks)]

    def _end(self, why: ResolvedWhy) -> list[Finding]:
        raised, self._raised = self._raised, None
        return [resolved(_CONDITION, Resolution(why))] if raised is not None else []


def _waited_for(views: Iterable[RankView]) -> list[RankView]:
    """Return the ranks that all others wait for; empty: some rank does neither, or its place is not known."""
    living = [view for view in views if not view.finished]
    waiting = [view for view in living if _waits(view)]
    late = [view for view in living if not _waits(view)]
    if not waiting or not late or any(view.absent or view.phase in ORDINARY for view in living):
        return []
    for view in late:
        found = view.evidence
        if found is None or not found.place.at or found.place.doing in ("compiling", "collective"):
            return []
        if view.step <= 1 and not found.restless:
            return []  # one rank prepares the data, or loads the model, for all
    return late


def _waits(view: RankView) -> bool:
    found = view.evidence
    return bool(view.inside) or view.blocked or (found is not None and found.place.doing in ("collective", "backward"))
