"""A hub leaves when the end was told, apps have had their time, and nothing is under way or still to come."""

from pathlib import Path

import pytest
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.hub_facts import NoStepFacts, UnhookedFacts
from ftmon.protocol.messages.telemetry import DeviceInfo, Failure, Heartbeat, Hello
from ftmon.protocol.run.rundir import ExitFile, RunDir, RunFile
from ftmon.trainer.hub.agents import BACK_SECONDS
from ftmon.trainer.hub.end import AGENTS_END_SECONDS, LINGER_SECONDS, SETTLE_SECONDS, EndDetector, RunEnd


def detector(folder: Path, step: int) -> EndDetector:
    """Return the detector of a run of which one heartbeat was heard."""
    run = RunDir(folder / "run")
    run.logs.mkdir(parents=True)
    found = EndDetector(run, RunFile("run", "run", 1.0, ["ftmon"], str(folder), "here", "train"))
    found.note(Heartbeat(rank=0, step=step, phase="idle", phase_started=1.0, progress=3, time=2.0))
    return found


def facts(found: Finding | None, severity: str) -> NoStepFacts:
    """Return the facts of the finding that there was no step; it concerns the whole run."""
    assert (found.kind, found.state, found.severity, found.ranks) == ("no_step", "raised", severity, ())
    return found.facts


FAILED = ExitFile(1, 3.0, "failed", "exit code 1")


@pytest.mark.parametrize(
    ("step", "state", "severity"),
    [
        *((1, "finished", "warning"), (1, "failed", "error"), (1, "stopped", None)),
        *((7, "finished", None), (7, "failed", "error")),  # resumed after its last step
    ],
)
def test_a_run_that_never_came_to_a_step_says_so(tmp_path: Path, step: int, state: str, severity: str | None) -> None:
    found = detector(tmp_path, step).no_step(ExitFile(0, 3.0, state, "exit code 0"))
    assert (found and found.severity) == severity


def test_a_hung_run_that_ftmon_ended_has_no_other_cause(tmp_path: Path) -> None:
    ended = detector(tmp_path, 1)
    (tmp_path / "run" / "logs" / "launcher.log").write_text(
        'Traceback (most recent call last):\n  File "/lib/torchrun", line 8, in <module>\n'
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n"
    )
    assert ended.no_step(ExitFile(1, 3.0, "failed", "ended by --on-hang kill: rank 0 waits", "hang")) is None
    found = ended.no_step(FAILED)
    assert facts(found, "error").error == "", "a signal that a launcher received is no error of the job"


def test_the_error_of_a_rank_or_else_the_process_that_was_not_watched_or_the_last_line_is_named(tmp_path: Path) -> None:
    ended = detector(tmp_path, 1)
    unhooked = UnhookedFacts(42, ".")
    assert facts(ended.no_step(FAILED, unhooked), "error") == NoStepFacts("exit code 1", 1, 0, unhooked=unhooked)
    lines = ["start", "no data at /nowhere"]
    log = tmp_path / "run" / "logs" / "launcher.log"
    log.write_text("\n".join(lines))
    seen = facts(ended.no_step(FAILED), "error")
    assert seen == NoStepFacts("exit code 1", 1, 0, last_line="no data at /nowhere", last_lines=lines)
    log.unlink()
    ended.note(Hello(2, 2, 3, "here", 1, 1, DeviceInfo("cpu", 0, "x", 1), "glibc", 1.0))
    finished = ended.no_step(ExitFile(0, 3.0, "finished", "exit code 0"))
    assert facts(finished, "warning") == NoStepFacts("exit code 0", 0, 1), "it may have trained in other processes"
    ended.note(Failure(2, 0, "init", 1.0, "KeyError: 'labels'"))
    found = facts(ended.no_step(FAILED), "error")
    assert found == NoStepFacts("exit code 1", 1, 1, error="KeyError: 'labels'", error_rank=2)


class Run:
    """A run whose end and whose agents are what a test says."""

    def __init__(self, state: str) -> None:
        self.end: ExitFile | None = None
        self._end = ExitFile(1, 0.0, state)
        self.told: list[ExitFile] = []
        self.busy = self.connected = self.absent = False
        self.run_end = RunEnd(self, lambda: self.end, self.told.append, lambda now: self.busy)

    def ends(self) -> None:
        self.end = self._end

    def reachable(self) -> bool:
        return self.connected

    def missed(self) -> bool:
        return self.absent

    def run_is_over(self, grace: float) -> None:
        self.grace = grace


@pytest.mark.parametrize(("state", "settles"), [("failed", SETTLE_SECONDS), ("finished", 0.0)])
def test_the_end_is_told_once_and_the_hub_stays_a_while(state: str, settles: float) -> None:
    run = Run(state)
    assert not run.run_end.tick(0.0)
    run.ends()
    assert not run.run_end.tick(1.0)
    assert bool(run.told) == (not settles)
    assert not run.run_end.tick(1.0 + settles)
    assert [end.state for end in run.told] == [state]
    assert not run.run_end.tick(1.0 + settles)
    assert not run.run_end.tick(1.0 + settles + LINGER_SECONDS - 0.1)
    assert run.run_end.tick(1.0 + settles + LINGER_SECONDS)
    assert len(run.told) == 1


def test_the_hub_stays_while_it_is_busy_or_hosts_may_come_back_and_agents_may_send_the_rest():
    run = Run("finished")
    run.busy = run.absent = True
    run.ends()
    run.run_end.tick(0.0)
    run.run_end.tick(0.0)
    assert not run.run_end.tick(LINGER_SECONDS)
    run.busy = False
    assert not run.run_end.tick(LINGER_SECONDS)
    assert run.run_end.tick(BACK_SECONDS)
    run = Run("stopped")
    run.connected = True
    run.ends()
    assert not run.run_end.tick(0.0)
    assert not run.run_end.tick(AGENTS_END_SECONDS - 0.1)
    assert not run.told
    assert not run.run_end.tick(AGENTS_END_SECONDS)
    assert run.told
