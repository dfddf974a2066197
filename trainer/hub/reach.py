"""What is found of ranks without their help, wherever they run: here in a thread, on other hosts by their agents.

Their stacks by a signal, for those that do not answer, and what their processes do.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec

from ...protocol.control import Result
from ...protocol.telemetry import SelfDump
from .. import activity, processes
from ..activity import Activity
from . import dumping
from .agents import Agents
from .dumping import DumpTarget
from .rankbook import RankBook
from .ranklink import Answers, RankLink
from .states import RankTracker

AWAY_SECONDS = 3.0
"""How long an agent may take; a rank has ``dumping.WRITE_SECONDS`` of that to write its stacks."""


class Seen(NamedTuple):
    """What was found, by rank."""

    stacks: dict[int, str]
    """Of those that were to be signalled and wrote their stacks."""
    why: dict[int, str]
    """Of those that did not: why not."""
    activities: dict[int, Activity]


class LookArgs(msgspec.Struct):
    """What an agent is asked: the ranks to look at, and which of them to signal."""

    targets: list[tuple[int, int, int, SelfDump | None]] = []
    silent: list[int] = []


class Reach:
    """Looks at ranks. Main loop only.

    Args:
        tracker: knows how each rank is made to write its stacks.
        book: which ranks run on this host.
        link: the line to the agents.
        agents: the agents of other hosts.
        post: has the main loop make a call; any thread.
    """

    def __init__(
        self,
        tracker: RankTracker,
        book: RankBook,
        link: RankLink,
        agents: Agents,
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self._tracker = tracker
        self._book = book
        self._link = link
        self._agents = agents
        self._post = post

    def look(self, silent: Collection[int], done: Callable[[Seen], None]) -> None:
        """Look at all ranks of this host and at the silent ones of others; ``done`` is called in the main loop.

        Args:
            silent: ranks to make write their stacks.
            done: gets what was found, within seconds.
        """
        here = self.targets()
        agents = [agent for agent in self._agents.reachable() if set(silent) & set(agent.ranks)]
        if not agents:
            self._look_here(here, silent, done)
            return
        peers = {agent.identity: place for place, agent in enumerate(agents)}
        facts = [fact for agent in agents for fact in agent.facts.values()]
        away = [self._target(fact.rank, fact.pid, fact.start_ticks) for fact in facts]
        asked = [(target.rank, target.pid, target.start_ticks, target.dump) for target in away]
        args = msgspec.to_builtins(LookArgs(asked, sorted(silent)))

        def answered(answers: Answers) -> None:
            self._look_here(here, silent, lambda seen: done(_together(seen, answers)))

        self._link.ask_agents("look", peers, AWAY_SECONDS, answered, args)

    def targets(self) -> list[DumpTarget]:
        """List the ranks of this host, with how they are made to write their stacks."""
        return [self._target(target.rank, target.pid, target.start_ticks) for target in self._book.targets()]

    def _target(self, rank: int, pid: int, start_ticks: int) -> DumpTarget:
        tracked = self._tracker.ranks.get(rank)
        hello = tracked.hello if tracked is not None else None
        same = hello is not None and (hello.pid, hello.start_ticks) == (pid, start_ticks)
        return DumpTarget(rank, pid, start_ticks, hello.self_dump if hello is not None and same else None)

    def _look_here(self, targets: list[DumpTarget], silent: Collection[int], done: Callable[[Seen], None]) -> None:
        def look() -> None:
            try:
                found = look_here(targets, silent)
            except Exception:  # a process table that changes while it is read
                found = Seen({}, {}, {})
            self._post(lambda: done(found))

        try:
            threading.Thread(target=look, name="look", daemon=True).start()
        except RuntimeError:  # no more threads are to be had: what ranks say of themselves has to do
            self._post(lambda: done(Seen({}, {}, {})))


def look_here(targets: list[DumpTarget], silent: Collection[int]) -> Seen:
    """Look at ranks of this host, and have the silent ones write their stacks; waits, for a thread that may."""
    signalled = [target for target in targets if target.rank in silent]
    stacks = dumping.by_signal(signalled)
    why = {target.rank: why_silent(target) for target in signalled if target.rank not in stacks}
    table = processes.table()
    now = time.monotonic()
    activities: dict[int, Activity] = {}
    for target in targets:
        process = table.get(target.pid)
        if process is not None and process.start_ticks == target.start_ticks and process.alive:
            activities[target.rank] = activity.look(target.pid, target.dump, table, now)
    return Seen(stacks, why, activities)


def look_as_asked(args: dict[str, Any]) -> dict[str, Any]:
    """Do what ``LookArgs`` ask, on an agent's host; return the answer's data.

    Raises:
        msgspec.ValidationError: they are not that.
    """
    asked = msgspec.convert(args, LookArgs)
    seen = look_here([DumpTarget(*target) for target in asked.targets], asked.silent)
    return {
        "stacks": {str(rank): text for rank, text in seen.stacks.items()},
        "why": {str(rank): text for rank, text in seen.why.items()},
        "activities": {str(rank): list(found) for rank, found in seen.activities.items()},
    }


def why_silent(target: DumpTarget) -> str:
    """Say why a rank's stacks could not be had, from its process."""
    process = processes.read(target.pid)
    if process is None or process.start_ticks != target.start_ticks or not process.alive:
        return "its process is gone"
    if process.state in ("T", "t"):
        return f"its process is stopped by a signal; 'kill -CONT {target.pid}' lets it go on"
    if process.state == "D":
        where = activity.wchan(target.pid, target.pid)
        return (
            f"its process is in uninterruptible sleep{f' in {where}' if where else ''}: the kernel has to return first"
        )
    return "no answer: native code may hold Python's lock, and a signal could not be used"


def _together(here: Seen, answers: Answers) -> Seen:
    for answer in answers.values():
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            _add(here, answer)
    return here


def _add(seen: Seen, answer: Result) -> None:
    seen.stacks.update({int(rank): str(text) for rank, text in answer.data.get("stacks", {}).items()})
    seen.why.update({int(rank): str(text) for rank, text in answer.data.get("why", {}).items()})
    for rank, found in answer.data.get("activities", {}).items():
        seen.activities[int(rank)] = msgspec.convert(found, Activity)
