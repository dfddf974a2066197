"""Spikes: memory that a phase allocated and freed, large compared with its recent steps, or large in every step.

A phase's transient is ``peak - max(start, end)`` of the figure with a true high-water mark (allocated on a GPU,
resident set on the CPU). Two rules:

**recent** (one alert per rank and phase). The transient exceeds the usual one of this phase and rank::

    transient > usual + max(k x 1.4826 x MAD, share x usual, floor)

over the last 32 steps: ``usual`` is their median (their maximum while there are fewer than 8; the first step does not
count). ``k`` = 6, ``share`` = 0.25 and at least 2 steps for the optimizer; 8, 1.0 and at least 8 steps for other
phases, whose activations follow the batch's length. ``floor`` is 0.1 % of the device on a GPU, within 32 to 256 MiB,
and 0.2 % on the CPU, within 48 to 256 MiB, because glibc's trimming and file pages change the resident set. A repeat
increments the alert's count; after 20 steps without a spike it is resolved. It is a warning in the optimizer, or if it
sets the run's peak and is at least 5 % of the device, else information.

**steady** (one alert per phase, for all ranks). The transient is large in every step: the median of 5 steps or more is
at least 0.5 % of the device and 256 MiB (optimizer, GPU), 2 % and 256 MiB (optimizer, CPU), or 10 % for another phase
that sets the step's peak. It is a warning from 5 % on (optimizer), else information.

Both request the stacks of that phase from a rank (``requests``); the cause is added once it is known
(``known_causes``).
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median_high
from typing import NamedTuple

import msgspec

from ...messages.control import Severity
from ...messages.memory import Cause, Composition
from ...messages.telemetry import AllocatorEvents, Hello, PhaseRecord, Step
from ..findings.alerts import RANKS_LISTED, DiagnosticRequests
from ..findings.finding import Condition, Finding, Resolution, resolved
from ..health.series import MAD_TO_SIGMA
from .causes import GrowthFacts, KnownCauses, SpikeFacts, SteadyFacts, conditions_of

FEW = 8  # with fewer values the maximum counts as typical, because they show too little of the usual variation
MIB = 2**20
WINDOW = 32
EARLIEST = 2
CALM_STEPS = 20
STEADY_STEPS = 5
RANKS_APART = 8  # number of ranks with their own spike alert for a phase; further ranks share one
SEVERE_SHARE = 0.05
OPTIMIZER, OTHER_PHASES = (6.0, 0.25), (8.0, 1.0)  # above the usual transient: multiple of its spread, share of it
FLOORS = (32 * MIB, 0.001)
CPU_FLOORS = (48 * MIB, 0.002)  # least limit above the usual transient: bytes, and share of the device's memory
STEADY_BYTES = 256 * MIB
STEADY_SHARE, STEADY_SHARE_CPU, STEADY_SHARE_OTHERS = 0.005, 0.02, 0.10
_NEVER = 1 << 62
GROWTH_FLOOR = 16 * 2**20
FIRST_STEPS = 3
_NESTED = ("forward", "backward")


class Usual(NamedTuple):
    """``typical``: the median, or the maximum of few values. ``middle``: the median. ``spread``: a robust sigma."""

    typical: int
    middle: int
    spread: float


def usual_of(values: Sequence[int]) -> Usual:
    """Return the statistics of recent values (any unit); zeros for an empty list."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return Usual(0, 0, 0.0)
    middle = ordered[count // 2]
    deviation = median_high([abs(value - middle) for value in ordered])
    return Usual(ordered[-1] if count < FEW else middle, middle, MAD_TO_SIGMA * deviation)


class _PhaseHistory:
    def __init__(self) -> None:
        self.recent: deque[int] = deque(maxlen=WINDOW)
        self.seen = 0
        self.next_update = EARLIEST
        self.limit = _NEVER  # a cheap bound, updated at intervals; transients above it are judged exactly
        self.steady_found = False


class _Rank:
    def __init__(self) -> None:
        self.capacity = 0
        self.cpu = False
        self.floor = 64 * MIB
        self.zero_stage: int | None = None
        self.phases: dict[str, _PhaseHistory] = {}
        self.run_peak = 0
        self.steps = 0
        self.open: dict[str, int] = {}  # by phase with an active alert: the step of the last spike


class SpikeDetector:
    """Finds spikes in steps (rules: this module's docstring). Pure: all times are passed in."""

    def __init__(self, causes: KnownCauses, asks: DiagnosticRequests) -> None:
        self._causes = causes
        self._asks = asks
        self._ranks = defaultdict[int, _Rank](_Rank)
        self._latest_findings: dict[Condition, Finding] = {}
        self._apart: dict[str, set[int]] = {}
        self._recorded: list[Cause] = []

    def hello(self, hello: Hello) -> None:
        """Record a rank's device; the floors are shares of its memory."""
        rank = self._ranks[hello.rank]
        rank.capacity = hello.device.capacity_bytes
        rank.cpu = hello.memory_measure != "cuda"
        rank.zero_stage = hello.zero_stage
        low, share = CPU_FLOORS if rank.cpu else FLOORS
        rank.floor = int(min(256 * MIB, max(low, share * rank.capacity))) if rank.capacity else 64 * MIB

    def step(self, t: float, step: Step) -> list[Finding]:
        rank = self._ranks[step.rank]
        rank.steps += 1
        suspects: list[tuple[PhaseRecord, int, _PhaseHistory]] = []
        steady: list[tuple[PhaseRecord, _PhaseHistory]] = []
        top = 0
        histories = rank.phases
        for record in step.phases:
            span = record.resident
            if span is None:
                span = record.allocated
            peak, start, end = span.peak, span.start, span.end
            transient = peak - (start if start > end else end)
            if peak > top:
                top = peak
            history = histories.get(record.name)
            if history is None:
                history = histories[record.name] = _PhaseHistory()
            if rank.steps == 1 or record.coarse:
                continue
            if transient > history.limit:
                suspects.append((record, transient, history))
            history.recent.append(transient)
            history.seen += 1
            if history.seen >= history.next_update:
                self._update_limit(rank, record.name, history)
                steady.append((record, history))
        findings: list[Finding] = []
        for record, transient, history in suspects:
            findings += self._spike(t, step, rank, record, transient, history, top)
        for record, history in steady:
            findings += self._steady(step, rank, record, history, top)
        if rank.open:
            findings += self._calm(step, rank)
        if top > rank.run_peak:
            rank.run_peak = top
        self._causes.note(step)
        return findings

    def allocator(self, events: AllocatorEvents) -> list[Finding]:
        """Add the largest allocations of a spike's step, if the allocator's trace has them."""
        findings: list[Finding] = []
        for phase in events.phases:
            condition = Condition("spike", events.rank, phase.name)
            known = self._latest_findings.get(condition)
            if known is not None and known.step == events.step and phase.largest:
                facts = msgspec.structs.replace(known.facts, largest_bytes=phase.largest[:8])
                findings.append(self._more(condition, known, facts))
        return findings

    def cause(self, cause: Cause) -> list[Finding]:
        """Process a cause from a rank's stacks; return the findings that it explains."""
        findings: list[Finding] = []
        for condition in conditions_of(cause):
            known = self._latest_findings.get(condition)
            if known is not None and (cause.rank in known.ranks or not known.ranks):
                self._causes.by_stacks(condition, cause, known.facts.transient_bytes)
                facts = msgspec.structs.replace(known.facts, causes=self._causes.of(condition))
                findings.append(self._more(condition, known, facts))
        return findings

    def restore_cause(self, cause: Cause) -> None:
        """Restore a cause from the recording, for use once its alert is restored too."""
        self._recorded.append(cause)

    def observe(self, step: Step) -> None:
        """Restore a step from the recording, for the run's peak and the rank's number of steps."""
        rank = self._ranks[step.rank]
        rank.steps += 1
        rank.run_peak = max([rank.run_peak, *(record.peak_span.peak for record in step.phases)])

    def restore(self, finding: Finding) -> None:
        """Restore a finding from the recording, so that it is continued and not raised twice."""
        if finding.facts is not None:
            self._keep(finding)
        if finding.kind == "steady_transient":
            for number in finding.ranks:
                self._ranks[number].phases.setdefault(finding.phase, _PhaseHistory()).steady_found = True
        elif finding.rank is not None:
            self._apart.setdefault(finding.phase, set()).add(finding.rank)
            if finding.state != "resolved":
                self._ranks[finding.rank].open[finding.phase] = finding.step or 0

    def _update_limit(self, rank: _Rank, name: str, history: _PhaseHistory) -> None:
        seen = history.seen
        history.next_update = seen + (1 if seen < STEADY_STEPS else 3 if seen < 8 else 16 if seen < WINDOW else WINDOW)
        history.limit = _limit(usual_of(history.recent), name, rank.floor)

    def _spike(
        self, t: float, step: Step, rank: _Rank, record: PhaseRecord, transient: int, history: _PhaseHistory, top: int
    ) -> list[Finding]:
        # The step itself is already in the window: it hardly changes the median of 32 values, but the maximum.
        usual = usual_of(list(history.recent)[:-1])
        limit = _limit(usual, record.name, rank.floor)
        if transient <= limit or (record.name != "optimizer" and history.seen <= FEW):
            return []
        name, number = record.name, step.rank
        apart = self._apart.setdefault(name, set())
        own = number in apart or len(apart) < RANKS_APART
        if own:
            apart.add(number)
            rank.open[name] = step.step
        condition = Condition("spike", number if own else None, name)
        before = self._latest_findings.get(condition)
        steps: list[int] = [*(before.facts.steps if before is not None else []), step.step][-10:]
        share = transient / rank.capacity if rank.capacity else 0.0
        sets_run = record.peak_span.peak > rank.run_peak
        severity: Severity = "warning" if name == "optimizer" or (sets_run and share >= SEVERE_SHARE) else "info"
        self._causes.by_numbers(condition, step, name, transient, usual.typical)
        self._use_recorded()
        if own and not self._causes.has_stacks(condition):
            self._asks.spike(t, number, name, steps)
        facts = SpikeFacts(
            transient_bytes=transient,
            usual_bytes=usual.typical,
            limit_bytes=limit,
            peak_bytes=record.peak_span.peak,
            capacity_bytes=rank.capacity,
            share_of_capacity=round(share, 5),
            phase_ms=_milliseconds(record),
            sets_step_peak=record.peak_span.peak >= top,
            sets_run_peak=sets_run,
            measure="resident" if record.resident is not None else "allocated",
            steps=steps,
            repeats=len(steps) > 1,
            batch_shape=step.batch_shape,
            allocations=record.allocations or 0,
            allocated_bytes=record.allocated_bytes if record.allocations else 0,
            latest_rank=-1 if own else number,
            causes=self._causes.of(condition),
        )
        ranks = (number,) if own else tuple(sorted({*(before.ranks if before is not None else ()), number}))
        found = Finding("spike", facts, "raised", severity, ranks, "", step.step, condition.rank, name)
        return [self._keep(found)]

    def _steady(self, step: Step, rank: _Rank, record: PhaseRecord, history: _PhaseHistory, top: int) -> list[Finding]:
        if history.steady_found or history.seen < STEADY_STEPS or not rank.capacity:
            return []
        name, typical = record.name, usual_of(history.recent).middle
        share = typical / rank.capacity
        sets_step = record.peak_span.peak >= top
        if name == "optimizer":
            large = typical >= STEADY_BYTES and share >= (STEADY_SHARE_CPU if rank.cpu else STEADY_SHARE)
        else:
            large = share >= STEADY_SHARE_OTHERS and sets_step
        if not large:
            return []
        history.steady_found = True
        condition = Condition("steady_transient", None, name)
        known = self._latest_findings.get(condition)
        self._use_recorded()
        self._asks.steady(step.rank, name)
        size = max(typical, known.facts.transient_bytes if known is not None else 0)
        facts = SteadyFacts(
            transient_bytes=size,
            capacity_bytes=rank.capacity,
            share_of_capacity=round(size / rank.capacity, 5),
            phase_ms=_milliseconds(record),
            peak_bytes=record.peak_span.peak,
            sets_step_peak=sets_step,
            measure="resident" if record.resident is not None else "allocated",
            first_steps=history.seen,
            zero_stage=rank.zero_stage,
            causes=self._causes.of(condition),
        )
        severity: Severity = "warning" if name == "optimizer" and share >= SEVERE_SHARE else "info"
        ranks = tuple(sorted({*(known.ranks if known is not None else ()), step.rank}))
        found = Finding("steady_transient", facts, "raised", severity, ranks, step=step.step, phase=name)
        return [self._keep(found)]

    def _calm(self, step: Step, rank: _Rank) -> list[Finding]:
        over = [name for name, last in rank.open.items() if step.step - last >= CALM_STEPS]
        for name in over:
            del rank.open[name]
        return [resolved(Condition("spike", step.rank, name), Resolution("calm", CALM_STEPS)) for name in over]

    def _use_recorded(self) -> None:
        while self._recorded:
            cause = self._recorded.pop(0)
            for condition in conditions_of(cause):
                known = self._latest_findings.get(condition)
                if known is not None:
                    self._causes.by_stacks(condition, cause, known.facts.transient_bytes)

    def _keep(self, finding: Finding) -> Finding:
        self._latest_findings[finding.condition] = finding
        return finding

    def _more(self, condition: Condition, known: Finding, facts: SpikeFacts | SteadyFacts) -> Finding:
        """Replace the facts of a raised finding; return the finding that explains it."""
        self._latest_findings[condition] = msgspec.structs.replace(known, facts=facts)
        return msgspec.structs.replace(known, facts=facts, state="explained")


def _milliseconds(record: PhaseRecord) -> float:
    return round((record.device_us if record.device_us is not None else record.host_us) * 1e-3, 3)


def _limit(usual: Usual, phase: str, floor: int) -> int:
    factor, share = OPTIMIZER if phase == "optimizer" else OTHER_PHASES
    return int(usual.typical + max(factor * usual.spread, share * usual.typical, floor))


class GrowthDetector:
    """Finds the growth of the first optimizer steps: memory that they allocate and keep, reported as information.

    Rule: in the first three optimizer steps of a rank that the loss scaler did not skip, the phase's ``end - start`` is
    at least 16 MiB. One alert for all ranks, once a run; its size is the largest rank's.

    Gradients do not count: memory left by a forward and backward inside the update (its closure) is subtracted. Once
    the step's composition is received, the size is that of the optimizer's states, so that gradients freed by the
    update do not reduce it.
    """

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._grown: dict[int, tuple[int, int]] = {}
        """By rank: the step with growth and its size, until its composition is received."""
        self._capacity = 0
        self._sizes: dict[str, int] = {}
        self._found: set[int] = set()

    def hello(self, hello: Hello) -> None:
        """Record the device's size, for the growth's share of it."""
        self._capacity = hello.device.capacity_bytes

    def step(self, step: Step) -> list[Finding]:
        """Check one step; after the first few this costs nothing."""
        left = self._left.get(step.rank, FIRST_STEPS)
        if left == 0 or step.overflow:
            return []
        self._left[step.rank] = left - 1
        record = step.phase("optimizer")
        if record is None:
            return []
        grown = _own_growth(step, record)
        if grown < GROWTH_FLOOR:
            return []
        self._left[step.rank] = 0
        self._grown[step.rank] = (step.step, grown)
        return [self._finding(step.rank, step.step, grown, grown)]

    def composition(self, found: Composition) -> list[Finding]:
        """Process a step's composition, whose optimizer states are the growth of the first step."""
        number, grown = self._grown.get(found.rank, (-1, 0))
        states = found.known.get("optimizer_states", 0)
        if found.step != number or states < GROWTH_FLOOR:
            return []
        del self._grown[found.rank]
        return [self._finding(found.rank, number, states, grown)]

    def observe(self, step: Step) -> None:
        """Restore a step from the recording: this rank's first steps are over."""
        self._left[step.rank] = 0

    def restore(self, finding: Finding) -> None:
        """Restore the finding from the recording, so that further ranks are added to it."""
        self._found.update(finding.ranks)
        if finding.facts is not None:
            self._sizes = dict(finding.facts.bytes_by_rank)

    def _finding(self, rank: int, step: int, size: int, net: int) -> Finding:
        self._found.add(rank)
        if len(self._sizes) < RANKS_LISTED or str(rank) in self._sizes:
            self._sizes[str(rank)] = size
        freed = size - net if size - net >= GROWTH_FLOOR else 0
        facts = GrowthFacts(max(self._sizes.values()), net, self._capacity, dict(self._sizes), freed)
        ranks = tuple(sorted(self._found))
        return Finding("state_growth", facts, severity="info", ranks=ranks, step=step, phase="optimizer")


def _own_growth(step: Step, record: PhaseRecord) -> int:
    """Return the update's own growth, without that of phases inside it (a closure's)."""
    grown = record.allocated.growth
    if record.count > 1:
        inside = [phase for phase in step.phases if phase.name in _NESTED and phase.start_us >= record.start_us]
        if inside:
            first, last = inside[0], inside[-1]
            grown -= max(0, last.allocated.end - first.allocated.start)
    return grown
