"""A live run through the real executable: detach, attach, late join, a lost hub, a stop, wrong requests."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.host.process import is_alive
from ftmon.protocol.run import exits
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import SMALL, Ftmon, follow_to_end, ftmon_home, hub_is_alive, lines_with, wait_until_nothing_is_left
from hub_client import fake_ranks
from ports import listen_address

ENDLESS = "100000"
STEP = re.compile(r" step +[\d,]+")
"""Matches progress lines of steps, not those of the rehearsal."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path_factory.mktemp("home")) as ftmon:
        yield ftmon


@pytest.fixture(scope="module")
def run(home: Ftmon) -> RunDir:
    """One demo that trains until the last test of this file stops it."""
    words = ["--steps", ENDLESS, "--ranks", "1", "--name", "endless", "--listen", listen_address()]
    started = home.run("demo", *words, *SMALL, "--detach")
    assert started.returncode == 0, started.stderr
    found = home.newest()
    assert f"ftmon attach {found.id}" in started.stdout
    eventually(lambda: steps_done(home, found) >= 3, "the first steps", every=1.0)
    set_priority(home, found, 10)
    return found


def set_priority(home: Ftmon, run: RunDir, nice: int) -> None:
    """Set the rank's priority: 10 while it trains, so that it takes no core from the other tests."""
    (rank,) = home.status(run.id)["ranks"]
    with contextlib.suppress(PermissionError):  # only root may undo it
        os.setpriority(os.PRIO_PROCESS, rank["pid"], nice)
    group = Path(f"/proc/{rank['pid']}/autogroup")
    if group.exists():  # where Linux divides the processor among sessions first, only this has an effect
        group.write_text(str(nice))


def steps_done(home: Ftmon, run: RunDir) -> int:
    return int(home.status(run.id).get("step") or 0)


def test_a_late_follower_is_told_the_present_and_neither_it_nor_a_wrong_request_harms_the_run(home, run):
    follower = home.start("attach", run.id)
    assert follower.stdout is not None
    for line in follower.stdout:
        if STEP.search(line):
            break
    follower.send_signal(signal.SIGINT)
    status, output, errors = follow_to_end(follower)
    assert status == 130, errors
    assert f"attach again: ftmon attach {run.id}" in output
    (entry,) = json.loads(home.run("ls", "--json").stdout)
    assert (entry["id"], entry["live"]) == (run.id, True)
    before = steps_done(home, run)
    eventually(lambda: steps_done(home, run) > before, "more steps after the follower left", every=0.5)
    done = home.run("kill", "endless", "--rank", "7", "--yes")
    assert done.returncode in (1, 2)
    assert "no rank 7" in done.stderr
    assert done.stderr.count("\n") == 1
    assert hub_is_alive(run)


def test_another_host_attaches_with_the_hubs_key_once_its_own_is_let_in(home, run, tmp_path):
    listen = run.read_run().options.listen
    hub = run.living_hub()
    elsewhere = Ftmon(tmp_path / "elsewhere")
    own = re.search(r"^  (\S{40})$", elsewhere.run("keys").stdout, re.MULTILINE)
    assert home.run("keys", f"--allow={own[1]}", "--remark", "elsewhere").returncode == 0
    follower = elsewhere.start("attach", f"tcp://{listen}", f"--key={hub.server_key}")
    assert follower.stdout is not None
    told = next((line for line in follower.stdout if STEP.search(line)), "")
    follower.send_signal(signal.SIGINT)
    _, _, errors = follow_to_end(follower)
    assert "loss" in told, errors


def test_training_outlives_its_hub_and_a_new_one_has_the_whole_history(home, run):
    follower = home.start("attach", run.id)
    old = run.living_hub()
    before = steps_done(home, run)
    old_process = old.process
    os.kill(old_process.pid, signal.SIGKILL)
    eventually(lambda: not is_alive(old_process), "the old hub gone")
    eventually(lambda: hub_is_alive(run), "a new hub")
    eventually(lambda: steps_done(home, run) > before, "steps past those before", every=0.5)
    assert follower.poll() is None, "the follower survives the loss of its hub"
    follower.send_signal(signal.SIGINT)
    follow_to_end(follower)


def test_stop_ends_it_in_order_and_the_follower_is_told(home, run):
    set_priority(home, run, 0)  # it has to answer within 3 s
    follower = home.start("attach", run.id)
    assert follower.stdout is not None
    next(line for line in follower.stdout if STEP.search(line))
    stopped = home.run("stop", run.id)
    assert stopped.returncode == 0, stopped.stderr
    status, output, errors = follow_to_end(follower)
    assert status == exits.STOPPED, output + errors  # in order, but before it was done
    assert lines_with(output, ["stopped"])
    assert lines_with(output, [f"resume it:  ftmon resume {run.id}"])


def test_kill_finds_a_run_whose_launcher_and_hub_are_gone(home):
    job = fake_ranks({"workers": 1}, {"workers": 1})
    assert home.run("run", "--name", "orphan", "--detach", "--", *job).returncode == 0
    run = home.newest()
    eventually(lambda: hub_is_alive(run) and steps_done(home, run) >= 1, "the first step", every=1.0)
    launcher, hub = run.read_run().launcher, run.living_hub()
    assert launcher is not None
    for process in (launcher, hub.process):  # the launcher first: it would bring the hub back
        os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not (is_alive(launcher) or is_alive(hub.process)), "both gone")
    assert "lost" in home.run("ls").stdout
    killed = home.run("kill", run.id, "--yes")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert "nothing is left of the run" in killed.stdout
    wait_until_nothing_is_left(run)
