"""Collects stacks on request, also of ranks that cannot answer, or the reason why there are none."""

import time

from ....protocol.messages import verbs
from ....protocol.messages.control import Result
from ....protocol.messages.telemetry import Stacks
from ...host.inspection.rank_inspection import Inspection
from .host_inspection import HostInspection
from .rank_hosts import RankAccess
from .rank_link import Answers
from .stall_probe import StallProbe


class StackRequests:
    """Collects stacks of ranks. Main loop only."""

    def __init__(self, access: RankAccess, inspection: HostInspection, stall_probe: StallProbe) -> None:
        self._access = access
        self._inspection = inspection
        self._stall_probe = stall_probe

    async def collect(self, ranks: list[int], seconds: float, verb: verbs.Stacks) -> Answers:
        """Return the stacks of ``ranks``, as results by rank.

        A result that is not ok has the reason; ranks of other hosts may be missing.

        Ranks that do not answer in ``seconds`` are signalled; ``verb.native`` reads native frames with py-spy too.
        """
        reason = verb.reason
        answers = await self._access.link.ask(verbs.Stacks(reason=reason), ranks, seconds)
        silent = [rank for rank in ranks if rank not in answers]
        if silent:
            seen = await self._inspection.inspect(silent)
            for rank in silent:
                if rank in seen.stacks or rank in seen.why:
                    answers[rank] = self._result(rank, seen)
                    self._record(rank, answers[rank], reason)
        if verb.native:
            native = await self._stall_probe.read_native(ranks, reason or "asked")
            for rank, (text, why) in native.items():
                if rank in answers:
                    answers[rank].data["native" if text else "no_native"] = text or why
        return answers

    def _record(self, rank: int, answer: Result, reason: str) -> None:
        """Append to the stream the stacks that a rank wrote after a signal."""
        if answer.ok:
            text, thread = str(answer.data["text"]), str(answer.data["thread"])
            self._access.emit(Stacks(rank, time.time(), text, reason, thread, "signal"))

    def _result(self, rank: int, seen: Inspection) -> Result:
        tracked = self._access.tracker.ranks.get(rank)
        dump = tracked.hello.self_dump if tracked is not None and tracked.hello is not None else None
        if rank in seen.stacks and dump is not None:
            words = "native code holds Python's lock; written on a signal"
            data = {"text": seen.stacks[rank], "thread": dump.thread, "taken_by": "signal"}
            return Result("", True, "stacks", words, data)
        return Result("", False, "stacks", seen.why.get(rank, "no answer"), {"silent": True})
