"""What SLURM's own words in a job's output say of its end."""

from pathlib import Path

import pytest
from ftmon.protocol.analysis.deaths.logs import cancelled
from ftmon.trainer.launch.launcher import cancelled_in

ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
CANCELLED = "slurmstepd: error: *** STEP 5.0 ON nodea CANCELLED AT 2026-11-21T12:00:00{why} ***"
FAILED_TASK = "srun: error: nodeb: task 1: Exited with exit code 1"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (CANCELLED.format(why=""), "cancelled by SLURM"),
        (CANCELLED.format(why="").replace("slurmstepd:", "slurmstepd-nodea:"), "cancelled by SLURM"),
        (CANCELLED.format(why=" DUE TO TIME LIMIT"), "cancelled by SLURM: time limit"),
        (CANCELLED.format(why=" DUE TO PREEMPTION"), "cancelled by SLURM: preemption"),
        (CANCELLED.format(why=" DUE TO JOB REQUEUE"), "cancelled by SLURM: job requeue"),
        (CANCELLED.format(why=" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), ""),
        # Old versions name no node.
        (
            "srun: error: *** STEP 5.0 CANCELLED AT 2010-01-01T12:00:00 DUE TO TIME LIMIT ***",
            "cancelled by SLURM: time limit",
        ),
        ("*** STEP 5.0 ON nodea CANCELLED AT noon ***", ""),
        ("srun: error: nothing", ""),
    ],
)
def test_a_job_that_slurm_cancelled_is_reported_with_the_reason(line, words):
    assert cancelled(["step 7", ABORTED, line, "srun: error: nodea: task 0: Terminated"]) == words


@pytest.mark.parametrize(
    "trouble",
    [
        FAILED_TASK,
        "srun: error: nodea: tasks 0-1,3: Segmentation fault (core dumped)",
        "srun: launch/slurm: _step_signal: Terminating StepId=5.0",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Exceeded job memory limit",
    ],
)
def test_a_step_that_is_ended_because_a_task_failed_was_not_cancelled_by_anybody(trouble):
    assert cancelled([trouble, ABORTED, CANCELLED.format(why="")]) == ""
    assert cancelled([trouble, CANCELLED.format(why=" DUE TO TIME LIMIT")]) == "cancelled by SLURM: time limit"


def test_a_log_is_read_at_its_end(tmp_path: Path):
    log = tmp_path / "launcher.log"
    assert cancelled_in(log) == ""
    log.write_text("x\n" * 100_000 + CANCELLED.format(why="") + "\n")
    assert cancelled_in(log) == "cancelled by SLURM"
    log.write_text(CANCELLED.format(why="") + "\n" + "x\n" * 100_000)
    assert cancelled_in(log) == ""
