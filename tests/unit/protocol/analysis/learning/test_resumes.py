"""A resumed training whose data do not continue where its weights do."""

import pytest
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.analysis.learning.resumes import ALIKE, Resumes
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, Step


def hello(pid: int, rank: int = 0) -> Hello:
    return Hello(rank, rank, 2, "node1", pid, 7, DeviceInfo("cpu", 0, "d", 1), "glibc", 1.0)


def found(first: int, batches: list[int], before: list[int], rank: int = 0) -> list[Finding]:
    """Return the findings of a job that begins at step ``first`` after one with the batches ``before``."""
    detector = Resumes()
    findings = [*detector.hello(hello(1)), *detector.hello(hello(2, rank=1))]
    for number, batch in enumerate(before, 1):
        findings += detector.step(Step(rank, number, 1.0, 1, [], batch_id=batch))
    findings += detector.hello(hello(3))
    for number, batch in enumerate(batches, first):
        findings += detector.step(Step(rank, number, 1.0, 1, [], batch_id=batch))
    return findings


FIFTY = list(range(101, 151))


@pytest.mark.parametrize(
    ("first", "batches", "title"),
    [
        (41, FIFTY, "the training was resumed at step 41 and repeats batches: it has those of step 1"),
        (41, FIFTY[20:], "the training was resumed at step 41 and repeats batches: it has those of step 21"),
        (31, FIFTY[40:], "the training was resumed at step 31 and leaves batches out: it has those of step 41"),
    ],
)
def test_batches_that_come_again_or_are_left_out_after_a_resume_are_named(
    first: int, batches: list[int], title: str
) -> None:
    (finding,) = found(first, batches, FIFTY)
    assert (finding.step, words_of(finding).title) == (first, title)


@pytest.mark.parametrize(
    ("first", "batches", "before"),
    [
        (41, FIFTY[40:] * 3, FIFTY),
        (51, FIFTY, FIFTY),
        (1, FIFTY[40:], FIFTY),
        (1, FIFTY, FIFTY),
        (41, list(range(200, 240)), FIFTY),
        (41, FIFTY[:10], FIFTY[:10] * 5),
        (15, [7] * 20, [7] * 20),
        (41, [*FIFTY[: ALIKE - 1], 7, 8], FIFTY),
        (41, [0] * 20, [0] * 50),
    ],
    ids=[
        *("as before", "after the last step", "counted anew", "another training", "other data"),
        *("the same in each pass", "one batch", "too few alike", "unknown"),
    ],
)
def test_a_resume_with_its_own_data_raises_nothing(first: int, batches: list[int], before: list[int]) -> None:
    assert found(first, batches, before) == []


def test_it_is_over_with_the_next_training() -> None:
    detector = Resumes()
    steps = [(1, FIFTY), (41, FIFTY), (41, FIFTY[40:])]
    states = []
    for pid, (first, batches) in enumerate(steps, 1):
        states += [each.state for each in detector.hello(hello(pid))]
        for number, batch in enumerate(batches, first):
            states += [each.state for each in detector.step(Step(0, number, 1.0, 1, [], batch_id=batch))]
    assert states == ["raised", "resolved"]
