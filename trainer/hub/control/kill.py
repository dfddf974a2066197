"""Kills ranks on all hosts, locally with signals, on other hosts through their agents, and merges the outcomes."""

import os
import signal
from collections.abc import Callable
from typing import Any

from ....protocol.errors import UsageError
from ....protocol.host.process import is_alive
from ....protocol.messages import verbs
from ....protocol.messages.control import Result
from ...host.end.interrupt import interrupt_ranks
from ...host.end.kill import KillScope, Outcome, Target, kill
from ...host.flow import Reply
from ..core import Core
from ..ranks.agents import BACK_SECONDS, Agent, Agents
from ..ranks.rank_link import Answers

_AGENT_SECONDS = 30.0
"""Time limit of an escalation and its check of the GPUs."""
_CUT_OFF = (
    "cut off: its processes could not be reached; "
    f"they will be ended if the host is back within {BACK_SECONDS / 60:.0f} min"
)


class Kills:
    """Kills ranks on all hosts. Main loop only.

    ``left`` is called in the main loop with the pids of this host that a kill could not end.
    """

    def __init__(self, core: Core, agents: Agents, left: Callable[[list[int]], object]) -> None:
        self._core = core
        self._rank_hosts = core.rank_hosts
        self.agents = agents
        self._left = left

    def check(self, ranks: list[int]) -> None:
        """Refuse to kill ranks that cannot be reached now.

        Raises:
            UsageError: a rank's host is cut off, or has no agent.
        """
        here = {target.rank for target in self._rank_hosts.targets()}
        for rank in ranks:
            agent = self.agents.of(rank)
            if rank in here or (agent is not None and agent.state == "reachable"):
                continue
            if agent is not None:
                raise UsageError(
                    f"kill: {agent.host}, where rank {rank} runs, is cut off; it can be killed once it is back"
                )
            raise UsageError(
                f"kill: rank {rank} runs on {self._rank_hosts.host_of(rank)}, and no agent there answers for it"
            )

    async def kill(self, ranks: list[int], number: signal.Signals | None) -> Outcome:
        """Kill ``ranks`` (empty: the whole run), on all hosts at the same time; return the outcome.

        ``number`` is the signal to send, None to escalate INT, TERM, KILL.
        """
        targets = [target for target in self._rank_hosts.targets() if not ranks or target.rank in ranks]
        agents = [agent for agent in self.agents.all() if not ranks or set(ranks) & set(agent.ranks)]
        reachable = [agent for agent in agents if agent.state == "reachable"]
        parts = {agent.host: Outcome(False, _CUT_OFF, {}) for agent in agents if agent not in reachable}
        away = self._kill_away(reachable, ranks, number) if reachable else None
        if targets or not ranks:
            parts[""] = await self._kill_here(targets, not ranks, number)
            self._left(parts[""].data.get("left", []))
        if away is not None:
            answers = await away
            parts |= {agent.host: _outcome_of(answers.get(place), agent.now) for place, agent in enumerate(reachable)}
        return _together(parts)

    def _kill_here(self, targets: list[Target], whole_run: bool, number: signal.Signals | None) -> Reply[Outcome]:
        roots, spared = self.launcher_and_spared()
        others = set(self._rank_hosts.targets()) - set(targets)
        scope = KillScope(self._core.run.path, targets, spared, whole_run, roots, others)
        return kill(scope, number, self._rank_hosts.on_gpu, self._core.post)

    def _kill_away(self, agents: list[Agent], ranks: list[int], number: signal.Signals | None) -> Reply[Answers]:
        verb = verbs.Kill(ranks, number.name if number else "", self._rank_hosts.on_gpu)
        peers = {agent.identity: place for place, agent in enumerate(agents)}
        gone: Callable[[int], bool] = lambda place: agents[place].now.state != "reachable"  # noqa: E731
        return self._core.link.ask_agents(verb, peers, _AGENT_SECONDS, gone)

    def interrupt(self) -> bool:
        """Send INT to all ranks on all hosts; return whether any rank is known to have received it."""
        interrupted = interrupt_ranks(self._rank_hosts.targets())
        agents = self.agents.reachable()
        peers = {agent.identity: place for place, agent in enumerate(agents)}
        self._core.link.ask_agents(verbs.Stop(), peers, _AGENT_SECONDS)
        return bool(interrupted or any(agent.alive for agent in agents))

    def launcher_and_spared(self) -> tuple[list[int], list[int]]:
        """Return the launcher's pid, if it is alive, and the pids that a kill must spare."""
        launcher = self._core.run.read_run().launcher
        roots = [launcher.pid] if launcher is not None and is_alive(launcher) else []
        return roots, [*roots, os.getpid()]


def interrupted_on(agents: list[Agent], answers: Answers) -> list[str]:
    """Return, in words, the hosts whose agents interrupted ranks."""
    return [
        f"on {agent.host} {answers[place].text}"
        for place, agent in enumerate(agents)
        if place in answers and answers[place].data.get("signalled")
    ]


def _outcome_of(result: Result | None, agent: Agent) -> Outcome:
    if result is None and agent.state == "left":
        return Outcome(True, "ended with the run, and its agent after it", {})
    if result is None and agent.state == "cut off":
        return Outcome(False, _CUT_OFF, {})
    if result is None:
        return Outcome(False, f"no answer of the agent there in {_AGENT_SECONDS:.0f} s", {})
    return Outcome(result.ok, result.text, result.data)


def _together(parts: dict[str, Outcome]) -> Outcome:
    """Merge the outcomes of all hosts; this host is not named in the result."""
    if set(parts) <= {""}:
        return parts.get("") or Outcome(True, "no process of the run was left", {})
    data: dict[str, Any] = {"ended": [], "left": [], "ranks": [], "seconds": 0.0, "signal": "", "hosts": {}}
    for host, part in parts.items():
        for key in ("ended", "left", "ranks"):
            data[key] += part.data.get(key, [])
        data["seconds"] = max(data["seconds"], part.data.get("seconds", 0.0))
        data["signal"] = data["signal"] or part.data.get("signal", "")
        data["hosts"][host or "here"] = part.data
    text = ". ".join(f"On {host}: {part.text}" if host else f"Here: {part.text}" for host, part in parts.items())
    return Outcome(all(part.ok for part in parts.values()), text, data)
