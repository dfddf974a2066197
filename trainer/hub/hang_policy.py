"""Acts on hangs without a user's intervention: ``--on-hang`` and ``--exit-timeout``.

- A verdict that has lasted ``--hang-grace`` (30 s) triggers one action: ``stacks`` writes the stacks of all ranks to a
  file of the run, ``stop`` interrupts the ranks as ctrl-c does and kills those left 60 s later, ``kill`` kills.
  ``stop`` and ``kill`` need proof that no further progress is possible (``protocol.analysis.stalls.proof``). Ranks held
  at an out-of-memory error do not hang, and a run whose ranks are all stopped by a signal is paused, not hung.
- Once a rank has finished, the other ranks are killed after ``--exit-timeout`` without progress of any rank or work of
  its processes (in evaluation and checkpointing, after that phase's time limit). The training was complete, so this is
  reported separately from a hang.

Stacks are saved first in every case.
"""

import contextlib
import time
from typing import Literal

from ...protocol.analysis.findings.finding import Condition, Finding, Resolution, resolved
from ...protocol.analysis.hub_facts import HangActionFacts, LateExit, UnprovenHangFacts, hang_cause
from ...protocol.analysis.stalls.judge import RankFacts, Verdict, unproven
from ...protocol.host.process import write_private
from ...protocol.messages import control
from ...protocol.messages.control import Result
from ...protocol.run.end import read_end_request, write_end_request
from ...protocol.text import sanitize
from ..host import loop
from .commands import Kills
from .core import Core
from .inspection import StallProbe

STOP_SECONDS = 60.0  # Time that interrupted ranks may take to end before they are killed
SURE_SECONDS = 3.0  # A time limit must have been exceeded for this long by the hub's own clock
_LONG_PHASES = ("eval", "generate", "checkpoint")

Cause = Literal["hang", "hang-at-exit"]


class HangPolicy:
    """Acts on hangs according to the run's options. Main loop only."""

    def __init__(self, core: Core, stall_probe: StallProbe, kills: Kills) -> None:
        options = core.file.options
        self._core = core
        self._run = core.run
        self._on_hang = options.on_hang
        self._grace = options.hang_grace
        self._exit_timeout = options.exit_timeout
        self._analysis = core.analysis
        self._tracker = core.analysis.tracker
        self._stall_probe = stall_probe
        self._kills = kills
        self._standing: tuple[object, float] | None = None  # The verdict, by kind and named ranks, and when it began
        self._acted: object = None
        self._spared: object = None  # The verdict for which missing proof has been reported
        self._kill_at: float | None = None
        self._killed = False
        self._why = ""
        self._cause: Cause = "hang"
        self._quiet_since: float | None = None

    def tick(self, now: float) -> None:
        """Act if an action is due; ``now`` is ``time.monotonic``."""
        if self._killed or self._being_ended():
            return
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill()
            return
        self._check_hang(now)
        if self._exit_timeout and self._kill_at is None:
            self._check_exit(now)

    def _being_ended(self) -> bool:
        """Return whether the run's end was requested, or the run has ended."""
        state = self._tracker.run_state
        if state is not None and state.is_over:
            return True
        return self._kill_at is None and state is not None and state.state == "stopping"

    def _check_hang(self, now: float) -> None:
        verdict = self._tracker.verdict
        if self._on_hang == "warn" or verdict is None or self._is_wanted(verdict):
            self._standing = None
            if self._spared is not None:
                self._spared = None
                self._analysis.put(resolved(Condition("unproven_hang"), Resolution("resumed")))
            return
        # The waiting ranks may change while the same rank blocks them.
        stall = (verdict.kind, verdict.hung)
        if self._standing is None or self._standing[0] != stall:
            self._standing = (stall, now)
        if now - self._standing[1] < self._grace or self._acted == stall:
            return
        if self._on_hang != "stacks" and (missing := self._unproven(verdict)):
            if self._spared != stall:  # reported once per verdict
                self._spared = stall
                facts = UnprovenHangFacts(f"--on-hang {self._on_hang}", missing, verdict)
                self._analysis.put(Finding("unproven_hang", facts))
            return
        self._acted = stall
        cause: Cause = "hang-at-exit" if verdict.kind == "exit" else "hang"
        self._act(now, self._on_hang, "--on-hang", verdict, cause)

    def _unproven(self, verdict: Verdict) -> str:
        now = time.time()
        facts: dict[int, RankFacts] = {}
        for rank, tracked in self._tracker.ranks.items():
            view = tracked.view(now)
            if view.finished:
                continue
            found = view.evidence
            doing = found.place.doing if found is not None else ""
            may_resume = doing == "network" or (found is not None and found.may_resume)
            blocked = bool(view.inside) or doing in ("collective", "device", "backward")
            quiet = found.quiet if found is not None else None
            facts[rank] = RankFacts(view.limit, quiet, view.absent == "gone", may_resume, blocked)
        return unproven(verdict.kind, verdict.sure, verdict.waiting, verdict.hung, facts)

    def _is_wanted(self, verdict: Verdict) -> bool:
        states = {rank: t.state.state for rank, t in self._tracker.ranks.items() if t.state is not None}
        held = bool(verdict.hung) and all(states.get(rank) == "held" for rank in verdict.hung)
        paused = bool(states) and all(state in ("stopped", "finished", "gone") for state in states.values())
        # A host that is cut off does not prove a hang: the state of its ranks is unknown, and they may be running.
        return held or paused or verdict.kind == "unreachable"

    def _check_exit(self, now: float) -> None:
        ranks = list(self._tracker.ranks.values())
        finished = [each for each in ranks if each.goodbye is not None and each.goodbye.reason == "finished"]
        known = max((rank.hello.world_size for rank in ranks if rank.hello is not None), default=0) <= len(ranks)
        if not finished or not known:
            self._quiet_since = None
            return
        clock = time.time()
        moved = [max(each.goodbye_at, self._stall_probe.worked_at.get(each.rank, 0.0)) for each in finished]
        patience = self._exit_timeout
        for tracked in ranks:
            if not tracked.ended and tracked.goodbye is None:
                moved += [tracked.progress.moved_at, self._stall_probe.worked_at.get(tracked.rank, 0.0)]
                if tracked.progress.phase in _LONG_PHASES:
                    patience = max(patience, tracked.progress.limit())
        quiet = clock - max(moved)
        if quiet < patience:
            self._quiet_since = None
            return
        # After a clock jump, or when the hub was frozen or restarted, all limits seem exceeded at once: that must not
        # kill a run.
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < min(SURE_SECONDS, patience):
            return
        left = [tracked.rank for tracked in ranks if tracked.fact is not None and tracked.fact.alive]
        late = LateExit(len(finished), len(ranks), quiet, left)
        self._act(now, "kill", "--exit-timeout", late, "hang-at-exit")

    def _act(self, now: float, what: str, option: str, found: Verdict | LateExit, cause: Cause) -> None:
        why = hang_cause(found)
        path = self._save(why)
        option = f"{option} {what}" if option == "--on-hang" else f"{option} {self._exit_timeout:g}"
        facts = HangActionFacts(what, option, found, path)
        if what == "stacks":
            loop.start(self._stall_probe.read_native(self._core.rank_hosts.ranks, why))
            self._analysis.put(Finding("hang_action", facts))
            return
        self._why, self._cause = why, cause
        with contextlib.suppress(OSError):  # a full disk must not keep a hung run alive
            write_end_request(self._run, option, "hub", why=why, cause=cause)
        verb = control.Stop(reason=why) if what == "stop" else control.Kill(reason=why)
        self._analysis.put(Finding("hang_action", facts, severity="error"))
        self._core.emit(verb.command("hub-policy"))
        self._kill_at = now + (STOP_SECONDS if what == "stop" and self._kills.interrupt() else 0.0)

    def _kill(self) -> None:
        self._killed = True
        end_request = read_end_request(self._run)
        if end_request is None or not end_request.cause:
            with contextlib.suppress(OSError):
                write_end_request(self._run, "--on-hang", "hub", why=self._why, cause=self._cause)
        loop.start(self._end_run())

    async def _end_run(self) -> None:
        outcome = await self._kills.kill([], None)
        data = {**outcome.data, "asked_by": "hub"}
        self._core.emit(Result("hub-policy", outcome.ok, "kill", outcome.text, data, time.time()))

    def _save(self, why: str) -> str:
        """Write the latest stacks of all ranks to a file of the run; return its path, or an empty string."""
        stacks = self._stall_probe.latest()
        if not stacks:
            return ""
        path = self._run.path / "stacks" / f"{time.strftime('%Y%m%d-%H%M%S')}.txt"
        parts = [sanitize(why), *self._stall_probe.grouped(), ""]
        for rank, one in sorted(stacks.items()):
            parts += [f"==== rank {rank} ({one.taken_by or 'asked'})", one.text, ""]
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(path, "\n".join(parts).encode())
            return str(path)
        return ""
