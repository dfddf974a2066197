"""The tracker's state of one rank: its progress, its process, and how it ended."""

from collections.abc import Iterable

import msgspec

from ...messages.control import RankState, RankStateName
from ...messages.hosts import KernelKill
from ...messages.telemetry import Goodbye, Hello
from ...run.endings import ending_in_words, exhausted_memory
from ...text import first_line
from .evidence import Evidence
from .judge import EXIT_LIMIT_S, EXIT_SURE_S, EXIT_WORKING_S
from .progress import SILENT_S, SUSPECT_S, RankProgress
from .rank_view import Absence, RankView

ASKING_SIGNALS = (2, 15)
ASKED_LATER_S = 1.0


class ProcessFact(msgspec.Struct, frozen=True):
    """State of one rank's process from the supervisor, at most a second old.

    Facts about a process other than that of the rank's ``Hello`` (``pid`` and ``start_ticks``) are ignored.
    """

    rank: int
    pid: int
    start_ticks: int
    alive: bool
    """Whether the process (pid and start time) exists and is not a zombie."""
    proc_state: str = ""
    """State letter of /proc/PID/stat (proc(5)): R S D T t Z X; empty if not readable."""
    exit_code: int | None = None
    """Exit code, if the process has ended and it is known."""
    signal: int | None = None
    """The signal that ended it, if known."""
    kernel_kill: KernelKill | None = None
    """For a process ended by SIGKILL: evidence for or against the kernel's OOM killer; None: none."""
    time: float = 0.0
    """Time of the observation, seconds since the epoch on the hub's clock; 0.0: unknown."""

    @property
    def is_traced(self) -> bool:
        """Whether a debugger has stopped it."""
        return self.proc_state == "t"


class TrackedRank:
    """State of one rank in the tracker."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self.progress = RankProgress(now)
        self.state: RankState | None = None
        self.hello: Hello | None = None
        self.fact: ProcessFact | None = None
        self.died_at: float | None = None
        self.goodbye: Goodbye | None = None
        self.goodbye_at = 0.0
        self.failure = ""
        self.evidence: Evidence | None = None
        """Evidence of the last inspection."""
        self.cut_off = ""
        """Its host, while the host is cut off; else empty."""
        self.stopped_since: float | None = None
        """Since when its process was stopped at every reading."""
        self.stuck_since: float | None = None
        """Start of its uninterruptible sleep after its end was requested."""
        self.steps_then: dict[int, int] = {}
        self.stood_since = 0.0
        """``progress.moved_at`` when ``steps_then`` was recorded."""

    @property
    def ended(self) -> bool:
        """Whether no further messages of it are expected."""
        return self.state is not None and self.state.state in ("gone", "finished")

    @property
    def succeeded(self) -> bool:
        """Whether its script ended without an error, even if a launcher ended its process after that."""
        if self.failure or self.state is None:
            return False
        return self.state.state == "finished" or (self.goodbye is not None and self.goodbye.reason == "finished")

    @property
    def may_end(self) -> bool:
        """Whether its process is dead, or it reported a failure."""
        return self.died_at is not None or self.goodbye is not None

    def death_order(self, now: float) -> tuple[float, bool]:
        """Return a sort key for the order of deaths: time (seconds since the epoch), and whether the cause is unknown.

        A rank whose end was requested sorts slightly later: a launcher ends the others after the first death, and one
        poll may find all of them dead. If two deaths are found in one poll, the one with a known cause counts as first.
        """
        died = now if self.died_at is None else self.died_at
        code, signal = (self.fact.exit_code, self.fact.signal) if self.fact is not None else (None, None)
        return died + (ASKED_LATER_S if signal in ASKING_SIGNALS else 0.0), code is None and signal is None

    def ending(self) -> tuple[RankStateName, str]:
        """Return the final state of a rank whose process is gone, and its text."""
        fact, goodbye = self.fact, self.goodbye
        code, signal = (fact.exit_code, fact.signal) if fact is not None else (None, None)
        if self.failure:
            words = "" if code is None and signal is None else f" ({ending_in_words(code, signal)})"
            return "gone", f"failed: {first_line(self.failure)}{words}"
        as_asked = goodbye is not None and goodbye.reason == "stopped" and (signal in (2, 15) or code in (130, 143))
        if goodbye is not None and goodbye.reason != "failed" and (as_asked or (not signal and not code)):
            return "finished", goodbye.text
        if goodbye is None and code == 0 and not signal:
            return "finished", "exit code 0, without a goodbye"
        kill = fact.kernel_kill if fact is not None else None
        by_kernel = f" by the kernel: {exhausted_memory(kill)}" if kill is not None and kill.sure else ""
        return "gone", ending_in_words(code, signal) + by_kernel

    def view(self, now: float) -> RankView:
        """Return the judge's view of this rank at ``now``."""
        progress = self.progress
        state = self.state.state if self.state is not None else "starting"
        absent: Absence = ""
        if state == "stopped":
            absent = "stopped"
        elif state == "held":
            absent = "held"
        elif state == "gone":
            absent = "gone"
        elif self.cut_off:
            absent = "cut off"
        elif progress.silence(now) > SILENT_S:
            absent = "silent"
        lingers = state in ("finished", "hung") and self.lingers(now)
        return RankView(
            rank=self.rank,
            step=progress.step,
            phase="exit" if lingers else progress.phase,
            age=now - self.goodbye_at if lingers or (self.goodbye is not None and self.ended) else progress.age(now),
            limit=EXIT_LIMIT_S if lingers else progress.limit(),
            inside="" if lingers else progress.collective,
            last_collective=progress.last_collective,
            collectives=progress.collectives,
            step_collectives=progress.step_collectives,
            micro_step=progress.micro_step,
            per_step=progress.per_step_collectives,
            absent="" if lingers else absent,
            finished=state == "finished" and not lingers,
            group=progress.group,
            group_sequence=progress.group_sequence,
            size=progress.size,
            stood_s=max(0.0, progress.last_message_at - progress.moved_at),
            asleep_limit=EXIT_SURE_S if lingers else progress.asleep_limit(),
            working_limit=EXIT_WORKING_S if lingers else progress.working_limit(),
            latest=self.evidence,
            steps_then=self.steps_then,
            evidence=self._fresh(self.goodbye_at if lingers else progress.moved_at),
        )

    def _fresh(self, since: float) -> Evidence | None:
        evidence = self.evidence
        return evidence if evidence is not None and evidence.taken >= since else None

    def lingers(self, now: float) -> bool:
        """Return whether its process outlived its ``Goodbye`` by ``EXIT_LIMIT_S`` (longer at work, shorter asleep)."""
        alive = self.fact is not None and self.fact.alive
        if not alive or self.goodbye is None:
            return False
        found = self._fresh(self.goodbye_at)
        limit = EXIT_LIMIT_S
        if found is not None and found.work:
            limit = EXIT_WORKING_S
        elif found is not None and found.is_asleep:
            limit = EXIT_SURE_S
        return now - self.goodbye_at > limit

    def note_standstill(self, steps: dict[int, int]) -> None:
        """Record, once per standstill, the number of steps of every rank."""
        if self.stood_since != self.progress.moved_at:
            self.stood_since, self.steps_then = self.progress.moved_at, steps

    def suspect(self, now: float) -> bool:
        """Return whether to inspect it: no progress for suspiciously long, or still alive after its ``Goodbye``."""
        if self.cut_off or (self.state is not None and self.state.state == "gone"):
            return False
        if self.goodbye is not None or self.ended:
            alive = self.fact is not None and self.fact.alive
            return alive and self.goodbye is not None and now - self.goodbye_at > SUSPECT_S
        return self.progress.age(now) > self.progress.suspect_after()


def by_death(ranks: Iterable[TrackedRank], now: float) -> list[TrackedRank]:
    """Return ranks sorted by death; the first one is the cause, the others its consequences."""
    return sorted(ranks, key=lambda tracked: tracked.death_order(now))
