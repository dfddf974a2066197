"""Derives the states of ranks and run from messages and process facts.

Rank states and their conditions:

- ``starting``: a ``Hello`` was received, but no step and no phase other than ``init``.
- ``training``: it makes progress, or has made none for less time than its phase allows.
- ``waiting``: inside a collective call for more than 4 s and 1.5 times its phase's usual longest; or the judge
  (``stalls.judge``) finds that it waits for others.
- ``hung``: the judge named it; or its process outlived its ``Goodbye`` by 30 s; or its end was requested and its
  process has been in uninterruptible sleep for 3 s.
- ``stopped``: /proc shows state T or t (SIGSTOP, or a debugger), and has done so for ``STOPPED_S`` without progress:
  limiters of CPU time (cpulimit) stop and continue a process many times a second.
- ``gone``: its process is gone without a ``Goodbye``.
- ``finished``: it sent a ``Goodbye``, or ended with exit code 0.
- ``unreachable``: no message for 15 s and its process unknown, or for 30 s although its process lives; or its host is
  cut off, which overrides all other states.

Time in which the hub did not run (it was frozen, or the clock jumped) is discounted for all ranks, except if a rank's
own heartbeats of that time report no progress.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any, Literal

import msgspec

from ...messages import control
from ...messages.control import Command, RankState, RankStateName, RunState, RunStateName
from ...messages.hosts import HostState, KernelKill
from ...messages.telemetry import Failure, Goodbye, Heartbeat, Hello, LogLine, Oom, Step
from ...messages.wire import Frame, Message
from ...run.end import ending_in_words, exhausted_memory
from ...text import first_line, kernel_sleep
from ..deaths.logs import SlurmWords
from .collectives import STOPPED, TRACED, Absence, RankView, collective, where
from .evidence import NOWHERE, Evidence
from .judge import EXIT_LIMIT_S, EXIT_SURE_S, EXIT_WORKING_S, MOVING_S, Verdict, by_rank, judge
from .progress import SILENT_S, SUSPECT_S, RankProgress

ASKING_SIGNALS = (2, 15)
ASKED_LATER_S = 1.0


class ProcessFact(msgspec.Struct, frozen=True):
    """State of one rank's process from the supervisor, at most a second old.

    Facts about a process other than that of the rank's ``Hello`` (``pid`` and ``start_ticks``) are ignored.
    """

    rank: int
    pid: int
    start_ticks: int
    alive: bool  # whether the process (pid and start time) exists and is not a zombie
    proc_state: str = ""  # state letter of /proc/PID/stat (proc(5)): R S D T t Z X; empty if not readable
    exit_code: int | None = None
    signal: int | None = None
    kernel_kill: KernelKill | None = None
    """For a process ended by SIGKILL: evidence for or against the kernel's OOM killer; None: none."""
    time: float = 0.0  # time of the observation, seconds since the epoch on the hub's clock; 0.0: unknown

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
        self.cut_off = ""  # its host, while the host is cut off; else empty
        self.stopped_since: float | None = None  # since when its process was stopped at every reading
        self.stuck_since: float | None = None  # start of its uninterruptible sleep after its end was requested
        self.steps_then: dict[int, int] = {}
        self.stood_since = 0.0  # `progress.moved_at` when `steps_then` was recorded

    @property
    def name(self) -> RankStateName | Literal[""]:
        """The name of its state; empty before the first."""
        return self.state.state if self.state is not None else ""

    @property
    def exit_status(self) -> tuple[int | None, int | None]:
        """The exit code and the signal of its process, if known."""
        return (self.fact.exit_code, self.fact.signal) if self.fact is not None else (None, None)

    @property
    def ended(self) -> bool:
        """Whether no further messages of it are expected."""
        return self.name in ("gone", "finished")

    @property
    def succeeded(self) -> bool:
        """Whether its script ended without an error, even if a launcher ended its process after that."""
        if self.failure or not self.name:
            return False
        return self.name == "finished" or (self.goodbye is not None and self.goodbye.reason == "finished")

    @property
    def running(self) -> RankStateName:
        """Its state while it makes progress."""
        return "training" if self.progress.has_stepped else "starting"

    @property
    def is_alive(self) -> bool:
        """Whether its process is known to live."""
        return self.fact is not None and self.fact.alive

    def death_order(self, now: float) -> tuple[float, bool]:
        """Return a sort key for the order of deaths: time (seconds since the epoch), and whether the cause is unknown.

        A rank whose end was requested sorts slightly later: a launcher ends the others after the first death, and one
        poll may find all of them dead. If two deaths are found in one poll, the one with a known cause counts as first.
        """
        died = now if self.died_at is None else self.died_at
        code, signal = self.exit_status
        return died + (ASKED_LATER_S if signal in ASKING_SIGNALS else 0.0), code is None and signal is None

    def ending(self) -> tuple[RankStateName, str]:
        """Return the final state of a rank whose process is gone, and its text."""
        fact, goodbye = self.fact, self.goodbye
        code, signal = self.exit_status
        if self.failure:
            words = "" if code is None and signal is None else f" ({ending_in_words(code, signal)})"
            return "gone", f"failed: {first_line(self.failure)}{words}"
        if goodbye is not None and goodbye.reason != "failed":
            asked = goodbye.reason == "stopped" and (signal in ASKING_SIGNALS or code in (130, 143))
            if asked or (not signal and not code):
                return "finished", goodbye.text
        if goodbye is None and code == 0 and not signal:
            return "finished", "exit code 0, without a goodbye"
        kill = fact.kernel_kill if fact is not None else None
        by_kernel = f" by the kernel: {exhausted_memory(kill)}" if kill is not None and kill.sure else ""
        return "gone", ending_in_words(code, signal) + by_kernel

    def view(self, now: float) -> RankView:
        """Return the judge's view of this rank at ``now``."""
        progress, beat = self.progress, self.progress.latest
        state = self.name
        absent: Absence = ""
        if state in ("stopped", "held", "gone"):
            absent = state
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
            inside="" if lingers else beat.collective,
            last_collective=beat.last_collective,
            collectives=beat.collectives,
            step_collectives=beat.step_collectives,
            micro_step=beat.micro_step,
            per_step=progress.per_step_collectives,
            absent="" if lingers else absent,
            finished=state == "finished" and not lingers,
            group=beat.group,
            group_sequence=beat.group_sequence,
            size=beat.size,
            stood_s=max(0.0, progress.last_message_at - progress.moved_at),
            asleep_limit=EXIT_SURE_S if lingers else progress.asleep_limit(),
            working_limit=EXIT_WORKING_S if lingers else progress.working_limit(),
            latest=self.evidence,
            steps_then=self.steps_then,
            evidence=self.fresh(self.goodbye_at if lingers else progress.moved_at),
        )

    def fresh(self, since: float) -> Evidence | None:
        """Return the evidence of its last inspection if that was not before ``since``."""
        evidence = self.evidence
        return evidence if evidence is not None and evidence.taken >= since else None

    def lingers(self, now: float) -> bool:
        """Return whether its process outlived its ``Goodbye`` by ``EXIT_LIMIT_S`` (longer at work, shorter asleep)."""
        if not self.is_alive or self.goodbye is None:
            return False
        found, limit = self.fresh(self.goodbye_at), EXIT_LIMIT_S
        if found is not None:
            limit = EXIT_WORKING_S if found.work else EXIT_SURE_S if found.is_asleep else limit
        return now - self.goodbye_at > limit

    def note_standstill(self, steps: dict[int, int]) -> None:
        """Record, once per standstill, the number of steps of every rank."""
        if self.stood_since != self.progress.moved_at:
            self.stood_since, self.steps_then = self.progress.moved_at, steps

    def suspect(self, now: float) -> bool:
        """Return whether to inspect it: no progress for suspiciously long, or still alive after its ``Goodbye``."""
        if self.cut_off or self.name == "gone":
            return False
        if self.goodbye is not None or self.ended:
            return self.is_alive and self.goodbye is not None and now - self.goodbye_at > SUSPECT_S
        return self.progress.age(now) > self.progress.suspect_after()


def by_death(ranks: Iterable[TrackedRank], now: float) -> list[TrackedRank]:
    """Return ranks sorted by death; the first one is the cause, the others its consequences."""
    return sorted(ranks, key=lambda tracked: tracked.death_order(now))


WAIT_SHOWN_S = 4.0
WAIT_FACTOR = 1.5
UNREACHABLE_S = 15.0
UNREACHABLE_ALIVE_S = 30.0
GOODBYE_GRACE_S = 1.0
"""Seconds to wait for the last message of a dead process, which may arrive after its death was detected."""
STOPPED_S = 2.0  # seconds without progress, and stopped at every reading, after which a process counts as stopped
UNKILLABLE_S = 3.0  # seconds of uninterruptible sleep after which a process to be ended is stuck in the kernel
UNKILLABLE = f"{kernel_sleep()}: the kill could not end it, it ends when the kernel returns"
_WHY = {
    "mismatch": "mismatch",
    "deadlock": "each rank waits for another",
    "left": "the script of another rank has ended",
    "lock": "no compiler runs",
}
"""Why a rank waits, by the kind of a verdict that names no rank."""
PAUSE_S = 5.0  # if ticks are farther apart than this, the hub itself did not run in between


class RankTracker:
    """Derives rank states and the run's state from messages and process facts. It reads no clock itself.

    Feed it every message of the stream before the detectors (its own messages are ignored) and every process fact
    (about once a second per rank), and call ``tick`` about twice a second. The caller publishes and records the
    returned messages. ``has_launcher``: whether a launcher will report the job's end (``ended``); else the run ends
    with its last rank.
    """

    def __init__(self, *, has_launcher: bool = True) -> None:
        self.ranks: dict[int, TrackedRank] = {}
        self.verdict: Verdict | None = None
        self.views: list[RankView] = []  # the views of all ranks while some rank makes no progress
        self.suspected = False  # whether a rank stands for long enough to inspect all ranks (`stalls.progress`)
        self.run_state: RunState | None = None
        self.launcher = ""  # state of the run's launcher at the last check: `alive`, `stopped`, `gone`; empty: none
        self.stepped = False
        self.kill_asked: set[int] = set()  # ranks whose end a user or a scheduler requested; `-1`: the whole run
        self.now = 0.0
        self._has_launcher = has_launcher
        self._last_tick: float | None = None
        self._asked_at = 0.0
        self._job_ended = False  # whether the whole job ended: what is left of it is being ended and does not hang
        self._slurm = SlurmWords()
        self._all_ended_at: float | None = None
        self._changes: deque[RankState | RunState] = deque(maxlen=100_000)
        self._handlers: dict[type, Callable[[float, Any], list[Message]]] = {
            Step: self._step,
            Heartbeat: self._beat,
            Hello: self._hello,
            Goodbye: self._goodbye,
            Failure: self._failure,
            Oom: self._oom,
            Command: self._command,
            LogLine: self._log,
            HostState: self._host,
        }

    def feed(self, seq: int, t: float, message: Message) -> list[Message]:
        """Process one message that the hub received at ``t`` (seconds since the epoch); return what changed."""
        if t > self.now:
            self.now = t
        handler = self._handlers.get(type(message))
        return handler(t, message) if handler is not None else []

    def fact(self, fact: ProcessFact) -> list[Message]:
        """Process a fact of the supervisor about a process; return what changed."""
        tracked = self.ranks.get(fact.rank)
        if tracked is None or (
            tracked.hello is not None and (tracked.hello.pid, tracked.hello.start_ticks) != (fact.pid, fact.start_ticks)
        ):
            return []
        known = tracked.fact
        tracked.fact = fact
        if fact.time > self.now:
            self.now = fact.time
        if fact.alive:
            tracked.died_at = None
            if fact.proc_state == "D" and self.kill_asked & {-1, fact.rank}:
                return self._withstands(tracked)
            if tracked.stuck_since is not None:
                tracked.stuck_since = None
                return self._moves(tracked)
            if fact.proc_state in ("T", "t"):
                return self._stops(tracked)
            tracked.stopped_since = None
            if tracked.name == "stopped":
                tracked.progress.moved(self.now)
                return self._set(tracked, tracked.running)
            return []
        tracked.stopped_since = None
        if tracked.died_at is None:
            tracked.died_at = fact.time or self.now
        late_code = known is None or (known.exit_code is None and known.signal is None)
        if tracked.ended and late_code and (fact.exit_code is not None or fact.signal is not None):
            return self._set(tracked, *tracked.ending())
        return []

    def tick(self, now: float) -> list[Message]:
        """Judge all ranks at ``now``; return the states that changed."""
        messages: list[Message] = []
        if self._last_tick is not None:
            gap = now - self._last_tick
            if gap > PAUSE_S or gap < 0.0:
                for tracked in self.ranks.values():
                    tracked.progress.shift(gap, now)
        self._last_tick = self.now = now
        if self.run_state is None:
            messages += self._set_run("starting")
        for tracked in self.ranks.values():
            if tracked.stopped_since is not None:
                messages += self._stops(tracked)
        for tracked in by_death([one for one in self.ranks.values() if not one.ended], now):
            if self._has_ended(tracked, now):
                messages += self._set(tracked, *tracked.ending())
            elif tracked.died_at is not None:
                break
        still = [
            tracked
            for tracked in self.ranks.values()
            if (not tracked.ended and now - tracked.progress.moved_at > MOVING_S) or tracked.lingers(now)
        ]
        if still:
            steps = {rank: tracked.progress.steps_seen for rank, tracked in self.ranks.items()}
            for tracked in still:
                tracked.note_standstill(steps)
            self._credit_silent(still, now)
        views = [tracked.view(now) for tracked in self.ranks.values()] if still else []
        self.views = views
        self.verdict = judge(views) if still and not self._job_ended else None
        self.suspected = any(tracked.suspect(now) for tracked in self.ranks.values())
        if self.verdict is not None and self.verdict.kind in ("exit", "left") and now - self._asked_at < EXIT_LIMIT_S:
            self.verdict = None  # their end was requested; they may still be ending
        views_of = by_rank(views)
        for tracked in still:
            messages += self._still_state(tracked, views_of[tracked.rank], now)
        if not self._has_launcher:
            messages += self._end_without_launcher(now)
        return messages

    def ended(self, now: float, state: RunStateName, exit_code: int | None, text: str = "") -> list[Message]:
        """Record how the whole job ended (``exit.json``): ``finished``, ``failed`` or ``stopped``."""
        self.now, self._job_ended, self.verdict, self.suspected = now, True, None, False
        messages: list[Message] = []
        for tracked in by_death(self.ranks.values(), now):
            if not tracked.ended and not tracked.is_alive:
                messages += self._set(tracked, *tracked.ending())
        return messages + self._set_run(state, text, exit_code)

    def close_job(self, now: float) -> list[Message]:
        """Judge at once how the ranks of a job ended, because another job follows."""
        self.now = now
        messages: list[Message] = []
        for tracked in by_death(self.ranks.values(), now):
            if tracked.ended:
                continue
            if tracked.fact is not None and tracked.fact.alive:
                tracked.fact = msgspec.structs.replace(tracked.fact, alive=False)
            messages += self._set(tracked, *tracked.ending())
        return messages

    def begin_job(self) -> None:
        """Forget the ranks of the previous job; requests to end the whole run are kept."""
        self.ranks.clear()
        self.verdict = None
        self.suspected = False
        self.kill_asked &= {-1}
        self._all_ended_at = None

    def restore(self, frames: Iterable[Frame]) -> None:
        """Restore the run's history after a hub restart: frames from the recording, oldest first. Sends nothing."""
        for frame in frames:
            message = frame.message
            if isinstance(message, RankState):
                self._tracked(message.rank, frame.t).state = message
            elif isinstance(message, RunState):
                self.run_state = message
            else:
                self.feed(frame.seq, frame.t, message)
            # The first tick finds the gap since this time and discounts it for all ranks.
            self._last_tick = frame.t
        self._changes.clear()

    def found(self) -> dict[int, Evidence]:
        """Return the evidence of the last inspection, for ranks without progress since then."""
        found = ((rank, tracked.fresh(tracked.progress.moved_at)) for rank, tracked in self.ranks.items())
        return {rank: evidence for rank, evidence in found if evidence is not None}

    def drain_changes(self) -> list[RankState | RunState]:
        """Return, once, the state messages produced since the last call (the detectors turn them into alerts)."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def _step(self, t: float, step: Step) -> list[Message]:
        tracked = self._tracked(step.rank, t)
        tracked.progress.step_done(t, step)
        self.stepped = True
        return [] if tracked.name == "training" else self._moves(tracked)

    def _beat(self, t: float, beat: Heartbeat) -> list[Message]:
        tracked = self._tracked(beat.rank, t)
        self.stepped |= beat.step > 1  # a run that resumes may have no step left to take
        progress = tracked.progress
        before = progress.latest.progress
        progress.beat(t, beat)
        if (tracked.name == "held") != bool(beat.held_since) and not tracked.ended:
            # A rank held at an out-of-memory error makes no progress, but does not hang, as at a breakpoint.
            words = f"at an out-of-memory error in {beat.phase}: waits to be released"
            if beat.held_since:
                return self._set(tracked, "held", words)
            progress.moved(self.now)
            return self._set(tracked, tracked.running)
        unchanged = tracked.name == "training" or (tracked.name and beat.progress == before)
        return [] if unchanged and tracked.name != "unreachable" else self._moves(tracked)

    def _hello(self, t: float, hello: Hello) -> list[Message]:
        tracked = self._tracked(hello.rank, t)
        known = tracked.hello
        same = known is None or (known.pid, known.start_ticks) == (hello.pid, hello.start_ticks)
        if not same:
            # The rank was restarted: the figures of its earlier process do not apply.
            tracked = self.ranks[hello.rank] = TrackedRank(hello.rank, t)
        tracked.hello = hello
        tracked.progress.last_message_at = t
        if same and tracked.name not in ("", "unreachable"):
            return []
        return self._set(tracked, tracked.running)

    def _goodbye(self, t: float, goodbye: Goodbye) -> list[Message]:
        tracked = self._tracked(goodbye.rank, t)
        tracked.progress.last_message_at = t
        tracked.goodbye, tracked.goodbye_at = goodbye, t
        if goodbye.reason == "failed":
            tracked.failure = tracked.failure or goodbye.text
            return []
        text = goodbye.text or ("stopped as asked" if goodbye.reason == "stopped" else "")
        return self._set(tracked, "finished", text)

    def _failure(self, t: float, failure: Failure) -> list[Message]:
        tracked = self._tracked(failure.rank, t)
        tracked.progress.last_message_at = t
        tracked.failure = failure.error
        return []

    def _oom(self, t: float, oom: Oom) -> list[Message]:
        self._tracked(oom.rank, t).progress.last_message_at = t
        return []

    def _command(self, t: float, command: Command) -> list[Message]:
        if command.verb not in ("kill", "stop"):
            return []
        verb = control.decode(command, (control.Kill, control.Stop))
        ranks = verb.ranks if isinstance(verb, control.Kill) else []
        self.kill_asked.update(ranks or [-1])
        self._asked_at = t
        if ranks:
            return []
        if isinstance(verb, control.Stop):
            return self._set_run("stopping", verb.reason or "stop at the next step")
        return self._set_run("stopping", f"kill ({verb.signal or 'INT, TERM, KILL'})")

    def _log(self, t: float, line: LogLine) -> list[Message]:
        words = self._slurm.read(line.text) if line.rank == -1 else ""
        if not words:
            return []
        self.kill_asked.add(-1)
        self._asked_at = t
        return self._set_run("stopping", words)

    def _host(self, t: float, host: HostState) -> list[Message]:
        messages: list[Message] = []
        for rank in host.ranks:
            tracked = self._tracked(rank, t)
            was, tracked.cut_off = tracked.cut_off, host.host if host.state == "cut off" else ""
            if tracked.ended or bool(was) == bool(tracked.cut_off):
                continue
            if tracked.cut_off:
                messages += self._set(tracked, "unreachable", f"its host {host.host} is cut off")
                continue
            # Time without a connection does not count against it; messages sent meanwhile arrive now.
            tracked.progress.moved(t)
            if tracked.name == "unreachable":
                messages += self._set(tracked, tracked.running)
        return messages

    def step_in(self, seconds: float) -> int:
        """Return a step that no rank will have passed ``seconds`` from now, at the current step times."""
        living = [tracked.progress for tracked in self.ranks.values() if not tracked.ended]
        fastest = min((progress.step_seconds for progress in living if progress.step_seconds > 0), default=1.0)
        return max((progress.step for progress in living), default=1) + 3 + ceil(seconds / fastest)

    def _tracked(self, rank: int, now: float) -> TrackedRank:
        tracked = self.ranks.get(rank)
        if tracked is None:
            tracked = self.ranks[rank] = TrackedRank(rank, now)
        return tracked

    def _moves(self, tracked: TrackedRank) -> list[Message]:
        if tracked.name in ("gone", "finished", "stopped", "held", "training"):
            return []
        if tracked.progress.phase == "init" and not tracked.progress.has_stepped:
            return self._set(tracked, "starting")
        messages = self._set(tracked, "training")
        if self.run_state is None or self.run_state.state == "starting":
            messages += self._set_run("training")
        return messages

    def _stops(self, tracked: TrackedRank) -> list[Message]:
        """Record whether a process that is stopped now has been so for long enough."""
        if tracked.stopped_since is None:
            tracked.stopped_since = self.now
        since = max(tracked.stopped_since, tracked.progress.moved_at)
        known = tracked.name in ("stopped", "gone")
        if known or tracked.fact is None or self.now - since < STOPPED_S:
            return []
        traced = tracked.fact.is_traced  # such a process ignores signal CONT
        words = f"{TRACED}: continue it there, or detach" if traced else f"{STOPPED}; signal CONT lets it go on"
        return self._set(tracked, "stopped", words)

    def _withstands(self, tracked: TrackedRank) -> list[Message]:
        """Record whether a rank whose end was requested is stuck in the kernel, where no signal reaches it."""
        if tracked.stuck_since is None:
            tracked.stuck_since = self.now
        if self.now - tracked.stuck_since < UNKILLABLE_S:
            return []
        return self._set(tracked, "hung", UNKILLABLE)

    def _has_ended(self, tracked: TrackedRank, now: float) -> bool:
        goodbye, died = tracked.goodbye, tracked.died_at
        if died is not None:
            return now - died >= (0.0 if goodbye is not None else GOODBYE_GRACE_S)
        failed_unseen = goodbye is not None and goodbye.reason == "failed" and tracked.fact is None
        return failed_unseen and now - tracked.goodbye_at >= GOODBYE_GRACE_S

    def _credit_silent(self, still: list[TrackedRank], now: float) -> None:
        """Credit silent ranks with the steps of the ranks that wait for them.

        Every rank took part in a finished step with collectives: a silent rank has finished all steps before it.
        """
        waiting = [
            each.progress
            for each in still
            if each.progress.latest.collective and each.progress.per_step_collectives > 0 and not each.ended
        ]
        reached = min((progress.steps_seen for progress in waiting), default=0) - 1
        for tracked in still:
            progress = tracked.progress
            if progress not in waiting and progress.silence(now) > SILENT_S:
                progress.peer_steps = max(progress.peer_steps, reached)

    def _still_state(self, tracked: TrackedRank, view: RankView, now: float) -> list[Message]:
        state = tracked.name
        if state in ("stopped", "held") or tracked.cut_off or tracked.stuck_since is not None:
            return []
        verdict = self.verdict
        if verdict is not None and tracked.rank in verdict.hung and verdict.kind != "ahead":
            named = verdict.views.get(tracked.rank)
            inside = verdict.kind == "missing" and verdict.collective and not view.absent
            missed = f"not in {collective(verdict.collective)}, " if inside else ""
            return self._set(tracked, "hung", missed + (where(named) if named is not None else ""))
        silence = tracked.progress.silence(now)
        if silence > (UNREACHABLE_ALIVE_S if tracked.is_alive else UNREACHABLE_S):
            words = "its process lives but sends nothing" if tracked.is_alive else "nothing heard of it"
            return self._set(tracked, "unreachable", words)
        if verdict is not None and tracked.rank in verdict.views:
            hung = f" for rank {verdict.hung[0]}" if len(verdict.hung) == 1 else ""
            place = view.evidence.place if view.evidence is not None else NOWHERE
            within = f"in {collective(view.call)}" if view.inside else where(view)
            within = f"in {place.call}, {place.line}" if place.for_all else within
            cannot = "" if verdict.hung else f": {_WHY.get(verdict.kind, 'cannot tell why')}"
            return self._set(tracked, "waiting", f"{within}{hung}{cannot}")
        usual = tracked.progress.usual_max.get(tracked.progress.phase, 0.0)
        if view.inside and view.age > max(WAIT_SHOWN_S, WAIT_FACTOR * usual):
            return self._set(tracked, "waiting", f"in {collective(view.call)}")
        return self._moves(tracked) if state in ("waiting", "hung") else []

    def _end_without_launcher(self, now: float) -> list[Message]:
        if not self.ranks or not all(tracked.ended for tracked in self.ranks.values()):
            self._all_ended_at = None
            return []
        if self._all_ended_at is None:
            self._all_ended_at = now
        if (self.run_state is not None and self.run_state.is_over) or now - self._all_ended_at < 2 * GOODBYE_GRACE_S:
            return []
        if all(tracked.name == "finished" for tracked in self.ranks.values()):
            return self._set_run("finished")
        return self._set_run("stopped" if -1 in self.kill_asked else "failed")

    def _set(self, tracked: TrackedRank, state: RankStateName, text: str = "") -> list[Message]:
        known, fact, hello = tracked.state, tracked.fact, tracked.hello
        code, signal = (None, None) if tracked.is_alive else tracked.exit_status
        new = (state, text, code, signal)
        if known is not None and (known.state, known.text, known.exit_code, known.signal) == new:
            return []
        since = known.since if known is not None and known.state == state else self.now
        if state in ("waiting", "hung", "unreachable") and since == self.now:
            since = tracked.progress.moved_at
        pid = hello.pid if hello is not None else fact.pid if fact is not None else 0
        message = RankState(tracked.rank, state, self.now, text, since, pid, code, signal)
        tracked.state = message
        self._changes.append(message)
        return [message]

    def _set_run(self, state: RunStateName, text: str = "", exit_code: int | None = None) -> list[Message]:
        known = self.run_state
        if known is not None and (known.state, known.text, known.exit_code) == (state, text, exit_code):
            return []
        if known is not None and known.state == "stopping" and state == "training":
            return []
        self.run_state = RunState(state, self.now, text, exit_code)
        self._changes.append(self.run_state)
        return [self.run_state]
