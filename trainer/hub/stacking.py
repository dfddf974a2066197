"""Stacks on request: of ranks that answer, and of those that cannot, with why where there are none."""

import time
from collections.abc import Callable
from typing import Any

from ...protocol.control import Result
from ...protocol.telemetry import Stacks
from ...protocol.wire import Message
from .looking import Looking
from .ranklink import Answers, RankLink
from .reach import Reach, Seen
from .states import RankTracker


class Stacking:
    """Takes stacks of ranks. Main loop only.

    Args:
        tracker: knows how each rank is made to write its own.
        link: the line to the ranks.
        reach: looks at what does not answer.
        looking: reads native frames.
        emit: appends a message to the stream.
    """

    def __init__(
        self,
        tracker: RankTracker,
        link: RankLink,
        reach: Reach,
        looking: Looking,
        emit: Callable[[Message], object],
    ) -> None:
        self._tracker = tracker
        self._link = link
        self._reach = reach
        self._looking = looking
        self._emit = emit

    def take(self, ranks: list[int], seconds: float, args: dict[str, Any], done: Callable[[Answers], None]) -> None:
        """Take the stacks of ``ranks`` and call ``done``, in the main loop, with what was had of each.

        Args:
            ranks: the ranks.
            seconds: how long they may take to answer before they are made to.
            args: ``reason``; ``native``: have py-spy read native frames too.
            done: gets results by rank; one that is not ok says why not; a rank elsewhere may be absent.
        """
        reason = str(args.get("reason", ""))
        asked = {"reason": reason} if reason else {}
        self._link.ask("stacks", ranks, seconds, lambda answers: self._answered(ranks, answers, args, done), asked)

    def _answered(
        self, ranks: list[int], answers: Answers, args: dict[str, Any], done: Callable[[Answers], None]
    ) -> None:
        silent = [rank for rank in ranks if rank not in answers]
        if not silent:
            self._with_native(ranks, answers, args, done)
            return

        def made(seen: Seen) -> None:
            found = {rank: self._result(rank, seen) for rank in silent if rank in seen.stacks or rank in seen.why}
            self._made(ranks, {**answers, **found}, args, done)

        self._reach.look(silent, made)

    def _made(self, ranks: list[int], answers: Answers, args: dict[str, Any], done: Callable[[Answers], None]) -> None:
        for rank, answer in answers.items():
            if answer.data.get("taken_by") == "signal":
                text, thread = str(answer.data["text"]), str(answer.data["thread"])
                self._emit(Stacks(rank, time.time(), text, str(args.get("reason", "")), thread, "signal"))
        self._with_native(ranks, answers, args, done)

    def _with_native(
        self, ranks: list[int], answers: Answers, args: dict[str, Any], done: Callable[[Answers], None]
    ) -> None:
        if not args.get("native"):
            done(answers)
            return

        def read(found: dict[int, tuple[str, str]]) -> None:
            for rank, (text, why) in found.items():
                if rank in answers:
                    answers[rank].data["native" if text else "no_native"] = text or why
            done(answers)

        self._looking.read_native(ranks, str(args.get("reason", "asked")), read)

    def _result(self, rank: int, seen: Seen) -> Result:
        tracked = self._tracker.ranks.get(rank)
        dump = tracked.hello.self_dump if tracked is not None and tracked.hello is not None else None
        if rank in seen.stacks and dump is not None:
            words = "native code holds Python's lock; written on a signal"
            data = {"text": seen.stacks[rank], "thread": dump.thread, "taken_by": "signal"}
            return Result("", True, "stacks", words, data)
        return Result("", False, "stacks", seen.why.get(rank, "no answer"), {"silent": True})
