"""Faults of ``ftmon demo --fault`` are real: flagged with an alert, and the run ends as it must."""

from eventually import eventually
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import exits
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import LONG_SECONDS, SMALL, Ftmon, follow_to_end, wait_until_nothing_is_left

FAULT_STEP = 8
"""Late enough for a history to compare with; the demo's own default is later."""


def alerts(run: RunDir) -> dict[str, str]:
    return {alert.kind: alert.title for alert in Reader(run.recording).alerts()}


def standing(home: Ftmon, kind: str) -> str:
    """Wait for an alert of a live run; return its title."""
    run = home.newest()
    eventually(run.living_hub, "a hub: it answers once it has made the recording")
    return eventually(lambda: alerts(run).get(kind, ""), f"alert {kind}", LONG_SECONDS, every=0.5)


def test_an_allocation_that_fails_is_an_oom_and_the_run_fails(home: Ftmon) -> None:
    words = ("--ranks", "1", "--steps", str(FAULT_STEP + 4))
    done = home.run("demo", "--fault", f"oom:step={FAULT_STEP}", *words, *SMALL)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "rank 0" in alerts(home.newest())["oom"], text
    assert f"details:    ftmon oom {home.newest().id}\n" in text
    wait_until_nothing_is_left(home.newest())


def test_a_rank_that_stands_still_is_named_and_kill_leaves_nothing(home: Ftmon) -> None:
    demo = home.start("demo", "--fault", f"stop:rank=1,step={FAULT_STEP}", "--steps", "400", *SMALL)
    assert "rank 1" in standing(home, "hang")
    assert f"{home.newest().id}  hung " in home.run("ls").stdout
    killed = home.run("kill", home.newest().id, "--yes")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert "nothing is left of the run" in killed.stdout
    status, output, errors = follow_to_end(demo)
    assert status == exits.STOPPED, output + errors
    wait_until_nothing_is_left(home.newest())
