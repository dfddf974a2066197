"""Stacks on request: of ranks that answer, and of those on this host that cannot, with why where there are none."""

import threading
import time
from collections.abc import Callable
from typing import Any

from ...protocol.control import Result
from ...protocol.telemetry import Stacks
from ...protocol.wire import Message
from .. import activity, processes
from . import dumping
from .dumping import DumpTarget
from .looking import Looking
from .rankbook import RankBook
from .ranklink import Answers, RankLink
from .states import RankTracker


class Stacking:
    """Takes stacks of ranks. Main loop only.

    Args:
        tracker: knows how each rank is made to write its own.
        book: which ranks run on this host.
        link: the line to the ranks.
        looking: reads native frames.
        emit: appends a message to the stream.
        post: has the main loop make a call; any thread.
    """

    def __init__(
        self,
        tracker: RankTracker,
        book: RankBook,
        link: RankLink,
        looking: Looking,
        emit: Callable[[Message], object],
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self._tracker = tracker
        self._book = book
        self._link = link
        self._looking = looking
        self._emit = emit
        self._post = post

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
        silent = [target for target in self.targets() if target.rank in ranks and target.rank not in answers]
        if not silent:
            self._with_native(ranks, answers, args, done)
            return

        def make() -> None:
            texts = dumping.by_signal(silent)
            found = {target.rank: _result(target, texts.get(target.rank, "")) for target in silent}
            self._post(lambda: self._made(ranks, {**answers, **found}, args, done))

        threading.Thread(target=make, name="stacks", daemon=True).start()

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

    def targets(self) -> list[DumpTarget]:
        """List the ranks of this host, with how they are made to write their stacks."""
        found: list[DumpTarget] = []
        for target in self._book.targets():
            tracked = self._tracker.ranks.get(target.rank)
            hello = tracked.hello if tracked is not None else None
            dump = hello.self_dump if hello is not None else None
            found.append(DumpTarget(target.rank, target.pid, target.start_ticks, dump))
        return found


def _result(target: DumpTarget, text: str) -> Result:
    if text and target.dump is not None:
        words = "native code holds Python's lock; written on a signal"
        return Result("", True, "stacks", words, {"text": text, "thread": target.dump.thread, "taken_by": "signal"})
    return Result("", False, "stacks", why_silent(target), {"silent": True})


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
