"""A real failed allocation in a real run: held in its frame, looked at through a console, let go, and told later."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import rank_jobs
from eventually import eventually
from ftmon_process import Ftmon, follow_to_end, processes_of, wait_until_nothing_is_left

SCRIPT = Path(__file__).parent / "scripts/oom_loop.py"
TOO_MUCH = 1 << 55


def start_held(home: Ftmon, *options: str) -> tuple[Any, str]:
    """Start the script and wait until its rank is held; return the command and the run's identifier."""
    process = home.start("run", "--plain", "--on-oom", "hold", *options, "--", sys.executable, str(SCRIPT))
    run = home.newest()
    eventually(run.recording.exists, "a recording")
    eventually(lambda: home.status(run.id)["rank_states"] == {"held": 1}, "a held rank", every=0.5)
    return process, run.id


def test_a_rank_is_held_looked_at_and_let_go_and_the_report_is_there_afterwards(home: Ftmon) -> None:
    process, run = start_held(home, "--allow-console")
    console = ("console", run, "--rank", "0", "-c")
    shown = home.run(*console, "print(frame.rpartition(' ')[2]); count, tuple(keep.shape)")
    assert shown.stdout == f"allocate\n({TOO_MUCH}, (8, 256))\n", shown.stderr
    assert home.run(*console, "up()").stdout.endswith(" main\n")
    failed = home.run(*console, "print(step); 1 / 0")
    assert failed.returncode == 1
    assert failed.stdout.startswith("4\n")
    assert "ZeroDivisionError" in failed.stdout
    live = home.run("oom", run)
    assert "verdict: simply too large" in live.stdout, live.stderr

    released = home.run("release", run)
    assert (released.returncode, released.stdout) == (0, "rank 0 released\n")
    status, text, errors = follow_to_end(process)
    assert status == 1, text + errors
    assert "can't allocate memory" in text + errors  # the original error, as without ftmon

    (report,) = json.loads(home.run("oom", run, "--json").stdout)["reports"]
    oom = report["oom"]
    assert (report["verdict"]["kind"], report["verdict"]["sure"]) == ("too_large", True)
    assert (oom["requested_bytes"], oom["step"], oom["phase"]) == (TOO_MUCH, 4, "forward")
    assert (oom["held"], oom["console"], oom["steps_done"]) == (True, True, 3)
    assert oom["stack"][-1].endswith("oom_loop.py:9 allocate")
    assert oom["batch_shape"] == oom["largest_shape"] == [8, 256]
    assert oom["parts"]["parameters"] >= 256 * 257 * 4
    assert sum(oom["parts"].values()) == oom["allocated_bytes"]
    assert [moment["rank"] for moment in report["ranks"]] == [0]
    assert json.loads((home.newest().path / report["path"]).read_text())["verdict"] == report["verdict"]


def test_without_allow_console_nobody_runs_code_and_a_kill_ends_what_is_held(home: Ftmon) -> None:
    process, run = start_held(home)
    refused = home.run("console", run, "--rank", "0", "-c", "1")
    assert refused.returncode == 1
    assert "not started with --allow-console" in refused.stderr
    killed = home.run("kill", run, "--yes")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    follow_to_end(process)
    wait_until_nothing_is_left(home.newest())
    assert processes_of(home.newest()) == []


def test_a_freed_name_gives_its_tensor_up() -> None:
    """In a process of its own: what other tests leave in one may hold any tensor."""
    text = rank_jobs.forked([{"ranks": 1, "module": "freed_name", "jobs": []}], dict(os.environ), 200)
    assert "batch is None now True\n" in text
