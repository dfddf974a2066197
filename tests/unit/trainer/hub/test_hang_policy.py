"""What is done about a hang that nobody looks at: when, what, and when not."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.evidence import Collective, Evidence
from ftmon.protocol.analysis.stalls.judge import Verdict
from ftmon.protocol.messages.control import Alert, Command, RankState
from ftmon.protocol.messages.telemetry import DeviceInfo, Goodbye, Hello, Stacks
from ftmon.protocol.run.end import read_end_request
from ftmon.protocol.run.rundir import RunDir, RunOptions
from ftmon.trainer.host.end.kill import Outcome
from ftmon.trainer.hub.analyses import Analysis
from ftmon.trainer.hub.hang_policy import STOP_SECONDS, SURE_SECONDS, HangPolicy

VIEWS = {rank: RankView(rank, 12, "backward", 9.0, 8.0) for rank in (1, 0)}
HANG = Verdict("missing", (0,), (1,), True, 9.0, Collective("all_reduce", 5), VIEWS)


class Hands:
    """Everything a policy acts through: keeps what it was told."""

    def __init__(self) -> None:
        self.killed = 0
        self.interrupted = 0

    async def kill(self, ranks: list[int], number: Any) -> Outcome:
        assert (ranks, number) == ([], None)
        self.killed += 1
        return Outcome(True, "killed", {})

    def interrupt(self) -> list[int]:
        self.interrupted += 1
        return [1]

    def latest(self) -> dict[int, Stacks]:
        return {1: Stacks(1, 1.0, "Thread 0x1 (most recent call first):", taken_by="probe")}

    def grouped(self) -> list[str]:
        return ["rank 1: train.py:5 in main"]

    async def read_native(self, ranks: list[int], reason: str) -> dict[int, tuple[str, str]]:
        del ranks, reason
        return {}

    ranks = (0, 1)

    @property
    def worked_at(self) -> dict[int, float]:
        return {}


class Bench:
    """A policy with a clock."""

    def __init__(self, run: RunDir, **options: Any) -> None:
        self.sent: list[Any] = []
        self.run = run
        self.analysis = Analysis(run.read_run(), self._emit)
        self.hands: Any = Hands()
        core: Any = SimpleNamespace(
            run=run,
            file=SimpleNamespace(options=RunOptions(**options)),
            analysis=self.analysis,
            rank_hosts=self.hands,
            emit=lambda message: self.analysis.feed(*self._emit(message), message),
        )
        self.policy = HangPolicy(core, self.hands, self.hands)
        self.now = 100.0
        self.tracker = self.analysis.tracker

    def _emit(self, message: Any) -> tuple[int, float]:
        self.sent.append(message)
        return len(self.sent), time.time()

    def hello(self, rank: int, world: int = 2) -> None:
        device = DeviceInfo("cpu", 0, "cpu", 1)
        self.analysis.feed(1, time.time(), Hello(rank, rank, world, "h", 1, 1, device, "glibc", 1.0))

    def hang(self, quiet: float | None, work: Any = "", phase: str = "backward") -> None:
        """Have rank 1 stand still in that phase for ten minutes, its processes at rest for ``quiet`` seconds."""
        for rank in (0, 1):
            self.hello(rank)
        progress = self.tracker.ranks[1].progress
        progress.moved_at = time.time() - 600.0
        progress.last_message_at = time.time() + 3600.0
        progress.phase, progress.has_stepped, progress.steps_seen = phase, True, 30
        self.tracker.ranks[1].evidence = Evidence(time.time(), by="probe", quiet=quiet, work=work)
        self.tracker.verdict = HANG

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.policy.tick(self.now)

    def after(self, seconds: float) -> int:
        """Wait; return how often the run has been killed."""
        self.wait(seconds)
        return self.hands.killed

    @property
    def saved(self) -> list[str]:
        folder = self.run.path / "stacks"
        return [path.read_text() for path in folder.iterdir()] if folder.exists() else []


def test_a_hang_is_acted_on_once_it_has_stood_and_its_stacks_are_saved_first(run):
    bench = Bench(run, on_hang="kill", hang_grace=10.0)
    bench.hang(quiet=60.0)
    assert (bench.after(9.0), bench.saved) == (0, [])
    assert bench.after(2.0) == 1
    first, second, *_ = bench.saved[0].splitlines()
    assert first.startswith("rank 1 ")
    assert ", and has not entered " in first
    assert second == "rank 1: train.py:5 in main"
    end_request = read_end_request(run)
    assert (end_request.verb, end_request.cause, end_request.state) == ("--on-hang kill", "hang", "failed")
    assert any(isinstance(message, Command) and message.verb == "kill" for message in bench.sent)
    assert bench.after(100.0) == 1


def test_a_stall_that_ends_in_time_is_left_alone(run):
    bench = Bench(run, on_hang="kill", hang_grace=10.0)
    for _ in range(5):
        bench.tracker.verdict = HANG
        bench.wait(8.0)
        bench.tracker.verdict = None
        bench.wait(1.0)
    assert bench.hands.killed == 0


def test_stop_interrupts_and_kills_what_has_not_ended(run):
    bench = Bench(run, on_hang="stop", hang_grace=1.0)
    bench.hang(quiet=60.0)
    bench.wait(3.0)
    assert (bench.hands.interrupted, bench.hands.killed) == (1, 0)
    bench.wait(STOP_SECONDS)
    assert (bench.hands.interrupted, bench.hands.killed) == (1, 1)


def test_stacks_are_all_that_is_saved_where_no_more_is_wanted(run):
    bench = Bench(run, on_hang="stacks", hang_grace=1.0)
    bench.tracker.verdict = HANG
    bench.wait(60.0)
    assert len(bench.saved) == 1
    assert (bench.hands.killed, read_end_request(run)) == (0, None)


@pytest.mark.parametrize("state", ["stopped", "held"])
def test_what_somebody_paused_is_no_hang(run, state):
    bench = Bench(run, on_hang="kill", hang_grace=1.0)
    for rank in (0, 1):
        bench.hello(rank)
        bench.tracker.ranks[rank].state = RankState(rank, state, 1.0)
    bench.tracker.verdict = HANG
    assert bench.after(20.0) == 0
    bench.tracker.ranks[0].state = RankState(0, "waiting", 1.0)
    bench.tracker.ranks[1].evidence = Evidence(time.time() + 1.0, quiet=400.0)
    assert bench.after(20.0) == (1 if state == "stopped" else 0), "one rank that is stopped holds the others up"


@pytest.mark.parametrize(
    ("phase", "quiet", "ended"),
    [
        ("backward", 7.0, False), ("backward", 9.0, True), ("idle", 200.0, False), ("idle", 301.0, True),
        ("eval", 200.0, False), ("checkpoint", 500.0, False), ("checkpoint", 601.0, True),
        ("backward", None, False),
    ],
)  # fmt: skip
def test_nothing_is_ended_before_a_ranks_processes_rested_for_the_patience_of_its_phase(run, phase, quiet, ended):
    bench = Bench(run, on_hang="kill", hang_grace=1.0)
    bench.hang(quiet, phase=phase)
    assert bench.after(60.0) == ended
    notes = [one.title for one in bench.sent if isinstance(one, Alert) and "waits for proof" in one.title]
    assert len(notes) == (not ended), "said once, and why"


def test_the_rest_may_go_on_for_so_long_after_a_rank_has_finished(run):
    bench = Bench(run, exit_timeout=20.0)
    bench.hello(0)
    bench.analysis.feed(2, time.time() - 60.0, Goodbye(0, 1.0, 9, "finished"))
    assert bench.after(10.0) == 0, "rank 1 has not begun"
    bench.hello(1)
    assert bench.after(10.0) == 0, "rank 1 was heard a moment ago"
    progress = bench.tracker.ranks[1].progress
    progress.moved_at = time.time() - 60.0
    progress.phase, progress.has_stepped, progress.steps_seen = "checkpoint", True, 9
    assert bench.after(20.0) == 0, "a checkpoint keeps its own patience"
    progress.moved_at, progress.phase = time.time() - 30.0, "backward"
    assert bench.after(SURE_SECONDS - 1.0) == 0
    assert bench.after(3.0) == 1
    end_request = read_end_request(run)
    assert (end_request.cause, end_request.state) == ("hang-at-exit", "stopped")
