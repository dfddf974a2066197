"""A rank that makes the others wait is named, with where, whichever library hides the waiting."""

from pathlib import Path

import pytest
import start_ranks
from eventually import eventually
from ftmon.protocol.errors import FtmonError
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon_process import wait_until_nothing_is_left

SCRIPT = Path(__file__).parent / "scripts" / "straggler.py"


def slow(recording: Path) -> list[Alert]:
    try:
        return [alert for alert in Reader(recording).alerts() if alert.kind == "slow"]
    except FtmonError:
        return []


@pytest.mark.parametrize(("library", "where"), [("ddp", "data"), ("fsdp", "idle")])
def test_the_rank_that_loses_time_is_named_with_where_and_the_one_that_waits_is_not(home, library, where):
    home.run("run", "--detach", "--", *start_ranks.command(2, str(SCRIPT), library, where))
    run = home.newest()
    eventually(lambda: slow(run.recording), "an alert about a slow rank", 400, every=0.5)
    home.run("kill", run.id, "--yes")
    wait_until_nothing_is_left(run)
    frames = Reader(run.recording).frames(0, 100_000)
    told = [frame.message for frame in frames if isinstance(frame.message, Alert) and frame.message.kind == "slow"]
    assert {alert.rank for alert in told} == {1}
    figures = told[0].evidence
    assert figures["slow_at"] == where
    assert figures["others_waited_ms"] - figures["waited_ms"] >= 20, "the others wait for it"
    assert figures["own_ms"] - figures["others_ms"] >= 20
    waits = [
        sum(phase.collective_us for phase in frame.message.phases)
        for frame in frames
        if isinstance(frame.message, Step) and frame.message.rank == 0 and frame.message.step > 5
    ]
    assert sorted(waits)[len(waits) // 2] >= 20_000, "waiting inside of the library is told from work"
