"""After a kill no process of the run is left, whatever its ranks were doing; a stop lets them end themselves."""

import os
import signal
import sys

import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Command, RankState, Result, RunState
from ftmon.protocol.messages.telemetry import Goodbye, Stacks, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.trainer.host import processes
from hub_client import SCRIPTS, App, exit_of, fake_ranks, hub_gone, members, started

pytestmark = pytest.mark.usefixtures("private_home")


def training(app: App, ranks: int) -> None:
    """Wait for a step of every rank in the recording: a stuck one may have made it before the app joined the stream."""

    def stepped() -> set[int]:
        found: set[int] = set()
        for frame in app.recorded():
            if isinstance(frame.message, Step):
                found.add(frame.message.rank)
            if len(found) == ranks:
                break
        return found

    eventually(lambda: stepped() == set(range(ranks)), "a step of every rank", state=stepped, every=0.2)


def test_a_killed_run_leaves_nothing_whatever_its_ranks_do():
    ranks = [
        {"workers": 2},
        {"native": True, "workers": 1},
        {"deaf": True, "workers": 1},
        {"deaf": True, "native": True},
    ]
    with started(fake_ranks(*ranks)) as run, App(run) as app:
        training(app, len(ranks))
        assert len(members(run)) == 1 + len(ranks) + sum(rank.get("workers", 0) for rank in ranks)
        result = app.command("kill")
        assert result.ok, result.text
        assert members(run) == []
        assert (result.data["left"], sorted(result.data["ranks"])) == ([], list(range(len(ranks))))
        assert "nothing is left of the run" in result.text
        end = exit_of(run)
        assert end.state == "stopped"
        assert "killed on request" in end.text
        app.wait_for(RunState, lambda state: state.state == "stopped")
        hub_gone(run)
        frames = [frame.message for frame in Reader(run.recording).frames(0, 10_000)]
        assert any(isinstance(m, Command) and m.verb == "kill" for m in frames)
        assert any(isinstance(m, Result) and m.verb == "kill" and m.data["asked_by"] == "test" for m in frames)
        assert Reader(run.recording).info().state == "stopped"


def test_a_run_that_was_killed_without_its_launcher_has_not_succeeded_and_stacks_are_saved_before_the_first_signal():
    with started(fake_ranks({}, {"silent": True})) as run, App(run) as app:
        training(app, 2)
        os.kill(run.read_run().launcher.pid, signal.SIGKILL)
        result = app.command("kill")
        assert result.ok, result.text
        assert result.data["stacks_saved"] == [0]
        assert app.wait_for(Stacks).reason == "kill asked by test"
        end = exit_of(run)
        assert (end.state, end.exit_code) == ("stopped", 1)
        assert "killed on request" in end.text


# Ends its tasks as srun does when its step is cancelled: slurmstepd's words, then SIGTERM to all of them.
LIKE_SRUN = """
import os, signal, subprocess, sys
def cancel(*_):
    print("slurmstepd: error: *** STEP 5.0 ON a CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
signal.signal(signal.SIGTERM, cancel)
job = subprocess.Popen(sys.argv[1:])
sys.exit(128 - job.wait())
"""


def test_a_run_whose_slurm_job_is_over_time_was_stopped_and_nobody_in_it_is_to_blame():
    with started([sys.executable, "-c", LIKE_SRUN, *fake_ranks({}, {})]) as run, App(run) as app:
        training(app, 2)
        launcher = run.read_run().launcher
        (srun,) = [each for each in members(run) if launcher is not None and each.parent == launcher.pid]
        os.kill(srun.pid, signal.SIGTERM)
        end = exit_of(run)
        assert (end.state, end.exit_code) == ("stopped", 143)
        assert end.text == "cancelled by SLURM: time limit (exit code 143, SIGTERM)"
        app.wait_for(RunState, lambda state: state.state == "stopped")
        hub_gone(run)
        assert [alert for alert in Reader(run.recording).alerts() if alert.severity == "error"] == []


def test_a_signal_of_ones_choice_reports_who_withstood_it_and_a_run_whose_ranks_are_all_stopped_is_killed():
    with started(fake_ranks({"workers": 1}, {"deaf": True})) as run, App(run) as app:
        training(app, 2)
        result = app.command("kill", ranks=[1], signal="INT")
        assert not result.ok
        assert "still alive" in result.text
        assert app.hellos()[1].pid in result.data["left"]
        assert run.read_exit() is None
        for hello in app.hellos().values():
            os.kill(hello.pid, signal.SIGSTOP)
        app.wait_for(RankState, lambda state: state.state == "stopped")
        result = app.command("kill")
        assert result.ok, result.text
        assert members(run) == []


def test_one_killed_rank_takes_its_workers_with_it_and_its_launcher_ends_the_others():
    with started(fake_ranks({"workers": 1}, {"workers": 2})) as run, App(run) as app:
        training(app, 2)
        result = app.command("kill", ranks=[1], signal="KILL")
        assert result.ok, result.text
        assert (result.data["ranks"], len(result.data["ended"])) == ([1], 3)
        app.wait_for(RankState, lambda s: (s.rank, s.state, s.signal) == (1, "gone", 9))
        end = exit_of(run)
        assert end.state == "stopped"
        assert "rank 1 was killed on request" in end.text
        eventually(lambda: members(run) == [], "the end of all")


def test_daemons_of_a_killed_rank_are_ended_with_it_or_named():
    with started(fake_ranks({"daemons": True}, {"daemons": True})) as run, App(run) as app:
        training(app, 2)
        launcher = run.read_run().launcher
        # Once the job has ended it ends what is left, perhaps before the kill has looked for it.
        os.kill(launcher.pid, signal.SIGSTOP)
        try:
            result = app.command("kill", ranks=[0])  # the older one: what it did not start may be the other's
        finally:
            os.kill(launcher.pid, signal.SIGCONT)
        assert result.ok, result.text
        assert len(result.data["ended"]) == 2, "the rank, and the daemon that is a copy of it"
        assert "no process of theirs is left" not in result.text
        assert len(result.data["strays"]) == 2, "those that show nothing of their ranks, of either"
        for pid in result.data["strays"]:
            assert f"pid {pid} (" in result.text
        exit_of(run)
        eventually(lambda: members(run) == [], "the end of all")
        assert not any(processes.read(pid) for pid in result.data["strays"]), "the launcher ends what is left"


def test_a_kill_is_not_held_up_by_a_flood_of_telemetry():
    with started(fake_ranks(*[{"rate": 5000} for _ in range(2)])) as run, App(run) as app:
        training(app, 2)
        number = app.send("kill", signal="KILL")
        accepted = app.answer(60)  # the flood does not end: behind it there would be no answer at all
        assert (accepted.id, accepted.ok) == (number, True)
        assert app.answer().ok
        assert members(run) == []


def test_stop_lets_a_trainer_that_agrees_end_itself():
    with started(fake_ranks({"agrees": True}, {"agrees": True})) as run, App(run) as app:
        training(app, 2)
        result = app.command("stop")
        assert result.ok
        assert result.data["agreed"] == [0, 1]
        end = exit_of(run)
        assert (end.state, end.exit_code) == ("stopped", 0)
        assert app.wait_for(Goodbye).reason == "stopped"
        app.wait_for(RunState, lambda state: state.state == "stopping")
        app.wait_for(RunState, lambda state: state.state == "stopped")


def test_stop_interrupts_a_foreign_script():
    with started(fake_ranks({}, {})) as run, App(run) as app:
        training(app, 2)
        result = app.command("stop")
        assert result.ok
        assert "SIGINT" in result.text
        end = exit_of(run)
        assert end.state == "stopped"
        assert "stopped on request" in end.text
        assert members(run) == []


def test_stop_ends_an_elastic_launcher_and_a_job_that_never_made_a_rank_is_killed_too():
    again = "import subprocess, sys\nwhile True: subprocess.run([sys.executable, *sys.argv[1:]])"
    with started([sys.executable, "-c", again, str(SCRIPTS / "fake_rank.py"), "{}"]) as run, App(run) as app:
        training(app, 1)
        assert app.command("stop").ok
        assert (exit_of(run).state, members(run)) == ("stopped", [])
    for verb in ("stop", "kill"):
        with started(["sleep", "300"]) as run, App(run) as app:
            eventually(lambda run=run: members(run), "the job's start")
            assert app.command(verb).ok
            assert (exit_of(run).state, members(run)) == ("stopped", [])
