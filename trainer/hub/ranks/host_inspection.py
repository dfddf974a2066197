"""Inspects ranks without their cooperation on all hosts: on this one in a thread, on others through their agents."""

import contextlib
from collections.abc import Collection

import msgspec

from ....protocol.messages import verbs
from ....protocol.messages.control import Result
from ...host.flow import in_thread
from ...host.inspection import nccl_ras
from ...host.inspection.activity import Activity
from ...host.inspection.rank_inspection import Inspection, inspect_ranks
from ...host.inspection.stack_dump import DumpTarget
from .agents import Agents
from .rank_hosts import RankAccess
from .rank_link import Answers

AWAY_SECONDS = 3.0
"""Time limit for an agent's answer, including ``stack_dump.WRITE_SECONDS`` for a rank to write its stacks."""


class HostInspection:
    """Inspects ranks. Main loop only. ``agents`` are those of other hosts."""

    def __init__(self, access: RankAccess, agents: Agents) -> None:
        self._access = access
        self._tracker = access.tracker
        self._agents = agents

    async def inspect(self, silent: Collection[int], nccl_address: str = "") -> Inspection:
        """Inspect all ranks of this host and the silent ones of others; takes seconds.

        Silent ranks are signalled to write their stacks; NCCL's RAS service is asked if its address is known.
        """
        here = self.targets()
        pids = {rank: tracked.hello.pid for rank, tracked in self._tracker.ranks.items() if tracked.hello is not None}
        answers = await self._ask_agents(silent)
        nothing = Inspection({}, {}, {})  # then only the ranks' own answers are used

        def inspect() -> Inspection:
            seen = inspect_ranks(here, silent)
            nccl = nccl_ras.launched(nccl_ras.query(nccl_address), pids) if nccl_address else {}
            return seen._replace(nccl=nccl)

        seen = await in_thread(inspect, self._access.post, "inspect", nothing)
        return _together(seen, answers)

    async def _ask_agents(self, silent: Collection[int]) -> Answers:
        agents = [agent for agent in self._agents.reachable() if set(silent) & set(agent.ranks)]
        if not agents:
            return {}
        peers = {agent.identity: place for place, agent in enumerate(agents)}
        facts = [fact for agent in agents for fact in agent.facts.values()]
        away = [self._target(fact.rank, fact.pid, fact.start_ticks) for fact in facts]
        asked = [(target.rank, target.pid, target.start_ticks, target.dump) for target in away]
        return await self._access.link.ask_agents(verbs.Look(asked, sorted(silent)), peers, AWAY_SECONDS)

    def targets(self) -> list[DumpTarget]:
        """Return the ranks of this host, with their signals for writing stacks."""
        return [
            self._target(target.rank, target.pid, target.start_ticks) for target in self._access.rank_hosts.targets()
        ]

    def _target(self, rank: int, pid: int, start_ticks: int) -> DumpTarget:
        tracked = self._tracker.ranks.get(rank)
        hello = tracked.hello if tracked is not None else None
        same = hello is not None and (hello.pid, hello.start_ticks) == (pid, start_ticks)
        return DumpTarget(rank, pid, start_ticks, hello.self_dump if hello is not None and same else None)


def _together(here: Inspection, answers: Answers) -> Inspection:
    for answer in answers.values():
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            _add(here, answer)
    return here


def _add(seen: Inspection, answer: Result) -> None:
    seen.stacks.update({int(rank): str(text) for rank, text in answer.data.get("stacks", {}).items()})
    seen.why.update({int(rank): str(text) for rank, text in answer.data.get("why", {}).items()})
    for rank, found in answer.data.get("activities", {}).items():
        seen.activities[int(rank)] = msgspec.convert(found, Activity)
