"""Why nothing was seen of a run that ended without a step."""

from pathlib import Path

from ftmon.protocol.analysis.health.hub import UnhookedFacts
from ftmon.protocol.rundir import ExitFile, RunDir, RunFile
from ftmon.protocol.telemetry import DeviceInfo, Heartbeat, Hello
from ftmon.trainer.hub.end_detector import EndDetector


def detector(folder: Path, step: int) -> EndDetector:
    """Return the detector of a run of which one heartbeat was heard."""
    run = RunDir(folder / "run")
    run.logs.mkdir(parents=True)
    found = EndDetector(run, RunFile("run", "run", 1.0, ["ftmon"], str(folder), "here", "train"))
    found.note(Heartbeat(rank=0, step=step, phase="idle", phase_started=1.0, progress=3, time=2.0))
    return found


def test_a_run_that_resumed_after_its_last_step_ended_as_planned(tmp_path: Path) -> None:
    resumed = detector(tmp_path, 7)
    assert resumed.before_first_step(ExitFile(0, 3.0, "finished", "exit code 0")) is None
    assert resumed.before_first_step(ExitFile(1, 3.0, "failed", "exit code 1")) is not None


def test_a_run_that_never_came_to_a_step_says_so(tmp_path: Path) -> None:
    assert detector(tmp_path, 1).before_first_step(ExitFile(0, 3.0, "finished", "exit code 0")) is not None


def test_a_run_whose_ranks_reported_no_step_may_have_trained_in_processes_that_they_started(tmp_path: Path) -> None:
    ended = detector(tmp_path, 1)
    ended.note(Hello(0, 0, 1, "here", 1, 1, DeviceInfo("cpu", 0, "x", 1), "glibc", 1.0))
    told = ended.before_first_step(ExitFile(0, 3.0, "finished", "exit code 0"))
    assert told is not None
    assert "other processes that a rank started made the steps" in told[1]


def test_a_run_of_which_nothing_was_heard_names_the_process_that_was_not_watched(tmp_path: Path) -> None:
    told = detector(tmp_path, 1).before_first_step(ExitFile(1, 3.0, "failed", "exit code 1"), UnhookedFacts(42, "."))
    assert told is not None
    assert told[0] == (
        "ended without a recorded step: no rank reported; pid 42 was started with PYTHONPATH=., so without ftmon's "
        "import hook; use PYTHONPATH=.:$PYTHONPATH"
    )
    assert "the process and what it starts are not recorded" in told[1]
