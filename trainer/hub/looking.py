"""A closer look at the ranks while a stall is suspected: stacks, collectives, processes; again, until it ends.

The ranks are asked; one that does not answer is made to write its stacks by a signal. Nothing of it is
recorded unless a verdict comes of it: then the stacks it rests on are saved first.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ...protocol import pystacks
from ...protocol.control import Result
from ...protocol.process import is_alive
from ...protocol.pystacks import Frame
from ...protocol.rundir import RunDir
from ...protocol.telemetry import DeviceSample, Stacks
from ...protocol.wire import Message
from .. import processes
from ..activity import Activity
from . import dumping
from .detectors.evidence import NOWHERE, Evidence, read_calls
from .detectors.verdicts import Verdict
from .detectors.view import ranks_in_words
from .rankbook import RankBook
from .ranklink import Answers, RankLink
from .reach import Reach, Seen
from .states import RankTracker

ANSWER_SECONDS = 1.0
AGAIN_SECONDS = 0.5
"""How long ranks have to answer; and how long once one of them did not."""
LOOK_SECONDS = 1.0
QUICK_LOOKS = 6
LONGEST_SECONDS = 15.0
"""Looks come every second at first, then after pauses that double up to this."""
SAVED_RANKS = 64
"""Stacks of more ranks are not saved with a verdict: those named first."""
NATIVE_RANKS = 2
"""Of the ranks named, so many are also read by py-spy, which makes them stand still for a moment."""


class _Seen(NamedTuple):
    frames: tuple[Frame, ...]
    first: Activity
    """When it was first seen so."""
    last: Activity


class Looking:
    """Looks at the ranks and gives the tracker what it found. Main loop only.

    Args:
        run: the run.
        tracker: tells when a stall is suspected, and gets the evidence.
        book: which ranks run on this host.
        link: the line to the ranks.
        reach: looks at what does not answer.
        emit: appends a message to the stream.
        post: has the main loop make a call; any thread.
    """

    def __init__(
        self,
        run: RunDir,
        tracker: RankTracker,
        book: RankBook,
        link: RankLink,
        reach: Reach,
        emit: Callable[[Message], object],
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self._run = run
        self._tracker = tracker
        self._book = book
        self._link = link
        self._reach = reach
        self._emit = emit
        self._post = post
        self._under_way = False
        self._unanswered = False
        """A rank did not answer at the last look."""
        self._looks = 0
        self._next = 0.0
        self._seen: dict[int, _Seen] = {}
        self._stacks: dict[int, Stacks] = {}
        self._saved: object = None
        self._utilization: dict[int, float] = {}

    def sample(self, sample: DeviceSample) -> None:
        """Note how busy the ranks' devices are."""
        if sample.kind == "gpu" and sample.utilization_percent is not None:
            for process in sample.processes:
                if process.rank is not None:
                    self._utilization[process.rank] = sample.utilization_percent

    def tick(self) -> None:
        """Begin a look when one is due; save the stacks that a new verdict rests on."""
        if not self._tracker.suspected:
            self._looks, self._saved = 0, None
            self._seen.clear()
            self._stacks.clear()
            return
        verdict = self._tracker.verdict
        if verdict is not None and self._looks and not self._under_way and self._saved != verdict.signature:
            self._saved = verdict.signature
            self._save(verdict)
        if not self._under_way and time.monotonic() >= self._next:
            self._begin()

    def _begin(self) -> None:
        self._under_way = True
        ranks = [rank for rank, tracked in self._tracker.ranks.items() if not tracked.ended and tracked.goodbye is None]
        args = {"calls": True, "quiet": True, "activity": self._book.any_elsewhere, "reason": "a stall is suspected"}
        seconds = AGAIN_SECONDS if self._unanswered else ANSWER_SECONDS
        self._link.ask("stacks", ranks, seconds, lambda answers: self._answered(ranks, answers), args)

    def _answered(self, asked: list[int], answers: Answers) -> None:
        silent = {rank for rank in asked if rank not in answers}
        self._unanswered = bool(silent)
        self._reach.look(silent, lambda seen: self._found(answers, seen))

    def _found(self, answers: Answers, local: Seen) -> None:
        self._under_way = False
        self._looks += 1
        longer = max(0, self._looks - QUICK_LOOKS)
        self._next = time.monotonic() + min(LONGEST_SECONDS, LOOK_SECONDS * 2**longer)
        now = time.time()
        self._tracker.launcher = self.launcher()
        for rank, tracked in self._tracker.ranks.items():
            answer = answers.get(rank)
            action = local.activities.get(rank) or _activity_of(answer)
            text, thread, by = _text_of(answer)
            if not text and rank in local.stacks:
                dump = tracked.hello.self_dump if tracked.hello is not None else None
                text, thread, by = local.stacks[rank], dump.thread if dump is not None else "", "signal"
            if action is None and not text:
                continue
            if text:
                self._stacks[rank] = Stacks(rank, now, text, "", thread, "probe" if by == "probe" else "signal")
            found = pystacks.training_thread(pystacks.parse(text), thread)
            frames = pystacks.visible(found.frames) if found is not None else ()
            calls = read_calls(answer.data.get("calls") if answer is not None else None)
            before = tracked.evidence
            same = before is not None and before.taken >= tracked.progress.moved_at
            if before is not None and same and before.calls.source == "recorder" != calls.source:
                calls = before.calls  # it says less than it did, and has made no progress since
            tracked.evidence = Evidence(
                taken=now,
                by="probe" if by == "probe" else "signal" if by else "",
                frames=frames,
                place=pystacks.where(frames) if frames else NOWHERE,
                asleep=self._asleep(rank, frames, action),
                process=action.state if action is not None else "",
                wchan=action.wchan if action is not None else "",
                utilization=self._utilization.get(rank),
                calls=calls,
            )

    def _asleep(self, rank: int, frames: tuple[Frame, ...], action: Activity | None) -> float:
        before = self._seen.get(rank)
        if action is None:
            self._seen.pop(rank, None)
            return 0.0
        rests = before is not None and before.frames == frames and action.rested_since(before.last)
        first = before.first if before is not None and rests and action.rested_since(before.first) else action
        self._seen[rank] = _Seen(frames, first, action)
        return action.time - first.time

    # Saving.

    def _save(self, verdict: Verdict) -> None:
        """Append the stacks to the stream, those of the ranks named first, and have native ones taken of these."""
        first = [*verdict.hung, *verdict.waiting]
        order = list(dict.fromkeys([*first, *sorted(self._stacks)]))
        for rank in order[:SAVED_RANKS]:
            stacks = self._stacks.get(rank)
            if stacks is not None:
                self._emit(Stacks(rank, stacks.time, stacks.text, verdict.title, stacks.thread, stacks.taken_by))
        if verdict.hung and dumping.py_spy():
            self.read_native(list(verdict.hung[:NATIVE_RANKS]), verdict.title, lambda _: None)

    def read_native(self, ranks: list[int], reason: str, done: Callable[[dict[int, tuple[str, str]]], object]) -> None:
        """Have py-spy read native frames of ranks on this host.

        Args:
            ranks: the ranks.
            reason: why.
            done: gets, in the main loop, for each rank its stacks, or an empty string and why not.
        """
        targets = [target for target in self._book.targets() if target.rank in ranks]

        def read() -> None:
            found: dict[int, tuple[str, str]] = dict.fromkeys(ranks, ("", "not on this host"))
            for target in targets:
                process = processes.read(target.pid)
                if process is None or process.start_ticks != target.start_ticks:
                    found[target.rank] = "", "gone"
                else:
                    found[target.rank] = dumping.native(process)
            self._post(lambda: tell(found))

        def tell(found: dict[int, tuple[str, str]]) -> None:
            for rank, (text, _) in found.items():
                if text:
                    self._emit(Stacks(rank, time.time(), text, reason, "", "py-spy"))
            done(found)

        threading.Thread(target=read, name="py-spy", daemon=True).start()

    def latest(self) -> dict[int, Stacks]:
        """Give the stacks of the last looks, by rank; empty while no stall is suspected."""
        return dict(self._stacks)

    def grouped(self) -> list[str]:
        """Say where the ranks are, those with the same stack in one line."""
        groups = pystacks.group({rank: (one.text, one.thread) for rank, one in self._stacks.items()})
        return [f"{ranks_in_words(one.ranks)}: {one.place.text or 'no stack'}" for one in groups]

    def launcher(self) -> str:
        """Say how the run's launcher is: ``alive``, ``stopped``, ``gone`` or, where there is none, an empty string."""
        with contextlib.suppress(Exception):
            launcher = self._run.read_run().launcher
            if launcher is None:
                return ""
            process = processes.read(launcher.pid)
            if not is_alive(launcher) or process is None:
                return "gone"
            return "stopped" if process.state in ("T", "t") else "alive"
        return ""


def _text_of(answer: Result | None) -> tuple[str, str, str]:
    if answer is None or not answer.ok:
        return "", "", ""
    data: dict[str, Any] = answer.data
    return str(data.get("text", "")), str(data.get("thread", "")), "probe"


def _activity_of(answer: Result | None) -> Activity | None:
    with contextlib.suppress(TypeError, AttributeError):
        return Activity(*answer.data["activity"]) if answer is not None and "activity" in answer.data else None
    return None
