"""Checkpoints that could not be written: one finding from the first failure to the next complete one."""

from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.machine import CheckpointFacts, Checkpoints
from ftmon.protocol.messages.telemetry import Checkpoint, CheckpointFailed

FULL = "No space left on device"


def fail(judge: Checkpoints, step: int, kept: str = "") -> Finding:
    (found,) = judge.failed(CheckpointFailed(0, step, float(step), f"out/step-{step}", FULL, kept))
    return found


def test_a_checkpoint_that_failed_is_an_error_that_names_why_where_and_what_is_left() -> None:
    found = fail(Checkpoints(), 20, "out/step-10")
    assert (found.kind, found.state, found.severity, found.step) == ("checkpoint_failed", "raised", "error", 20)
    assert found.facts == CheckpointFacts("out/step-20", FULL, 20, 20, 1, "out/step-10")


def test_further_failures_are_counted_and_the_next_complete_one_resolves() -> None:
    judge = Checkpoints()
    fail(judge, 20)
    again = fail(judge, 30)
    assert (again.state, again.severity, again.step) == ("updated", "error", 30)
    assert again.facts == CheckpointFacts("out/step-30", FULL, 20, 30, 2, "")
    (over,) = judge.complete(Checkpoint(0, 40, 40.0, "out/step-40"))
    assert over.state == "resolved"
    assert judge.complete(Checkpoint(0, 50, 50.0, "out/step-50")) == []
    assert fail(judge, 60).state == "raised"
