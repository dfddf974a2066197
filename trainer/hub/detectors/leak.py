"""Leaks: memory that grows step over step at the same point of the step, told from noise by a stated test.

**What is measured**: bytes allocated (never reserved) when a step's forward begins, or at the step's end where no
forward is known; on the CPU the resident set there. The first ``FIRST`` steps of a rank count for nothing, nor do steps
with an evaluation or a checkpoint.

**The test**, on three windows: 64, 256 and 1,024 steps, each as 16 blocks of which the lowest counts (``levels``). A
window shows a leak when, twice in a row,

- Mann-Kendall's S is at least 96 of 120: without a trend that has a probability of 6e-7 a test;
- no single rise makes more than 0.3 of the whole, and the median rises by at least 0.1 of it from each quarter of the
  window to the next: a level that changed once or twice is no leak;
- the rise is at least 16 MiB and 0.02 % of the device; on the CPU 64 MiB and 0.5 % of the host's memory (512 MiB are
  always enough), with glibc's own count of what is in use rising by half of it or more: the resident set alone also
  grows by fragmentation;
- half of the rise or more lies above all that was before the window: what wanders, or comes down again (garbage that is
  collected now and then), does not get there; it is told at most while its first rise is longer than a window;
- the batches do not grow with it: S of their sizes is below 56, else what is kept of them cannot be told from a leak.

Values that hang together over some ten steps make a false alarm likelier than that: 2 in 2,500 runs of 2,500 steps,
measured with noise that has 0.9 of its last value in the next.

**The rate** is the median of all pairs' slopes (Theil-Sen). The device is full when the highest peak of the last step,
growing at that rate, meets its capacity. One alert for all ranks; a warning, or information when the run's plan ends
before. A leak has stopped when, twice in a row, the last eight blocks grow at less than a fifth of the rate.
"""

from typing import Any

from ....protocol.control import Alert
from ....protocol.memory import Cause
from ....protocol.telemetry import STEP_PHASES, Hello, Plan, Step
from ....protocol.text import gib
from .asks import Asks
from .book import RANKS_LISTED, AlertBook, Key
from .explained import arming_words, stack_evidence
from .levels import SIZES, Levels, Series
from .patterns import place_of

MIB = 2**20
FIRST = 5
MOST_FLOOR = 512 * MIB
KEY: Key = ("leak", None, "", "trend")
ORDINARY = len(STEP_PHASES)
_RETOLD_BLOCKS = 8
_NONE: list[Alert] = []


class _Open:
    """A leak that was told of one rank."""

    __slots__ = ("blocks", "rate", "series", "slow")

    def __init__(self, series: Series, rate: float) -> None:
        self.series = series
        self.rate = rate
        self.blocks = 0
        self.slow = 0
        """How many times in a row it was found to have stopped."""


class _Rank:
    __slots__ = (
        "batch",
        "capacity",
        "cpu",
        "floor",
        "host",
        "levels",
        "name",
        "open",
        "phases",
        "place",
        "seen",
    )

    def __init__(self) -> None:
        self.seen = 0
        self.levels = Levels()
        self.batch = 0
        self.capacity = 0
        self.cpu = False
        self.host = ""
        self.phases = self.place = 0
        """How many phases its steps have, and which of them is looked at."""
        self.name = ""
        self.floor = 64 * MIB
        self.open: _Open | None = None


class LeakDetector:
    """Finds leaks (rules: this module's docstring). Pure: all times are passed in."""

    def __init__(self, book: AlertBook, asks: Asks) -> None:
        self._book = book
        self._asks = asks
        self._ranks: dict[int, _Rank] = {}
        self._total_steps = 0
        self._place = ""
        self._found = ""
        """What the stacks said, in a sentence; empty before they said it."""

    def hello(self, hello: Hello) -> None:
        """Learn a rank's device."""
        rank = self._rank(hello.rank)
        rank.capacity = hello.device.capacity_bytes
        rank.cpu = hello.memory_measure != "cuda"
        rank.host = hello.host
        low, share = (64 * MIB, 0.005) if rank.cpu else (16 * MIB, 0.0002)
        rank.floor = min(MOST_FLOOR, max(low, int(share * rank.capacity)))

    def plan(self, plan: Plan) -> None:
        """Learn when the run means to end."""
        self._total_steps = plan.total_steps

    def step(self, t: float, step: Step) -> list[Alert]:
        """Look at one step."""
        rank = self._ranks.get(step.rank)
        if rank is None:
            rank = self._rank(step.rank)
        rank.seen += 1
        batch = rank.batch
        shape = step.batch_shape
        rank.batch = shape[0] * shape[1] if len(shape) > 1 else 0
        if rank.seen <= FIRST or not step.phases:
            return _NONE
        phases = step.phases
        # Steps of four phases or fewer look alike: where the phase of the one before was is looked first.
        if len(phases) != rank.phases or phases[rank.place].name != rank.name:
            rank.phases = len(phases) if len(phases) <= ORDINARY else 0
            names = [record.name for record in phases]
            if "checkpoint" in names or "eval" in names:
                rank.phases = 0
                return _NONE
            rank.place = names.index("forward") if "forward" in names else len(names) - 1
            rank.name = names[rank.place]
        record = phases[rank.place]
        at_start = rank.name == "forward"
        span = record.allocated
        level, second = (span.start if at_start else span.end), -1
        if record.resident is not None:
            span = record.resident
            level, second = (span.start if at_start else span.end), level
        new = rank.levels.add(level, second, batch)
        return self._look(t, step, rank, new) if new else _NONE

    def cause(self, t: float, cause: Cause) -> list[Alert]:
        """Take in what the stacks of whole steps say of what they left behind."""
        if cause.reason != "leak" or self._book.get(KEY) is None:
            return []
        evidence: dict[str, Any] = {
            "leak_bytes": cause.transient_bytes,
            "cause_step": cause.step,
            "stacks": stack_evidence(cause),
        }
        evidence |= {"armed_us": cause.armed_us, "usual_us": cause.usual_us, "read_us": cause.read_us}
        before, self._found = self._found, _found_words(cause)
        known = self._book.get(KEY)
        title = known.title if known is not None else ""
        if cause.groups and cause.groups[0].frames and not self._place:
            self._place = place_of(cause.groups[0].frames)
            evidence["place"] = self._place
            title = f"{title}: {self._place}"
        return self._book.annotate(t, KEY, evidence, self._found, instead=before, title=title)

    def restore(self, alert: Alert) -> None:
        """Take in a leak of the recording, so that it goes on instead of being told twice."""
        if alert.kind != "leak" or alert.resolved is not None:
            return
        self._place = str(alert.evidence.get("place", ""))
        size = alert.evidence.get("block_steps")
        for number in alert.ranks:
            rank = self._rank(number)
            series = rank.levels.series[SIZES.index(size) if size in SIZES else 0]
            rank.open = _Open(series, float(alert.evidence.get("bytes_per_step", 0)))

    def drop(self, t: float, number: int) -> list[Alert]:
        """A rank has ended: its memory grows no more."""
        rank = self._ranks.get(number)
        return self._close(t, rank, "The rank has ended.") if rank is not None and rank.open is not None else []

    def _rank(self, number: int) -> _Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank()
        return rank

    def _look(self, t: float, step: Step, rank: _Rank, new: int) -> list[Alert]:
        opened = rank.open
        if opened is not None:
            # A wider window knows the rate better, but takes longer to see the end of it.
            if opened.series not in rank.levels.series[:new]:
                return []
            opened.blocks += 1
            opened.slow = 0 if opened.series.goes_on(opened.rate) else opened.slow + 1
            if opened.slow > 1:
                return self._close(t, rank, f"It stopped growing by step {step.step}.")
            if opened.blocks % _RETOLD_BLOCKS or len(opened.series.levels) < 2:
                return []
            opened.rate = opened.series.rate
            return self._tell(t, step, rank, opened)
        for series in rank.levels.series[:new]:
            if series.grows(rank.floor):
                rank.open = _Open(series, series.rate)
                self._asks.leak(step.rank)
                return self._tell(t, step, rank, rank.open)
        return []

    def _close(self, t: float, rank: _Rank, text: str) -> list[Alert]:
        rank.open = None
        for series in rank.levels.series:
            series.sure = 0
        if any(other.open is not None for other in self._ranks.values()):
            return []
        return self._book.resolve(t, KEY, text)

    def _tell(self, t: float, step: Step, rank: _Rank, opened: _Open) -> list[Alert]:
        growing = {number: other.open.rate for number, other in self._ranks.items() if other.open is not None}
        rate = max(opened.rate, 1.0)
        peak = step.peak_phase.peak_span.peak if step.peak_phase is not None else opened.series.levels[-1]
        # The host's memory is shared by the ranks on it, a device is its rank's own.
        sharing = sum(1 for other in self._ranks.values() if other.host == rank.host) if rank.cpu else 1
        left = max(0, rank.capacity - peak * sharing)
        full = step.step + int(left / (rate * sharing)) if rank.capacity else 0
        in_time = bool(full and self._total_steps and full > self._total_steps)
        levels = opened.series.levels
        window = (len(levels) - 1) * opened.series.size
        what = "the resident set" if rank.cpu else "allocated memory"
        holder = "the host's memory" if rank.cpu else "the device"
        end = f"{holder} is full around step {full:,}" if full else "its end cannot be told without a capacity"
        plan = f"; the run ends before, at step {self._total_steps:,}" if in_time else ""
        found = f" {self._found}" if self._found else ""
        title = (
            f"memory grows by {gib(rate, 1)} a step, full around step {full:,}"
            if full
            else f"memory grows {gib(rate)} a step"
        )
        return self._book.raise_alert(
            t,
            "leak",
            "info" if in_time else "warning",
            f"{title}: {self._place}" if self._place else title,
            rule="trend",
            ranks=sorted(growing)[:RANKS_LISTED],
            step=step.step,
            text=(
                f"At the same point of each step {what} of rank {step.rank} is higher: by {gib(rate)} a step, "
                f"{gib(levels[-1] - levels[0])} in the last {window} steps. At this rate {end}{plan}. Usual causes: a "
                "loss or an output that is kept with its graph (keep loss.item() or loss.detach()), a list or a cache "
                f"that grows.{found}"
            ),
            evidence={
                "bytes_per_step": round(rate),
                "full_at_step": full,
                "window_steps": window,
                "block_steps": opened.series.size,
                "rise_bytes": levels[-1] - levels[0],
                "level_bytes": levels[-1],
                "peak_bytes": peak,
                "capacity_bytes": rank.capacity,
                "measure": "resident" if rank.cpu else "allocated",
                "bytes_per_step_by_rank": {str(key): round(growing[key]) for key in sorted(growing)[:RANKS_LISTED]},
                **({"place": self._place} if self._place else {}),
            },
            repeat=False,
        )


def _found_words(cause: Cause) -> str:
    """Say what steps left behind, by stack."""
    if not cause.groups:
        return f"The steps up to {cause.step}, whose stacks were recorded, left nothing behind. {arming_words(cause)}"
    told = [
        f"{gib(group.bytes)} in {group.count} block{'s' if group.count > 1 else ''} of "
        f"{place_of(group.frames) or 'native code'}"
        for group in cause.groups[:3]
    ]
    return (
        f"Of what the steps before step {cause.step} allocated, this was still held a step later: {'; '.join(told)}. "
        f"{arming_words(cause)}"
    )
