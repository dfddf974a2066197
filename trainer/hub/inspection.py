"""Collects stacks on request, also of ranks that cannot answer, or the reason why there are none."""

import contextlib
import time
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...protocol.analysis.stalls import evidence
from ...protocol.analysis.stalls.evidence import (
    ASLEEP_S,
    NOWHERE,
    Activity,
    Calls,
    Evidence,
    Frame,
    LockWait,
    Place,
    Work,
    read_calls,
)
from ...protocol.analysis.stalls.judge import Verdict
from ...protocol.analysis.stalls.tracker import TrackedRank
from ...protocol.analysis.stalls.words import of_verdict
from ...protocol.host.process import is_alive
from ...protocol.messages import control
from ...protocol.messages.control import Result
from ...protocol.messages.telemetry import DeviceSample, SelfDump, Stacks, TakenBy
from ...protocol.text import ranks_in_words
from ..host import loop, processes
from ..host.end.kill import Target
from ..host.inspection import inspect, nccl_ras
from ..host.inspection.inspect import DumpTarget, Inspection, inspect_ranks
from ..host.loop import in_thread
from .agents import Agents
from .foreign import ForeignRanks
from .ranks import Answers, RankAccess

T = TypeVar("T")
AWAY_SECONDS = 3.0  # Limit for an agent's answer, with ``stack_dump.WRITE_SECONDS`` for a rank to write its stacks


class HostInspection:
    """Inspects ranks. Main loop only. ``agents`` are those of other hosts, ``foreign`` ranks without a probe."""

    def __init__(self, access: RankAccess, agents: Agents, foreign: ForeignRanks | None = None) -> None:
        self._access = access
        self._tracker = access.tracker
        self._agents = agents
        self.foreign = foreign

    async def inspect(self, silent: Collection[int], nccl_address: str = "") -> Inspection:
        """Inspect all ranks of this host and the silent ones of others; takes seconds.

        Silent ranks are signalled to write their stacks; NCCL's RAS service is asked if its address is known.
        """
        here = self.targets()
        pids = {rank: tracked.hello.pid for rank, tracked in self._tracker.ranks.items() if tracked.hello is not None}
        answers = await self._ask_agents(silent)
        nothing = Inspection({}, {}, {})  # then only the ranks' own answers are used

        outside = self.foreign.targets() if self.foreign is not None else []
        asked = set(silent) - {target.rank for target in outside}

        def inspect() -> Inspection:
            seen = inspect_ranks(here, asked)
            if self.foreign is not None:
                texts, why = self.foreign.observer.stacks(target for target in outside if target.rank in silent)
                seen.stacks.update(texts)
                seen.why.update(why)
            nccl = nccl_ras.launched(nccl_ras.query(nccl_address), pids) if nccl_address else {}
            return seen._replace(nccl=nccl)

        seen = await in_thread(inspect, self._access.post, "inspect", nothing)
        for answer in answers.values():
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                _add(seen, answer)
        return seen

    @property
    def nccl(self) -> str:
        """Where NCCL's RAS service of ranks without a probe answers; empty: unknown."""
        return self.foreign.nccl if self.foreign is not None else ""

    async def _ask_agents(self, silent: Collection[int]) -> Answers:
        agents = [agent for agent in self._agents.reachable() if set(silent) & set(agent.ranks)]
        if not agents:
            return {}
        peers = {agent.identity: place for place, agent in enumerate(agents)}
        facts = [fact for agent in agents for fact in agent.facts.values()]
        away = [self._target(fact.rank, fact.pid, fact.start_ticks) for fact in facts]
        asked = [(target.rank, target.pid, target.start_ticks, target.dump) for target in away]
        return await self._access.link.ask_agents(control.Look(asked, sorted(silent)), peers, AWAY_SECONDS)

    def targets(self) -> list[DumpTarget]:
        """Return the ranks of this host, with their signals for writing stacks."""
        found = self._access.rank_hosts.targets()
        return [self._target(target.rank, target.pid, target.start_ticks) for target in found]

    def _target(self, rank: int, pid: int, start_ticks: int) -> DumpTarget:
        tracked = self._tracker.ranks.get(rank)
        hello = tracked.hello if tracked is not None else None
        same = hello is not None and (hello.pid, hello.start_ticks) == (pid, start_ticks)
        return DumpTarget(rank, pid, start_ticks, hello.self_dump if hello is not None and same else None)


def _add(seen: Inspection, answer: Result) -> None:
    seen.stacks.update({int(rank): str(text) for rank, text in answer.data.get("stacks", {}).items()})
    seen.why.update({int(rank): str(text) for rank, text in answer.data.get("why", {}).items()})
    for rank, found in answer.data.get("activities", {}).items():
        seen.activities[int(rank)] = msgspec.convert(found, Activity)


ANSWER_SECONDS = 1.0
AGAIN_SECONDS = 0.5  # Time limits for ranks' answers: at first, and after a rank has not answered
PROBE_SECONDS = 0.5
QUICK_PROBES = 10
QUICK_PROBES_MUTE = 40
LONGEST_SECONDS = 4.0
LONGEST_MANY_SECONDS = 15.0
MANY_RANKS = 64
"""After ``QUICK_PROBES`` (while a rank's stacks could not be had: ``QUICK_PROBES_MUTE``), pauses between probes double
up to ``LONGEST_SECONDS``; with more ranks than this, ``LONGEST_MANY_SECONDS``."""
WORK_KEPT_SECONDS = 8.0  # Seconds for which a rank counts as working after it was found at work
RESTLESS_FACTOR = 4.0
"""A rank that has woken up counts as asleep again once it has slept this many times longer than it had before it woke:
the waits of a retry grow by a factor of two or three."""
DEVICE_BUSY_PERCENT = 5.0
DEVICE_FRESH_SECONDS = 3.0
"""A device counts as computing for its rank above this utilization, in a sample at most this many seconds old."""
SAVED_RANKS = 64  # Maximum number of ranks whose stacks are saved with a verdict, those it names first
SETTLE_SECONDS = 0.05
SETTLE_LOOKS = 40  # Interval and number of looks at a paused thread until it sleeps again
NATIVE_RANKS = 2  # Number of named ranks that py-spy reads too; it pauses them for a moment


class _Seen(NamedTuple):
    frames: tuple[Frame, ...]
    first: Activity  # When it was first found asleep in these frames
    last: Activity
    stood: Activity  # Since when it stands in these frames, asleep or spinning
    quiet: Activity  # Start of the idle time of its process tree
    worked: float  # When last found at work, ``time.monotonic`` of this host; minus infinity: not since the stall began
    work: Work
    slept: bool  # Whether it has been found asleep since its last progress
    woke_after: float  # Seconds of the longest sleep from which it has woken up since; 0: it has not
    moved: float  # Time of its last progress at that point

    @property
    def asleep(self) -> float:
        """Seconds for which it has slept in these frames."""
        return self.last.time - self.first.time

    @property
    def restless(self) -> bool:
        """Whether it has woken up, and has not slept for much longer since."""
        return self.woke_after > 0 and self.asleep <= RESTLESS_FACTOR * self.woke_after


class StallProbe:
    """Probes the ranks while a stall is suspected, and passes the evidence to the tracker. Main loop only.

    Ranks are asked for their stacks; a rank that does not answer is signalled to write them. Nothing is recorded unless
    a verdict follows: then the stacks it is based on are saved first.
    """

    def __init__(self, access: RankAccess, inspection: HostInspection) -> None:
        self._access = access
        self._tracker = access.tracker
        self._inspection = inspection
        self._under_way = False
        self._unanswered = False
        self._nccl_address = inspection.nccl  # Where NCCL's RAS service answers; empty: no rank uses NCCL
        self._probes = 0
        self._next = 0.0
        self._seen: dict[int, _Seen] = {}
        self._stacks: dict[int, Stacks] = {}
        self._saved_for: object = None
        self._saved: set[int] = set()
        """Signature of the verdict whose stacks are saved, and the ranks whose stacks are."""
        self._native_reads = 0  # Number of reads by py-spy so far, and whether one is under way
        self._is_reading = False
        self._paused: dict[int, int] = {}  # Context switches of ranks' training threads that those reads have caused
        self._utilization: dict[int, tuple[float, float]] = {}
        """Percent of time that the rank's device computed, and when that was received."""
        self.worked_at: dict[int, float] = {}
        """When ranks were last found at work, seconds since the epoch; only ranks probed in this stall."""

    def sample(self, sample: DeviceSample) -> None:
        """Record the use of the ranks' devices."""
        if sample.kind == "gpu" and sample.utilization_percent is not None:
            for process in sample.processes:
                if process.rank is not None:
                    self._utilization[process.rank] = sample.utilization_percent, time.monotonic()

    def tick(self) -> None:
        """Start a probe if one is due; save the stacks that a new verdict is based on."""
        if not self._tracker.suspected:
            self._probes, self._saved_for = 0, None
            self._seen.clear()
            self._stacks.clear()
            self.worked_at.clear()
            return
        verdict = self._tracker.verdict
        if verdict is not None and self._probes and not self._under_way:
            self._save(verdict)
        if not self._under_way and not self._is_reading and time.monotonic() >= self._next:
            loop.start(self._probe())

    async def _probe(self) -> None:
        """Request stacks of all ranks, inspect those that do not answer, and assemble the evidence."""
        ranks = [rank for rank, tracked in self._tracker.ranks.items() if not tracked.ended and tracked.goodbye is None]
        elsewhere = self._access.rank_hosts.any_elsewhere
        verb = control.Stacks(reason="a stall is suspected", calls=True, activity=elsewhere, quiet=True)
        seconds = AGAIN_SECONDS if self._unanswered else ANSWER_SECONDS
        self._under_way, reads = True, self._native_reads
        try:
            answers = await self._access.link.ask(verb, ranks, seconds)
            silent = {rank for rank in ranks if rank not in answers}
            self._unanswered = bool(silent)
            addresses = (str(answer.data["nccl"]) for answer in answers.values() if answer.data.get("nccl"))
            self._nccl_address = next(addresses, self._nccl_address)
            local = await self._inspection.inspect(silent, self._nccl_address)
            if reads == self._native_reads:  # otherwise ranks may have been paused between two of these figures
                self._found(answers, local)
        finally:
            self._under_way = False

    def _found(self, answers: Answers, local: Inspection) -> None:
        self._probes += 1
        mute = any(not tracked.ended and rank not in self._stacks for rank, tracked in self._tracker.ranks.items())
        longer = min(10, max(0, self._probes - (QUICK_PROBES_MUTE if mute else QUICK_PROBES)))
        longest = LONGEST_SECONDS if len(self._tracker.ranks) <= MANY_RANKS else LONGEST_MANY_SECONDS
        self._next = time.monotonic() + min(longest, PROBE_SECONDS * 2**longer)
        now = time.time()
        self._tracker.launcher = self.launcher()
        for rank, tracked in self._tracker.ranks.items():
            answer = answers.get(rank)
            action = local.activities.get(rank) or _activity_of(answer)
            text, thread, by = _text_of(answer)
            if not text and rank in local.stacks:
                dump = _dump_of(tracked)
                by = "outside" if dump is None and self._inspection.foreign is not None else "signal"
                text, thread = local.stacks[rank], dump.thread if dump is not None else ""
            if action is not None and rank in self._paused:
                action = action._replace(switches=action.switches - self._paused[rank])
            if text:
                self._stacks[rank] = Stacks(rank, now, text, "", thread, by)
            elif rank in self._stacks and self._has_slept_since(rank, action, tracked.progress.moved_at):
                text, thread, by = self._stacks[rank].text, self._stacks[rank].thread, self._stacks[rank].taken_by
            elif action is None:
                continue
            else:
                self._stacks.pop(rank, None)  # it has run since they were taken
            threads = evidence.parse(text)
            found = evidence.training_thread(threads, thread)
            frames = evidence.visible(found.frames) if found is not None else ()
            data = answer.data if answer is not None else {}
            calls = read_calls(data.get("calls"))
            wakes = "worker_wakes" if evidence.waits_for_loader_worker(frames) else "wakes"
            before = tracked.evidence
            same = before is not None and before.taken >= tracked.progress.moved_at
            if before is not None and same and before.calls.source == "recorder" != calls.source:
                calls = before.calls  # it has made no progress, and the earlier answer has more
            place = evidence.where(frames) if frames else NOWHERE
            if evidence.waits_for_loader_worker(frames):
                place = evidence.with_worker(place, threads)
            seen = self._compare(rank, frames, place, calls, action, tracked.progress.moved_at)
            lingers = seen is not None and time.monotonic() - seen.worked <= WORK_KEPT_SECONDS
            tracked.evidence = Evidence(
                taken=now,
                by=by,
                frames=frames,
                place=place,
                asleep=seen.asleep if seen is not None else 0.0,
                stands=seen.last.time - seen.stood.time if seen is not None else 0.0,
                restless=seen is not None and seen.restless,
                work=seen.work if seen is not None and lingers else "",
                quiet=seen.last.time - seen.quiet.time if seen is not None else None,
                # A rank asked by a signal is in native code that holds the GIL, not in a data set's retry.
                timed=by in ("probe", "outside") and action is not None and _sleeps_for_a_time(data, action, frames),
                wakes=_converted(data.get(wakes), float),
                loops=_converted(data.get("loops"), dict[str, tuple[tuple[int, int], ...]]) or {},
                threads=any(evidence.is_of_script(one) for one in threads if one is not found and not one.worker),
                gathers=int(_converted(data.get("gathers"), float) or 0),
                lock=_converted(data.get("lock"), LockWait) or local.locks.get(rank),
                process=action.state if action is not None else "",
                wchan=action.wchan if action is not None else "",
                utilization=self._utilization[rank][0] if rank in self._utilization else None,
                calls=calls,
                nccl=local.nccl.get(rank, Calls()),
                steps=tracked.progress.steps_seen,
            )

    def _has_slept_since(self, rank: int, action: Activity | None, moved: float) -> bool:
        """Return whether a rank's training thread has not run since its stacks were taken: then they still hold."""
        before = self._seen.get(rank)
        if action is None or before is None or before.moved != moved or not before.frames:
            return False
        return action.state == before.last.state == "S" and action.switches == before.last.switches

    def _compare(
        self, rank: int, frames: tuple[Frame, ...], place: Place, calls: Calls, action: Activity | None, moved: float
    ) -> _Seen | None:
        before = self._seen.get(rank)
        if action is None:
            self._seen.pop(rank, None)
            return None
        if before is None or before.moved != moved:
            self._seen[rank] = _Seen(frames, action, action, action, action, float("-inf"), "", False, 0.0, moved)
            return self._seen[rank]
        polls = evidence.waits_for_loader_worker(frames)
        work = action.work_since(before.last, polls=polls) or action.work_since(before.quiet, polls=polls)
        now = time.monotonic()  # not action.time: that is of the rank's host
        spins = work == "computes" and frames == before.frames and not action.computes_besides(before.last)
        waits = place.doing in ("collective", "device") or _is_unfinished(calls)
        if waits and (spins or (work == "computes" and place.doing in ("collective", "device"))):
            work = ""  # it polls for its device or its peers
        if work in ("", "computes") and self._device_computes(rank, place, calls, now, spins):
            work = "device"
        stands = not work and frames == before.frames
        asleep = not work and action.state == before.last.state == "S" and frames == before.frames
        slept = before.slept or (asleep and action.time - before.first.time >= ASLEEP_S)
        # Observations are too far apart to cover each sleep of a retry: waking up at the same line is sufficient.
        has_woken = before.last is not before.first and action.switches > before.last.switches
        retries = has_woken and frames == before.frames and not polls
        woken = (before.slept and not asleep) or retries
        if work:
            self.worked_at[rank] = time.time()
        found = before._replace(frames=frames, last=action, work=work or before.work, slept=slept)
        if not asleep:
            found = found._replace(first=action)
        if not stands:
            found = found._replace(stood=action)
        if work:
            found = found._replace(quiet=action, worked=now)
        if woken:
            found = found._replace(woke_after=max(before.woke_after, action.time - before.first.time))
        self._seen[rank] = found
        return found

    def _device_computes(self, rank: int, place: Place, calls: Calls, now: float, spins: bool) -> bool:
        """Return whether a rank waits for work of its device that is no collective.

        NVML's utilization is the device's, which other processes may use: it counts only while the rank waits for it.
        In a call of a collective it does not: until the rank is connected to its peers, the flight recorder reports the
        collective as completed (PyTorch queries a CUDA event that was not recorded yet).
        """
        if _is_unfinished(calls) or place.doing == "collective":
            return False
        if calls.source == "recorder" and place.doing == "device":
            return True
        percent, heard = self._utilization.get(rank, (0.0, 0.0))
        is_busy = percent > DEVICE_BUSY_PERCENT and now - heard < DEVICE_FRESH_SECONDS
        return is_busy and (spins or place.doing in ("device", "backward"))

    def _save(self, verdict: Verdict) -> None:
        """Append the stacks to the stream once per verdict, those of its ranks first; request native stacks of these.

        Stacks that a rank of the verdict writes later, on a signal, are added.
        """
        is_new = self._saved_for != verdict.signature
        if is_new:
            self._saved_for, self._saved = verdict.signature, set()
        named = [*verdict.hung, *verdict.waiting]
        order = list(dict.fromkeys([*named, *sorted(self._stacks)] if is_new else named))[:SAVED_RANKS]
        ranks = [rank for rank in order if rank in self._stacks and rank not in self._saved]
        if not is_new and not ranks:
            return
        why = of_verdict(verdict).title
        for rank in ranks:
            stacks = self._stacks[rank]
            self._access.emit(Stacks(rank, stacks.time, stacks.text, why, stacks.thread, stacks.taken_by))
        self._saved.update(ranks)
        if is_new and verdict.hung and inspect.py_spy() and self._inspection.foreign is None:
            loop.start(self.read_native(list(verdict.hung[:NATIVE_RANKS]), why))

    async def read_native(self, ranks: list[int], reason: str) -> dict[int, tuple[str, str]]:
        """Read native frames of ranks on this host with py-spy: of each its stacks, or an empty text and the reason."""
        targets = [target for target in self._access.rank_hosts.targets() if target.rank in ranks]
        training = {target.rank: self._training_thread(target) for target in targets}
        paused: dict[int, int] = {}

        def read() -> dict[int, tuple[str, str]]:
            found: dict[int, tuple[str, str]] = dict.fromkeys(ranks, ("", "not on this host"))
            for target in targets:
                process = processes.read(target.pid)
                if process is None or process.start_ticks != target.start_ticks:
                    found[target.rank] = "", "gone"
                else:
                    before = inspect.switches(target.pid, training[target.rank])
                    found[target.rank] = inspect.native(process)
                    _wait_until_asleep(target.pid, training[target.rank])
                    paused[target.rank] = inspect.switches(target.pid, training[target.rank]) - before
            return found

        failed: dict[int, tuple[str, str]] = dict.fromkeys(ranks, ("", "could not be read"))
        self._native_reads += 1
        self._is_reading = True
        try:
            found = await loop.in_thread(read, self._access.post, "py-spy", failed)
        finally:
            self._is_reading = False
            self._native_reads += 1
        if self._inspection.foreign is not None:
            self._inspection.foreign.observer.forgive()
        for rank, switches in paused.items():
            self._paused[rank] = self._paused.get(rank, 0) + switches
        for rank, (text, _) in found.items():
            if text:
                self._access.emit(Stacks(rank, time.time(), text, reason, "", "py-spy"))
        return found

    def _training_thread(self, target: Target) -> int:
        tracked = self._tracker.ranks.get(target.rank)
        dump = _dump_of(tracked)
        return dump.training if dump is not None else target.pid

    def latest(self) -> dict[int, Stacks]:
        """Return the stacks of the last probes, by rank; empty while no stall is suspected."""
        return dict(self._stacks)

    def grouped(self) -> list[str]:
        """Return the ranks' positions, one line per distinct stack."""
        groups = evidence.group({rank: (one.text, one.thread) for rank, one in self._stacks.items()})
        return [f"{ranks_in_words(one.ranks)}: {one.place.text or 'no stack'}" for one in groups]

    def launcher(self) -> str:
        """Return the state of the run's launcher: ``alive``, ``stopped``, ``gone``; empty: there is none."""
        with contextlib.suppress(Exception):
            content = self._access.run.read_run()
            launcher = content.foreign.launcher if content.foreign is not None else content.launcher
            if launcher is None:
                return ""
            process = processes.read(launcher.pid)
            if not is_alive(launcher) or process is None:
                return "gone"
            return "stopped" if process.state in ("T", "t") else "alive"
        return ""


def _dump_of(tracked: TrackedRank | None) -> SelfDump | None:
    return tracked.hello.self_dump if tracked is not None and tracked.hello is not None else None


def _sleeps_for_a_time(data: dict[str, Any], action: Activity, frames: tuple[Frame, ...]) -> bool:
    if evidence.waits_for_loader_worker(frames):
        return action.worker_naps > 0  # the rank itself only wakes up to check whether its worker is alive
    return action.naps or data.get("timed") is True


def _wait_until_asleep(pid: int, thread: int) -> None:
    """Wait for a thread that was paused to fall asleep again, on a busy host later than at once."""
    for _ in range(SETTLE_LOOKS):
        time.sleep(SETTLE_SECONDS)
        if processes.status(pid, thread).get("State", "S").startswith("S"):
            return


def _text_of(answer: Result | None) -> tuple[str, str, TakenBy]:
    if answer is None or not answer.ok:
        return "", "", ""
    data: dict[str, Any] = answer.data
    return str(data.get("text", "")), str(data.get("thread", "")), "probe"


def _activity_of(answer: Result | None) -> Activity | None:
    with contextlib.suppress(TypeError, AttributeError):
        return Activity(*answer.data["activity"]) if answer is not None and "activity" in answer.data else None
    return None


def _is_unfinished(calls: Calls) -> bool:
    return any(call.done is False for call in calls.recent)


def _converted(value: Any, kind: type[T]) -> T | None:
    """Return a part of a rank's answer, or None if there is none that is valid."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(value, kind) if value is not None else None
    return None


class StackRequests:
    """Collects stacks of ranks. Main loop only."""

    def __init__(self, access: RankAccess, inspection: HostInspection, stall_probe: StallProbe) -> None:
        self._access = access
        self._inspection = inspection
        self._stall_probe = stall_probe

    async def collect(self, ranks: list[int], seconds: float, verb: control.Stacks) -> Answers:
        """Return the stacks of ``ranks``, as results by rank.

        A result that is not ok has the reason; ranks of other hosts may be missing.

        Ranks that do not answer in ``seconds`` are signalled; ``verb.native`` reads native frames with py-spy too.
        """
        reason = verb.reason
        answers = await self._access.link.ask(control.Stacks(reason=reason), ranks, seconds)
        silent = [rank for rank in ranks if rank not in answers]
        if silent:
            seen = await self._inspection.inspect(silent)
            for rank in silent:
                if rank in seen.stacks or rank in seen.why:
                    answers[rank] = answer = self._result(rank, seen)
                    if answer.ok:
                        text, thread = str(answer.data["text"]), str(answer.data["thread"])
                        by = answer.data["taken_by"]
                        self._access.emit(Stacks(rank, time.time(), text, reason, thread, by))
        if verb.native:
            native = await self._stall_probe.read_native(ranks, reason or "asked")
            for rank, (text, why) in native.items():
                if rank in answers:
                    answers[rank].data["native" if text else "no_native"] = text or why
        return answers

    def _result(self, rank: int, seen: Inspection) -> Result:
        tracked = self._access.tracker.ranks.get(rank)
        dump = _dump_of(tracked)
        if rank in seen.stacks and dump is None:
            data = {"text": seen.stacks[rank], "thread": "", "taken_by": "outside"}
            return Result("", True, "stacks", "read from its memory, without a pause", data)
        if rank in seen.stacks and dump is not None:
            words = "native code holds Python's lock; written on a signal"
            data = {"text": seen.stacks[rank], "thread": dump.thread, "taken_by": "signal"}
            return Result("", True, "stacks", words, data)
        return Result("", False, "stacks", seen.why.get(rank, "no answer"), {"silent": True})
