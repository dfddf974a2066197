"""Finds stragglers (``stragglers``), reasons for slow devices, and the line of code at which a rank is slow.

After a straggler was found, its stack is sampled for some time to name the line.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ...messages import verbs
from ...messages.control import Result
from ...messages.telemetry import DeviceSample, Hello, Step
from ..findings import Finding
from ..findings.finding import Resolution, ResolvedWhy
from ..findings.requests import Action, DiagnosticRequests
from . import python_stacks
from .places import SAMPLES, usual_place
from .slow_devices import DeviceFacts, SlowDevices
from .stragglers import StragglerFacts, StragglerFinding, Stragglers
from .work import BATCH, work_of

_NOT_THE_DEVICE = ("data", BATCH, "idle")
"""Phases that a slow device does not explain."""


class SlowRankFacts(msgspec.Struct, frozen=True):
    """A straggler with its reasons."""

    straggler: StragglerFacts
    device: DeviceFacts | None = None
    """State of its device; None: unknown, or its device does not explain it."""
    line: str = ""
    """The most frequent line of its training thread; empty: unknown yet."""
    samples: int = 0


class SlowDetector:
    """Passes steps to ``Stragglers``, and adds reasons and lines to its findings."""

    def __init__(self, asks: DiagnosticRequests) -> None:
        self._asks = asks
        self._found: dict[int, Finding] = {}
        """The latest finding of each straggler."""
        self._samples: dict[int, list[python_stacks.Place]] = {}
        """Sampled lines of each straggler that is being located."""
        self._awaited: set[int] = set()
        """Ranks whose samples have been requested and have not arrived."""
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
        known = self._processes.get(hello.rank)
        findings: list[Finding] = []
        if (known is not None and known != process) or any(
            other[3] != hello.world_size for other in self._processes.values()
        ):
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

    def forget(self, rank: int) -> None:
        """Stop comparing with a rank, without a finding."""
        self._processes.pop(rank, None)
        self._judge.remove(rank)

    def step(self, t: float, step: Step) -> list[Finding]:
        """Process one step; the ranks are judged once the last of them has sent it."""
        found = self._judge.step(t, step.rank, step.step, work_of(step, self._judge.device))
        return self._findings(found) if found else []

    def tick(self) -> None:
        """Request samples from the stragglers that are being located."""
        for rank in self._samples:
            if rank not in self._awaited:
                self._awaited.add(rank)
                self._asks.add(Action(verbs.Stacks(quiet=True), (rank,), "the line at which a rank is slow"))

    def stacks(self, asked: Iterable[int], answers: Mapping[int, Result]) -> list[Finding]:
        """Process sampled stacks of stragglers; names the line once there are enough samples."""
        findings: list[Finding] = []
        self._awaited.difference_update(asked)
        for rank, answer in answers.items():
            places = self._samples.get(rank)
            if places is None or not answer.ok:
                continue
            threads = python_stacks.parse(str(answer.data.get("text", "")))
            thread = python_stacks.training_thread(threads, str(answer.data.get("thread", "")))
            places.append(python_stacks.where(thread.frames if thread is not None else ()))
            if len(places) >= SAMPLES:
                findings += self._place(rank, places)
        return findings

    def _place(self, rank: int, places: list[python_stacks.Place]) -> list[Finding]:
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

    def _findings(self, judged: list[StragglerFinding], over: ResolvedWhy = "calm") -> list[Finding]:
        findings: list[Finding] = []
        for one in judged:
            rank = one.facts.rank
            if one.state == "resolved":
                self._samples.pop(rank, None)
                self._found.pop(rank, None)
                findings.append(
                    Finding("straggler", Resolution(over, one.facts.step), "resolved", rank=rank, ranks=(rank,))
                )
            else:
                self._found[rank] = found = self._finding(one.facts)
                self._samples[rank] = []
                findings.append(found)
        return findings

    def _finding(self, facts: StragglerFacts) -> Finding:
        device = self._hindered.why(facts.rank) if facts.slow_at not in _NOT_THE_DEVICE else None
        return Finding("straggler", SlowRankFacts(facts, device), ranks=(facts.rank,), step=facts.step, rank=facts.rank)
