"""Spikes: memory that a phase took and gave back, large against its own recent steps, or large in every step.

A phase's transient is ``peak - max(start, end)`` of the figure with a true high-water mark (allocated on a GPU,
resident set on the CPU). Two rules:

**recent** (one alert for each rank and phase). The transient exceeds what this phase of this rank usually takes::

    transient > usual + max(k x 1.4826 x MAD, share x usual, floor)

over the last 32 steps: ``usual`` is their median (their maximum while there are fewer than 8; the first step does not
count). ``k`` = 6, ``share`` = 0.25 and at least 2 steps for the optimizer; 8, 1.0 and at least 8 steps for other
phases, whose activations follow the batch's length. ``floor`` is 0.1 % of the device on a GPU, within 32 to 256 MiB,
and 0.2 % on the CPU, within 48 to 256 MiB: the resident set jumps by glibc's trimming and by file pages, which is no
news. A repeat counts the alert up; after 20 calm steps it is resolved. It is a warning in the optimizer, or when it
makes the run's peak and takes 5 % of the device, else information.

**steady** (one alert for all ranks and a phase). A transient that is there in every step: the median of 5 steps or more
is at least 0.5 % of the device and 256 MiB (optimizer, GPU), 2 % and 256 MiB (optimizer, CPU), or 10 % for another
phase that makes the step's peak. It is a warning from 5 % on (optimizer), else information.

Either asks a rank for the stacks of that phase (``asks``), and tells the cause once it is known (``explained``).
"""

from collections import deque
from typing import Any

from ....protocol.control import Alert, Severity
from ....protocol.telemetry import AllocatorEvents, Hello, PhaseRecord, Step
from ....protocol.text import duration, gib
from .asks import Asks
from .book import AlertBook, Key
from .explained import Explained
from .history import FEW, Usual, usual_of

MIB = 2**20
WINDOW = 32
EARLIEST = 2
CALM_STEPS = 20
STEADY_STEPS = 5
RANKS_APART = 8
"""So many ranks get a spike alert of their own for a phase; further ones share one."""
SEVERE_SHARE = 0.05

_NEVER = 1 << 62


class _PhaseHistory:
    __slots__ = ("limit", "next_look", "recent", "seen", "steady_told")

    def __init__(self) -> None:
        self.recent: deque[int] = deque(maxlen=WINDOW)
        self.seen = 0
        self.next_look = EARLIEST
        self.limit = _NEVER
        """A cheap bound, looked at anew now and then; what exceeds it is judged exactly."""
        self.steady_told = False


class _Rank:
    __slots__ = ("capacity", "cpu", "floor", "open", "phases", "run_peak", "steps", "zero_stage")

    def __init__(self) -> None:
        self.capacity = 0
        self.cpu = False
        self.floor = 64 * MIB
        self.zero_stage: int | None = None
        self.phases: dict[str, _PhaseHistory] = {}
        self.run_peak = 0
        self.steps = 0
        self.open: dict[str, int] = {}
        """Phases with a standing alert: the step of the last spike."""


class SpikeDetector:
    """Finds spikes in steps (rules: this module's docstring). Pure: all times are passed in."""

    def __init__(self, book: AlertBook, explained: Explained, asks: Asks) -> None:
        self._book = book
        self._explained = explained
        self._asks = asks
        self._ranks: dict[int, _Rank] = {}
        self._steady_ranks: dict[str, list[int]] = {}
        self._apart: dict[str, set[int]] = {}

    def hello(self, hello: Hello) -> None:
        """Learn a rank's device, which the floors are shares of."""
        rank = self._rank(hello.rank)
        rank.capacity = hello.device.capacity_bytes
        rank.cpu = hello.memory_measure != "cuda"
        rank.zero_stage = hello.zero_stage
        low, share = (48 * MIB, 0.002) if rank.cpu else (32 * MIB, 0.001)
        rank.floor = int(min(256 * MIB, max(low, share * rank.capacity))) if rank.capacity else 64 * MIB

    def step(self, t: float, step: Step) -> list[Alert]:
        """Look at one step's phases; return the alerts to send."""
        rank = self._ranks.get(step.rank)
        if rank is None:
            rank = self._rank(step.rank)
        rank.steps += 1
        suspects: list[tuple[PhaseRecord, int, _PhaseHistory]] | None = None
        steady: list[tuple[str, _PhaseHistory]] | None = None
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
            if rank.steps == 1:
                continue
            if transient > history.limit:
                suspects = [*(suspects or ()), (record, transient, history)]
            history.recent.append(transient)
            history.seen += 1
            if history.seen >= history.next_look:
                self._look(rank, record.name, history)
                steady = [*(steady or ()), (record.name, history)]
        alerts: list[Alert] = []
        if suspects is not None:
            for record, transient, history in suspects:
                alerts += self._spike(t, step, rank, record, transient, history, top)
        if steady is not None:
            for name, history in steady:
                alerts += self._steady(t, step, rank, name, history, top)
        if rank.open:
            alerts += self._calm(t, step, rank)
        if top > rank.run_peak:
            rank.run_peak = top
        self._explained.note(step)
        return alerts

    def allocator(self, t: float, events: AllocatorEvents) -> list[Alert]:
        """Add the largest allocations of a spike's own step to its evidence, where the allocator's trace has them."""
        alerts: list[Alert] = []
        for phase in events.phases:
            alert = self._book.get(("spike", events.rank, phase.name, "recent"))
            if alert is None or alert.step != events.step or not phase.largest:
                continue
            listed = ", ".join(gib(size) for size in phase.largest[:3])
            text = f"Its largest single allocations: {listed}."
            alerts += self._book.annotate(t, _key(events.rank, phase.name), {"largest_bytes": phase.largest[:8]}, text)
        return alerts

    def observe(self, step: Step) -> None:
        """Take in a step of the recording: it counts for the run's peak, and the rank is past its first step."""
        rank = self._rank(step.rank)
        rank.steps += 1
        rank.run_peak = max([rank.run_peak, *(record.peak_span.peak for record in step.phases)])

    def restore(self, alert: Alert) -> None:
        """Take in a spike alert of the recording, so that it goes on instead of being told twice."""
        rule = alert.evidence.get("rule")
        if rule == "steady":
            self._steady_ranks[alert.phase] = list(alert.ranks)
            for number in alert.ranks:
                self._rank(number).phases.setdefault(alert.phase, _PhaseHistory()).steady_told = True
        elif rule == "recent" and alert.rank is not None:
            self._apart.setdefault(alert.phase, set()).add(alert.rank)
            if alert.resolved is None:
                self._rank(alert.rank).open[alert.phase] = alert.step or 0

    def _rank(self, number: int) -> _Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank()
        return rank

    def _look(self, rank: _Rank, name: str, history: _PhaseHistory) -> None:
        seen = history.seen
        history.next_look = seen + (1 if seen < STEADY_STEPS else 3 if seen < 8 else 16 if seen < WINDOW else WINDOW)
        history.limit = _limit(usual_of(history.recent), name, rank.floor)

    def _spike(
        self, t: float, step: Step, rank: _Rank, record: PhaseRecord, transient: int, history: _PhaseHistory, top: int
    ) -> list[Alert]:
        # The step itself is in the window by now; one value in 32 does not move a median, but a maximum it would.
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
        seconds = (record.device_us if record.device_us is not None else record.host_us) * 1e-6
        sets_step, sets_run = record.peak_span.peak >= top, record.peak_span.peak > rank.run_peak
        key = _key(number if own else None, name)
        before = self._book.get(key)
        steps: list[int] = [*(before.evidence.get("steps", []) if before is not None else []), step.step][-10:]
        share = transient / rank.capacity if rank.capacity else 0.0
        severity: Severity = "warning" if name == "optimizer" or (sets_run and share >= SEVERE_SHARE) else "info"
        who = f"rank {number}" if own else "further ranks, such as"
        evidence: dict[str, Any] = {
            "transient_bytes": transient,
            "usual_bytes": usual.typical,
            "limit_bytes": limit,
            "peak_bytes": record.peak_span.peak,
            "capacity_bytes": rank.capacity,
            "share_of_capacity": round(share, 5),
            "phase_ms": round(seconds * 1e3, 3),
            "sets_step_peak": sets_step,
            "sets_run_peak": sets_run,
            "measure": "resident" if record.resident is not None else "allocated",
            "steps": steps,
            "repeats": len(steps) > 1,
            "batch_shape": step.batch_shape,
        }
        if record.allocations:
            evidence |= {"allocations": record.allocations, "allocated_bytes": record.allocated_bytes}
        self._explained.by_numbers(key, step, name, transient, usual.typical)
        cause, more, ending = self._explained.tail(key, _cause(name, None, rank.cpu))
        if own and not self._explained.settled(key):
            self._asks.spike(t, number, name, steps)
        title = f"{who}{'' if own else f' rank {number},'} {name} +{gib(transient, 1)} for {duration(seconds)}"
        return self._book.raise_alert(
            t,
            "spike",
            severity,
            f"{title}: {ending}" if ending else title,
            rule="recent",
            rank=number if own else None,
            ranks=[number] if own else sorted({*(before.ranks if before is not None else []), number}),
            step=step.step,
            phase=name,
            text=_spike_text(name, transient, usual, share, seconds, step, sets_step, sets_run, len(steps), cause),
            evidence=evidence | more,
        )

    def _steady(self, t: float, step: Step, rank: _Rank, name: str, history: _PhaseHistory, top: int) -> list[Alert]:
        if history.steady_told or history.seen < STEADY_STEPS or not rank.capacity:
            return []
        typical = usual_of(history.recent).middle
        share = typical / rank.capacity
        record = step.phase(name)
        if record is None:
            return []
        sets_step = record.peak_span.peak >= top
        if name == "optimizer":
            large = typical >= 256 * MIB and share >= (0.02 if rank.cpu else 0.005)
        else:
            large = share >= 0.10 and sets_step
        if not large:
            return []
        history.steady_told = True
        ranks = self._steady_ranks.setdefault(name, [])
        if step.rank not in ranks:
            ranks.append(step.rank)
            ranks.sort()
        seconds = (record.device_us if record.device_us is not None else record.host_us) * 1e-6
        key: Key = ("spike", None, name, "steady")
        known = self._book.get(key)
        cause, more, ending = self._explained.tail(key, _cause(name, rank.zero_stage, rank.cpu))
        self._asks.steady(step.rank, name)
        size = max(typical, known.evidence.get("transient_bytes", 0) if known is not None else 0)
        return self._book.raise_alert(
            t,
            "spike",
            "warning" if name == "optimizer" and share >= SEVERE_SHARE else "info",
            f"{name} +{gib(size, 1)} for {duration(seconds)} in every step{f': {ending}' if ending else ''}",
            rule="steady",
            ranks=list(ranks),
            step=step.step,
            phase=name,
            text=(
                f"Every {_phase_words(name)} takes {gib(size)} ({size / rank.capacity:.1%} of the device) more than it "
                f"keeps, for {duration(seconds)}, and gives it back"
                f"{': it makes the peak of the step' if sets_step else ', below the peak of the step'}. {cause}"
            ),
            evidence={
                "transient_bytes": size,
                "capacity_bytes": rank.capacity,
                "share_of_capacity": round(size / rank.capacity, 5),
                "phase_ms": round(seconds * 1e3, 3),
                "peak_bytes": record.peak_span.peak,
                "sets_step_peak": sets_step,
                "measure": "resident" if record.resident is not None else "allocated",
                "first_steps": history.seen,
                "repeats": True,
                **more,
            },
            repeat=False,
        )

    def _calm(self, t: float, step: Step, rank: _Rank) -> list[Alert]:
        over = [name for name, last in rank.open.items() if step.step - last >= CALM_STEPS]
        alerts: list[Alert] = []
        for name in over:
            del rank.open[name]
            alerts += self._book.resolve(t, _key(step.rank, name), f"Not seen again in {CALM_STEPS} steps.")
        return alerts


def _key(rank: int | None, phase: str) -> Key:
    return "spike", rank, phase, "recent"


def _limit(usual: Usual, phase: str, floor: int) -> int:
    factor, share = (6.0, 0.25) if phase == "optimizer" else (8.0, 1.0)
    return int(usual.typical + max(factor * usual.spread, share * usual.typical, floor))


def _spike_text(
    name: str,
    transient: int,
    usual: Usual,
    share: float,
    seconds: float,
    step: Step,
    sets_step: bool,
    sets_run: bool,
    times: int,
    cause: str,
) -> str:
    peak = "the highest peak of the run so far" if sets_run else "the peak of the step" if sets_step else "no peak"
    of_device = f" ({share:.1%} of the device)" if share else ""
    shape = f" Batch shape {step.batch_shape}." if step.batch_shape and name in ("forward", "backward") else ""
    often = f" Seen {times} times or more, last in step {step.step}." if times > 1 else " Not seen before."
    often_size = gib(usual.typical) if usual.typical else "nothing"
    return (
        f"The {_phase_words(name)} of step {step.step} took {gib(transient)}{of_device} more than it kept, within "
        f"{duration(seconds)}; usually it is {often_size}. It set {peak}.{shape}{often} {cause}"
    )


def _phase_words(name: str) -> str:
    return "optimizer step" if name == "optimizer" else f"{name} phase"


def _cause(name: str, zero_stage: int | None, cpu: bool) -> str:
    """Name common causes, where neither the numbers nor stacks have named one yet."""
    common = ""
    if name == "optimizer":
        zero = "the fp32 copy of the gradients that ZeRO makes for the update, or " if zero_stage else ""
        common = f"Common causes: {zero}foreach temporaries of torch.optim (a fused AdamW takes none). "
    elif name in ("forward", "backward"):
        common = "Common causes: a longer batch, logits in fp32, or a gather of parameters. "
    if cpu:
        return f"{common}Cannot tell which here: on the CPU allocations leave no trace."
    return f"{common}The stacks of such a step tell which."
