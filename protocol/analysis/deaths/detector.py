"""Detects failures and deaths: the first one raises the alert, its consequences are added to the evidence.

- An uncaught exception in the script's main thread raises ``failure`` with its traceback (``oom`` if out of memory).
- An exception that only reports a lost peer ("connection closed by peer", a broken communicator) is held back for 3 s.
  If the peer dies or fails, or the job ends, it becomes part of that alert. If the peer's script had ended without an
  error, the alert is that the peer ended early, also if a launcher's signal then ends the peer's process. If this
  rank's process ended in an earlier poll than another rank that died of a signal sent by launchers, the lost peer is
  the alert, and that death its consequence.
- A process that ended without sending ``Goodbye`` raises ``died``, with its exit code or signal and the last lines of
  its log (including those of the next 3 s). If a library aborted it (SIGABRT), the reason is the line that it wrote,
  and the death is no consequence of a lost peer. After a failure of the same rank, only its exit status is added.
- Within 60 s of the first alert, ranks that end by SIGTERM, SIGINT, SIGKILL or SIGABRT, or by a lost peer, count as
  its consequences: DeepSpeed's and torchrun's launchers end all ranks of a node when one exits with an error.
- A launcher that ended before its ranks raises an alert, and later deaths of its ranks are consequences: ftmon ends
  the processes that a job leaves behind, after its launcher has written ``left.json``.
- A requested death (kill) is information about that rank, and so is the lost peer of the others. The requested end of
  a whole run raises no alert.
- If a job finishes with exit code 0 within 60 s of a death by SIGTERM, or of an exit between steps, the death is
  resolved: the program that had started the rank ended it (a notebook its kernel, Ray its workers).
"""

import signal
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import msgspec

from ...messages.control import RankState
from ...messages.hosts import KernelKill
from ...messages.telemetry import Failure, LogLine
from ..findings.alerts import RANKS_LISTED
from ..findings.finding import Condition, Finding, Resolution, added, resolved
from ..oom.detector import TRACEBACK_LIMIT, OomDetector
from .logs import AbortReader


class HostPressure(msgspec.Struct, frozen=True):
    """Use of a host's memory, or its control group's."""

    age_s: float  # seconds between the measurement and the death
    used_bytes: int
    total_bytes: int
    rank_bytes: int  # memory of the rank itself


class ScriptFailure(msgspec.Struct, frozen=True):
    """An uncaught exception of a script."""

    error: str
    traceback: str
    log: list[str]  # the rank's last lines
    peer_killed: bool = False  # whether the lost peer was ended on request


class EndedEarly(msgspec.Struct, frozen=True):
    """Ranks whose script ended without an error before another rank lost its connection to them."""

    last_steps: dict[int, int]  # the last step of each rank that ended
    lost: int  # the rank that lost the connection
    error: str
    traceback: str
    log: list[str]


class ProcessDeath(msgspec.Struct, frozen=True):
    """A process that ended without sending ``Goodbye``."""

    pid: int
    exit_code: int | None
    signal: int | None
    state: str  # the rank's state
    log: list[str]
    asked: bool = False  # whether its end was requested
    kernel_kill: KernelKill | None = None
    pressure: HostPressure | None = None
    alone: bool = False  # whether the run has no other rank
    reason: str = ""  # the reason in its output for which native code aborted it; empty: none, or another ending
    generating: bool = False  # whether it, or a rank that lost its connection to it, was generating

    @property
    def by_signal(self) -> int | None:
        """The signal that ended it, from either form of exit status."""
        return self.signal or (-self.exit_code if self.exit_code is not None and self.exit_code < 0 else None)


class LauncherEnded(msgspec.Struct, frozen=True):
    """A job's command that ended before its ranks."""

    exit_code: int | None  # negative for a signal; None: it was never started
    left: int  # number of processes that it left running
    processes: list[str]


class Ended(msgspec.Struct, frozen=True):
    """Added later: exit status of the process; both None: unknown."""

    exit_code: int | None
    signal: int | None

    @property
    def is_known(self) -> bool:
        """Return whether the exit status is known."""
        return self.exit_code is not None or self.signal is not None


class LastLog(msgspec.Struct, frozen=True):
    """Added: the rank's last lines, once all have arrived."""

    log: list[str]


class Follower(msgspec.Struct, frozen=True):
    """A rank that failed or ended because another rank did."""

    after_s: float
    events: list[Ended | str]  # its exceptions, then its end


class Followed(msgspec.Struct, frozen=True):
    """Added later: consequences, by rank."""

    followers: dict[int, Follower]


LOG_LINES = 12
HELD_S = 3.0
CONSEQUENCE_S = 60.0

_LOST_PEER = (
    "connection closed by peer",
    "connection was likely closed",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "remote process exited",
    "socket closed",
    "connectionreseterror",
)
_ABORTED = {signal.SIGABRT, -signal.SIGABRT, 128 + signal.SIGABRT}
_FOLLOWING_SIGNALS = {2, 6, 9, 15}
_FOLLOWING_CODES = {128 + number for number in _FOLLOWING_SIGNALS}


def is_lost_peer(error: str) -> bool:
    """Return whether an error only reports that another rank is gone."""
    lowered = error.lower()
    return any(words in lowered for words in _LOST_PEER)


def is_nearer_cause(error: str, known: str) -> bool:
    """Return whether an error that arrives later is nearer to the cause: a lost peer is a consequence."""
    return bool(error) and is_lost_peer(known) and not is_lost_peer(error)


class DeathDetector:
    """Finds failures and deaths of ranks (rules: this module's docstring)."""

    def __init__(self, oom: OomDetector, finished: Callable[[], Mapping[int, int]] = dict[int, int]) -> None:
        self._finished = finished  # ranks whose script ended without an error, with the last step of each
        self._oom = oom
        self._logs: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=LOG_LINES))
        self._held: list[tuple[float, Failure, bool]] = []
        """Time, failure, and whether the end of another rank had been requested."""
        self._held_gone: dict[int, float] = {}
        """Ranks whose failure is held back, with the time at which the end of their process was detected."""
        self._failed: dict[int, Condition] = {}
        self._died: set[int] = set()  # ranks whose death has been reported
        self._first: tuple[float, Condition] | None = None  # time and condition of the first failure or death
        self._followers: dict[int, Follower] = {}
        self._aborts: defaultdict[int, AbortReader] = defaultdict(AbortReader)
        self._generating = False  # whether a rank lost its connection while it generated
        self._awaiting_logs: dict[int, tuple[float, Finding]] = {}
        self._maybe_intended: list[tuple[float, Condition]] = []
        """Time and condition of deaths that the program which started the rank may have caused."""

    def log(self, line: LogLine) -> None:
        """Keep a rank's last lines; -1 is the launcher."""
        self._logs[line.rank].append(line.text)
        self._aborts[line.rank].read(line.text)

    def job_ended_first(self, t: float, code: int | None, count: int, processes: list[str]) -> list[Finding]:
        """Record that the job's command ended before its ranks; their later deaths are consequences.

        ``code``: the command's exit status, negative for a signal; None: it was never started.
        """
        if self._recent(t):
            return []
        facts = LauncherEnded(code, count, processes)
        return self._raise(t, Finding("launcher_ended", facts, severity="warning" if code == 0 else "error"))

    def trouble(self, t: float, condition: Condition) -> None:
        """Register a finding, possibly of another detector (out of memory), as a candidate for the first failure."""
        if self._first is None or t - self._first[0] > CONSEQUENCE_S:
            self._first = (t, condition)
            self._followers = {}
        if condition.rank is not None and condition.kind != "died":
            self._failed[condition.rank] = condition

    def failure(self, t: float, failure: Failure, kill_asked: set[int]) -> list[Finding]:
        """Process an exception that ended a rank's script."""
        interrupted = failure.error.startswith(("KeyboardInterrupt", "SystemExit"))
        if -1 in kill_asked and (interrupted or is_lost_peer(failure.error)):
            return []
        if is_lost_peer(failure.error):
            self._generating |= failure.phase == "generate" or ", in generate\n" in failure.traceback
            if self._recent(t):
                return self._followed(t, failure.rank, failure.error)
            self._held.append((t, failure, bool(kill_asked - {failure.rank})))
            return []
        return self._failure(t, failure)

    def process_gone(
        self,
        t: float,
        state: RankState,
        kill_asked: set[int],
        kill: KernelKill | None = None,
        pressure: HostPressure | None = None,
        alone: bool = False,
        phase: str = "",
    ) -> list[Finding]:
        """Record the death of a rank's process.

        ``kill``: evidence that the kernel killed it; None: none. ``pressure``: use of the host's memory just before;
        None: not full, or unknown.
        """
        rank, ended = state.rank, Ended(state.exit_code, state.signal)
        known = self._failed.get(rank)
        if known is not None:
            return [added(known, ended)]
        if -1 in kill_asked:
            return []
        if any(failure.rank == rank for _, failure, _ in self._held):
            # Its own failure (a lost peer) is still held back: it is raised later, or becomes part of the peer's alert.
            self._held_gone[rank] = t
            return []
        asked, by_kernel = rank in kill_asked, kill is not None and bool(kill.exhausted)
        reason = "" if asked else self._abort_reason(rank, state)
        explained = by_kernel or (bool(reason) and not is_lost_peer(reason))
        by_launcher = not asked and not explained and self._follows(state)
        earlier = self._raise_earlier(t, rank) if by_launcher else []
        if earlier:
            raised = self._failed.get(rank)
            return [*earlier, *([added(raised, ended)] if raised is not None else self._followed(t, rank, ended))]
        if rank not in self._died and not asked and not by_kernel and self._recent(t) and self._follows(state):
            return self._followed(t, rank, ended)
        facts = ProcessDeath(
            *(state.pid, state.exit_code, state.signal, state.text, self._log_of(rank), asked, kill, pressure, alone),
            reason=reason,
            generating=self._generating or phase == "generate",
        )
        finding = Finding("died", facts, severity="info" if asked else "error", ranks=(rank,), rank=rank)
        self._died.add(rank)
        if not asked and (facts.by_signal == signal.SIGTERM or (phase == "idle" and facts.by_signal is None)):
            self._maybe_intended.append((t, finding.condition))
        self._awaiting_logs[rank] = (t, finding)
        return self._raise(t, finding)

    def tick(self, now: float, over: bool = False, succeeded: bool = False) -> list[Finding]:
        """Return failures held back for long enough, or all of them when the job is over."""
        findings: list[Finding] = []
        if over and succeeded:
            recent = [condition for since, condition in self._maybe_intended if now - since <= CONSEQUENCE_S]
            findings += [resolved(condition, Resolution("run_ended")) for condition in recent]
            self._maybe_intended = []
        while self._held and (over or now - self._held[0][0] > HELD_S):
            findings += self._raise_held(now, 0)
        for rank, (since, found) in list(self._awaiting_logs.items()):
            if over or now - since > HELD_S:
                del self._awaiting_logs[rank]
                findings += self._log_read(rank, found)
        return findings

    def _log_read(self, rank: int, found: Finding) -> list[Finding]:
        """Add a dead rank's last lines, and the reason if it was among them; ``found`` is the finding of its death."""
        facts: ProcessDeath = found.facts
        log = self._log_of(rank)
        reason = "" if facts.asked else self._abort_reason(rank, facts)
        now = msgspec.structs.replace(facts, log=log, reason=reason, generating=facts.generating or self._generating)
        findings = [added(found.condition, LastLog(log))]
        if (now.reason, now.reason and now.generating) != (facts.reason, facts.reason and facts.generating):
            findings.insert(0, msgspec.structs.replace(found, facts=now, state="explained"))
            if self._first is not None and self._first[1] == found.condition and self._followers:
                findings.append(added(found.condition, Followed(dict(self._followers))))
        return findings

    def _abort_reason(self, rank: int, end: RankState | ProcessDeath) -> str:
        """Return the reason in a rank's output for which native code aborted it; empty: none, or another ending."""
        return self._aborts[rank].reason if {end.signal, end.exit_code} & _ABORTED else ""

    def _raise_earlier(self, t: float, rank: int) -> list[Finding]:
        """Raise one failure held back that is earlier than a rank's death at ``t``; return an empty list if none is.

        Its process ended before ``t``, or the rank's script had ended without an error.
        """
        any_of_them = rank in self._finished()
        for place, (_, failure, _) in enumerate(self._held):
            if any_of_them or self._held_gone.get(failure.rank, t) < t:
                return self._raise_held(t, place)
        return []

    def _raise_held(self, t: float, place: int) -> list[Finding]:
        """Raise one of the failures held back, by its index."""
        _, failure, asked = self._held.pop(place)
        self._held_gone.pop(failure.rank, None)
        early = {} if asked else dict(self._finished())
        early.pop(failure.rank, None)
        return self._ended_early(t, failure, early) if early else self._failure(t, failure, asked)

    def restore(self, t: float, finding: Finding) -> None:
        """Restore a failure or death from the recording, found at ``t``."""
        if finding.kind == "died" and finding.rank is not None:
            self._died.add(finding.rank)
        elif finding.rank is not None and finding.state != "resolved":
            self._failed[finding.rank] = finding.condition
        self._first = (t, finding.condition)

    def _failure(self, t: float, failure: Failure, asked: bool = False) -> list[Finding]:
        taken = self._oom.failure(failure)
        if taken is not None:
            condition = self._oom.standing(failure.rank)
            if condition is not None:
                self.trouble(t, condition)
            return taken + self._release(t)
        facts = ScriptFailure(failure.error, failure.traceback[-TRACEBACK_LIMIT:], self._log_of(failure.rank), asked)
        severity = "info" if asked else "error"
        rank, step, phase = failure.rank, failure.step, failure.phase
        return self._raise(t, Finding("failure", facts, "raised", severity, (rank,), step=step, rank=rank, phase=phase))

    def _ended_early(self, t: float, failure: Failure, early: dict[int, int]) -> list[Finding]:
        """Report that a rank lost its connection because others had ended before it."""
        steps = dict(sorted(early.items()))
        traceback = failure.traceback[-TRACEBACK_LIMIT:]
        facts = EndedEarly(steps, failure.rank, failure.error, traceback, self._log_of(failure.rank))
        rank = next(iter(steps)) if len(steps) == 1 else None
        finding = Finding("ended_early", facts, "raised", "error", tuple(steps), step=failure.step, rank=rank)
        found = self._raise(t, finding)
        self._failed[failure.rank] = finding.condition
        return found

    def _raise(self, t: float, finding: Finding) -> list[Finding]:
        """Return a finding, with the failures held back as its consequences."""
        self.trouble(t, finding.condition)
        return [finding, *self._release(t)]

    def _log_of(self, rank: int) -> list[str]:
        return list(self._logs[rank])

    def _recent(self, t: float) -> bool:
        return self._first is not None and t - self._first[0] <= CONSEQUENCE_S

    @staticmethod
    def _follows(state: RankState) -> bool:
        code = state.exit_code
        if state.signal is not None:
            return state.signal in _FOLLOWING_SIGNALS
        return code is None or code in _FOLLOWING_CODES or -code in _FOLLOWING_SIGNALS or code == 1

    def _followed(self, t: float, rank: int, event: Ended | str) -> list[Finding]:
        if self._first is None:
            return []
        since, condition = self._first
        known = self._followers.get(rank)
        if known is None and len(self._followers) < RANKS_LISTED:
            self._followers[rank] = Follower(max(0.0, t - since), [event])
        elif known is not None and (isinstance(event, str) or event.is_known):
            self._followers[rank] = msgspec.structs.replace(known, events=[*known.events, event])
        return [added(condition, Followed(dict(self._followers)))]

    def _release(self, t: float) -> list[Finding]:
        """Report the failures held back as consequences of a primary event that was just detected."""
        held, self._held = self._held, []
        self._held_gone.clear()
        return [found for _, failure, _ in held for found in self._followed(t, failure.rank, failure.error)]
