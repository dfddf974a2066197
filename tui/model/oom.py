"""Out-of-memory errors of a run, console sessions with held ranks, and texts about the code that caused a spike.

If no hub has judged an error (an older recording, or no hub at that time), the same rules are applied here to the
rank's figures.
"""

import codeop
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

from ...protocol.analysis.oom.detector import OomContext
from ...protocol.analysis.oom.words import explain
from ...protocol.analysis.remedies import remedies
from ...protocol.code_owner import library_of
from ...protocol.messages.control import Accepted, Alert, Result, Verb
from ...protocol.messages.memory import Cause, OomReport, OomVerdict, RankMoment, Remedy
from ...protocol.messages.telemetry import Oom, StackGroup
from ...protocol.text import duration, gib, sanitize

CaseKey = tuple[int, float]  # Rank, and time by that rank's clock: identifies an error
MOST_CASES = 64  # maximum number of errors kept, the oldest are dropped first: a script may catch errors for hours


@dataclass(frozen=True)
class OomCase:
    """One error, with its report once received."""

    oom: Oom
    report: OomReport | None = None

    @property
    def key(self) -> CaseKey:
        return self.oom.rank, self.oom.time

    @cached_property
    def verdict(self) -> OomVerdict:
        """Why the allocation failed."""
        return self.report.verdict if self.report is not None else explain(self.oom, OomContext())

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What to try, in this order."""
        return self.report.remedies if self.report is not None else remedies(self.oom, self.verdict, OomContext())

    @property
    def ranks(self) -> list[RankMoment]:
        """All ranks at that moment; empty if not recorded."""
        return self.report.ranks if self.report is not None else []


class OomCases:
    """The errors of a run, oldest first."""

    def __init__(self) -> None:
        self._cases: dict[CaseKey, OomCase] = {}

    def __len__(self) -> int:
        return len(self._cases)

    def __iter__(self) -> Iterator[OomCase]:
        return iter(self._cases.values())

    def put(self, oom: Oom) -> None:
        """Add an error; a known error is not changed."""
        if (oom.rank, oom.time) not in self._cases:
            self._add(OomCase(oom))

    def report(self, report: OomReport) -> None:
        """Add the hub's report on an error, or an update of it."""
        self._add(OomCase(report.oom, report))

    def _add(self, case: OomCase) -> None:
        self._cases[case.key] = case
        while len(self._cases) > MOST_CASES:
            del self._cases[next(iter(self._cases))]

    def get(self, key: CaseKey | None) -> OomCase | None:
        return self._cases.get(key) if key is not None else None

    def of_rank(self, rank: int) -> OomCase | None:
        """Find the latest error of a rank."""
        return max((case for case in self if case.oom.rank == rank), key=lambda case: case.oom.time, default=None)

    def ordered(self) -> list[OomCase]:
        """List the errors by time, then by rank."""
        return sorted(self, key=lambda case: (case.oom.time, case.oom.rank))


def numbers(oom: Oom) -> list[tuple[str, int, str]]:
    """List the figures at that moment: name, bytes, and a remark."""
    host = oom.measure != "cuda"
    where = "host" if host else "device"
    total = oom.capacity_bytes or oom.device_total_bytes
    before = f"of the {oom.steps_done:,} steps before" if oom.steps_done else "before"
    rows = (
        (True, "asked for", oom.requested_bytes, ""),
        (True, f"free on the {where}", oom.device_free_bytes, f"of {gib(total)}" if total else ""),
        (oom.limit, "left by the limit", oom.room_bytes, oom.limit),
        (True, "allocated", oom.allocated_bytes, ""),
        (True, "held by malloc" if host else "reserved", oom.reserved_bytes, ""),
        (oom.free_blocks, "reserved but free", oom.reserved_free_bytes, f"in {oom.free_blocks:,} blocks"),
        (oom.free_blocks, "of it for this request", oom.usable_free_bytes, "its pool and stream"),
        (oom.free_blocks, "largest block of that", oom.largest_free_bytes, ""),
        (oom.peak_bytes, "highest peak", oom.peak_bytes, before),
    )
    return [(name, size, remark) for known, name, size, remark in rows if known]


MOST_LINES = 5000  # maximum number of output lines kept; the oldest are dropped first
Kind = Literal["in", "out", "error", "note"]


@dataclass(slots=True)
class CommandRecord:
    """A sent command and its two answers, once received."""

    id: str
    verb: Verb
    sent: float = 0.0
    accepted: Accepted | None = None
    result: Result | None = None

    @property
    def done(self) -> bool:
        """Whether it is complete: it was refused, or its result was received."""
        return self.result is not None or (self.accepted is not None and not self.accepted.ok)


@dataclass(frozen=True, slots=True)
class ConsoleLine:
    """One line of the session, safe for a terminal."""

    kind: Kind
    text: str


class ConsoleSession:
    """The session with one rank. A rank's output is untrusted and is sanitized here, line by line."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lines: list[ConsoleLine] = []
        self.place = ""  # the frame the console is in, by the rank's last answer
        self.history: list[str] = []
        self._waiting: dict[str, float] = {}  # commands without a result, and when they were sent
        self._from_history: int | None = None
        self._draft = ""

    @property
    def waiting_since(self) -> float:
        """When the code was sent whose result is pending; 0 if none is."""
        return min(self._waiting.values(), default=0.0)

    def sent(self, number: str, code: str, now: float) -> None:
        """Record that code was sent as a command."""
        self.history = [one for one in self.history if one != code] + [code]
        self._from_history = None
        for index, line in enumerate(code.splitlines()):
            self._add("in", ("... " if index else ">>> ") + line)
        self._waiting[number] = now

    def note(self, text: str, kind: Kind = "note") -> None:
        for line in text.splitlines():
            self._add(kind, line)

    def receive(self, commands: Mapping[str, CommandRecord]) -> None:
        for number in list(self._waiting):
            record = commands.get(number)
            if record is None:
                continue
            if record.result is not None:
                del self._waiting[number]
                self._show(record.result)
            elif record.accepted is not None and not record.accepted.ok:
                del self._waiting[number]
                self.note(f"refused: {record.accepted.text}", "error")

    def _show(self, result: Result) -> None:
        output, failed = (result.data.get(name) for name in ("output", "error"))
        output, failed = (value if isinstance(value, str) else "" for value in (output, failed))
        self.note(output, "out")
        # A traceback in the output ends with the error already.
        if failed and failed not in output:
            self.note(failed, "error")
        if not result.ok:
            self.note(result.text or "failed", "error")
        elif not output and not failed:
            self.note("(no output)")
        place = result.data.get("place")
        if isinstance(place, str):
            self.place = sanitize(place, 300)

    def _add(self, kind: Kind, text: str) -> None:
        self.lines.append(ConsoleLine(kind, sanitize(text)))
        del self.lines[:-MOST_LINES]

    def recall(self, direction: int, now: str) -> str:
        """Return the previous (-1) or next (1) entry of the input history; the current input follows the newest."""
        if not self.history:
            return now
        if self._from_history is None:
            if direction > 0:
                return now
            self._draft, self._from_history = now, len(self.history)
        self._from_history = max(0, self._from_history + direction)
        if self._from_history >= len(self.history):
            self._from_history = None
            return self._draft
        return self.history[self._from_history]


def is_complete(code: str) -> bool:
    """Return whether Python would run this now, outside brackets and blocks; code with errors counts as complete.

    The code is compiled here and never run; the rank compiles it again.
    """
    try:
        return codeop.compile_command(code, "<console>", "single") is not None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return True


_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<name>.*)")


@dataclass(frozen=True, slots=True)
class SpikeVerdict:
    """The hub's verdict on a spike."""

    pattern: str = ""  # such as `foreach temporaries`; empty if unknown
    where: str = ""
    remedy: str = ""
    saves_bytes: int = 0


def split_frame(frame: str) -> tuple[str, str, str]:
    """Return file, line and function of ``file:line function``; text of another form counts as the function."""
    text = sanitize(frame, 1000)
    found = _FRAME.fullmatch(text)
    return (found["file"], found["line"], found["name"]) if found is not None else ("", "", text[:400])


def frame_parts(frame: str) -> tuple[str, str]:
    """Split ``file:line function`` into ``function  file:line`` and its package (empty: user code)."""
    filename, line, name = split_frame(frame)
    if not filename:
        return name, ""
    short = filename.replace("\\", "/").rpartition("/")[2]
    return f"{name}  {short}:{line}", library_of(filename)


def innermost(group: StackGroup) -> str:
    """Return the innermost function of a group's stack; empty without a stack."""
    return split_frame(group.frames[-1])[2] if group.frames else ""


def group_parts(group: StackGroup) -> tuple[str, str]:
    """Return where a group was allocated: the innermost call, and the innermost in user code (empty: the same)."""
    frames = [frame_parts(frame) for frame in group.frames]
    if not frames:
        return "allocated by native code", ""
    own = next((words for words, library in reversed(frames) if not library), "")
    return frames[-1][0], "" if own == frames[-1][0] else own


def shown_bytes(cause: Cause, group: StackGroup) -> int:
    """Return the bytes of a group that count as explained: the transient part, or for leaks and growth all of it."""
    passing = group.bytes - group.kept_bytes
    return group.bytes if cause.reason == "leak" or passing <= 0 else passing


def evidence_words(cause: Cause) -> str:
    """Return text about the share that has stacks, and the cost of recording them."""
    parts: list[str] = []
    if cause.transient_bytes > 0:
        share = min(1.0, max(0.0, cause.attributed_bytes / cause.transient_bytes))
        parts.append(f"{share * 100:.0f} % of it has stacks")
    if cause.armed_us:
        took = f"with stacks recorded the phase took {duration(cause.armed_us * 1e-6)}"
        parts.append(f"{took}, usually {duration(cause.usual_us * 1e-6)}" if cause.usual_us else took)
    return "; ".join(parts) or "no stacks were recorded"


CAUSE_EVIDENCE = ("stacks", "remedy", "saves_bytes", "armed_us", "usual_us", "read_us")
"""Keys of an alert's evidence that are shown as its cause, in addition to those starting with ``cause_``."""


def other_evidence(alert: Alert) -> dict[str, Any]:
    """Return the evidence of an alert that is not shown as its cause."""
    return {
        key: value
        for key, value in alert.evidence.items()
        if key not in CAUSE_EVIDENCE and not key.startswith("cause_")
    }


def cause_of_alert(alert: Alert, causes: Mapping[int, Mapping[str, Cause]]) -> Cause | None:
    """Return the cause of an alert's stacks among the last causes by rank and phase."""
    if alert.kind not in ("spike", "leak"):
        return None
    cause_rank = alert.evidence.get("cause_rank")
    ranks = [cause_rank] if isinstance(cause_rank, int) else [alert.rank] if alert.rank is not None else alert.ranks
    found = [causes[rank][alert.phase] for rank in ranks if alert.phase in causes.get(rank, {})]
    return max(found, key=lambda cause: cause.transient_bytes, default=None)


def spike_alert(alerts: Iterable[Alert], rank: int, phase: str) -> Alert | None:
    """Return the alert about a rank's spikes in a phase: preferably one with a verdict, then the newest."""
    found = [
        alert
        for alert in alerts
        if alert.kind in ("spike", "leak")
        and alert.phase == phase
        and (alert.rank == rank or rank in alert.ranks or (alert.rank is None and not alert.ranks))
    ]
    return max(found, key=lambda alert: (bool(verdict_of(alert)), alert.time), default=None)


def verdict_of(alert: Alert | None) -> SpikeVerdict | None:
    """Return the hub's verdict from an alert's evidence; None if there is none."""
    evidence = alert.evidence if alert is not None else {}
    pattern, remedy = _text(evidence.get("cause_pattern")), _text(evidence.get("remedy"))
    saves = evidence.get("saves_bytes")
    if not pattern and not remedy:
        return None
    size = saves if isinstance(saves, int) else 0
    return SpikeVerdict(pattern.replace("_", " "), _text(evidence.get("cause_where")), remedy, size)


def text_without_remedy(alert: Alert) -> str:
    """Return an alert's text without the remedy, which is shown as what to try."""
    return alert.text.replace(_text(alert.evidence.get("remedy")), "").strip()


def verdict_words(verdict: SpikeVerdict) -> list[str]:
    """Return a verdict's text, with what to try."""
    where = f", in {verdict.where}" if verdict.where else ""
    found = [f"{verdict.pattern}{where}"] if verdict.pattern else []
    if verdict.remedy:
        saves = f", which would save {gib(verdict.saves_bytes)}" if verdict.saves_bytes > 0 else ""
        found.append(f"try: {verdict.remedy}{saves}")
    return found


def evidence_groups(alert: Alert) -> list[StackGroup]:
    """Return the stacks in an alert's evidence; empty if there are none or they are invalid."""
    try:
        return msgspec.convert(alert.evidence.get("stacks") or [], list[StackGroup])
    except msgspec.ValidationError:
        return []


def _text(value: object) -> str:
    return sanitize(value, 400) if isinstance(value, str) else ""
