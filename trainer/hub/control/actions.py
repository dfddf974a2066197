"""Sends the actions that detectors request as commands of the hub, and records them with their results."""

import time
from collections.abc import Callable, Iterable

from ....protocol.analysis.findings.requests import Action
from ....protocol.messages import verbs
from ....protocol.messages.control import Result
from ....protocol.messages.wire import Message
from ...host import flow
from ..ranks.rank_link import Answers, RankLink

ANSWER_SECONDS = 120.0


class Actions:
    """Sends actions and records their results. Main loop only.

    ``allowed`` returns whether a verb may be sent in this run.
    """

    def __init__(self, link: RankLink, emit: Callable[[Message], object], allowed: Callable[[str], bool]) -> None:
        self._link = link
        self._emit = emit
        self._allowed = allowed
        self._sent = 0
        self.answered: Callable[[Action, Answers], None] = lambda action, answers: None
        """Called with the stacks that a detector requested; they are samples and not recorded."""

    def send(self, actions: Iterable[Action]) -> None:
        """Send the actions that detectors requested."""
        for action in actions:
            if self._allowed(action.verb.name):
                self._sent += 1
                flow.start(self._ask(f"hub-action-{self._sent}", action))

    async def _ask(self, number: str, action: Action) -> None:
        answers = await self._link.ask(action.verb, action.ranks, ANSWER_SECONDS)
        if isinstance(action.verb, verbs.Stacks):
            self.answered(action, answers)
            return
        for rank in action.ranks:
            answer = answers.get(rank)
            ok, text = (answer.ok, answer.text) if answer is not None else (False, "no answer")
            data = {"asked_by": "hub", "why": action.why, "rank": rank}
            self._emit(Result(number, ok, action.verb.name, f"rank {rank}: {text}", data, time.time()))
