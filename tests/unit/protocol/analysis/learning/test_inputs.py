"""Rows without labels, ends never learned, documents that see each other, data that do not resume with the weights."""

from math import nan
from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.analysis.learning import inputs
from ftmon.protocol.messages.telemetry import DataLoaderInfo, DeviceInfo, Goodbye, Hello, Signs, Step
from msgspec.structs import replace


def step(number: int, rank: int = 0, micro_steps: int = 1, **signs: Any) -> Step:
    return Step(rank, number, 1.0, 1, [], micro_steps=micro_steps, loss=1.0, signs=Signs(**signs) if signs else None)


EMPTY = {"labelled": 2, "unlabelled": 2}
HALF = {"labelled": 2, "unlabelled": 1}


def states(detector: inputs.Inputs, steps: list[Step]) -> list[tuple[int, str, str]]:
    return [(each.step, found.kind, found.state) for each in steps for found in detector.step(each)]


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ([EMPTY] * 4, [(2, "no_labels", "raised")]),
        ([HALF, *[EMPTY] * 6], [(5, "no_labels", "raised")]),
        ([HALF] * 30, [(20, "no_labels", "raised")]),
        ([{}] * 5 + [{"labelled": 2, "unlabelled": 2}, {}, {}] * 20, []),
        ([{}] * 100 + [EMPTY] * 3 + [{}] * 100, []),
        ([{}] * 2000, []),
    ],
    ids=["from the start", "in a row", "half of them", "one in six is too long", "three long ones", "fine"],
)
def test_rows_without_labels_are_raised_when_they_are_no_exception(signs, expected):
    assert (
        states(inputs.Inputs(), [step(number, micro_steps=2, **each) for number, each in enumerate(signs, 1)])
        == expected
    )


def test_one_micro_batch_without_labels_is_raised_at_once_and_each_rank_named_with_its_end():
    detector = inputs.Inputs()
    lost = msgspec.structs.replace(step(4, labelled=1, unlabelled=1), loss=nan)
    found = [one for each in (*map(step, range(1, 4)), lost) for one in detector.step(each)]
    assert [(one.state, one.severity, one.step) for one in found] == [("raised", "warning", 4)]
    assert "not a number" in words_of(found[0]).text
    assert states(detector, [step(number) for number in range(5, 60)]) == [(44, "no_labels", "resolved")]
    detector = inputs.Inputs()
    for number in range(1, 41):
        detector.step(step(number, 0, 2))
        detector.step(step(number, 1, 2, **(EMPTY if number > 10 else {})))
    (found,) = detector.goodbye(Goodbye(1, 2.0, 40, "finished"))
    assert (found.state, found.ranks, found.step) == ("updated", (1,), 11)
    assert words_of(found).title == "no label tokens in 60 of 60 micro-batches on rank 1 since step 11"
    assert detector.goodbye(Goodbye(0, 2.0, 40, "finished")) == []
    (last,) = [found for number in range(41, 90) for found in detector.step(step(number, 1, 2))]
    assert last.state == "resolved"


def test_steps_not_examined_are_none_with_labels_and_half_without_labels_are_named_with_their_first():
    detector = inputs.Inputs()
    looked_at = {50: EMPTY | {"labelled_after": 16}, **dict.fromkeys(range(56, 60), EMPTY | {"labelled_after": 55})}
    looked_at[55] = EMPTY | {"labelled_after": 50}
    steps = [step(number, micro_steps=2, **looked_at.get(number, {})) for number in range(1, 60)]
    (found,) = [one for each in steps for one in detector.step(each)]
    assert words_of(found).title == "no label tokens in 8 of 8 micro-batches on rank 0 since a step from 17 to 50"
    detector = inputs.Inputs()
    found = [one for at in range(1, 70) for one in detector.step(step(at, 0, 2, **(HALF if at > 9 else {})))]
    assert [(one.state, one.step) for one in found] == [("raised", 10)]


def test_an_end_never_a_label_is_raised_until_it_is_one_and_labels_that_are_not_the_next_tokens_too():
    detector = inputs.Inputs()
    found = states(detector, [step(number, ends=4) for number in range(1, 11)])
    assert found == [(inputs.ENDS // 4, "end_never_learned", "raised")]
    assert states(detector, [step(11, ends=4, learned_ends=1)]) == [(11, "end_never_learned", "resolved")]
    assert states(inputs.Inputs(), [step(number, ends=4, learned_ends=4) for number in range(1, 50)]) == []
    detector = inputs.Shifts()
    looked_at = {5: "twice", 50: "twice", 100: "never", 150: "once", 200: "never", 250: "never", 300: "never"}
    steps = [step(number, shifted=looked_at.get(number, "")) for number in range(1, 310)]
    found = [(each.step, one) for each in steps for one in detector.step(each)]
    expected = [*((50, "raised", 5), (150, "resolved", 5), (250, "raised", 200))]
    assert [(at, one.state, one.step) for at, one in found] == expected
    titles = [words_of(one).title for _, one in found]
    assert titles[0] == "labels are shifted twice since step 5: the model learns the token after the next one"
    assert titles[2] == "labels are not shifted since step 200: the model learns to copy its input"


def test_padding_among_the_labels_of_several_steps_and_rows_that_begin_twice_are_told_once():
    detector = inputs.Inputs()
    steps = [step(number, padding=6 * (number >= 3), padding_of=20) for number in range(1, 20)]
    ((at, one),) = [(each.step, one) for each in steps for one in detector.step(each)]
    assert (at, one.kind, one.step) == (5, "padding_learned", 3)
    assert words_of(one).title == "padding is learned: 30% of the labels in the loss"
    assert states(inputs.Inputs(), [step(1, padding=100, padding_of=200), step(2, padding=1, padding_of=200)]) == []
    detector = inputs.Inputs()
    steps = [step(number, begun_twice=number >= 3) for number in range(1, 20)]
    ((at, one),) = [(each.step, one) for each in steps for one in detector.step(each)]
    assert (at, one.kind, one.step) == (5, "begun_twice", 3)


@pytest.mark.parametrize(
    ("by", "words"),
    [
        *(("mask", "attention mask"), ("cache", "cache"), ("batch", "Flash"), ("encoder", "encoder")),
        *(("4-D mask", "4-D mask lets"), ("numbers", "documents' numbers")),
    ],
)
def test_documents_that_see_each_other_are_told_with_their_cause_once_for_each_rank(by, words):
    detector = inputs.Inputs()
    found = [each for rank in (1, 0, 1) for each in detector.step(step(3, rank, mixed=2, mixed_by=by))]
    assert [each.ranks for each in found] == [(1,), (0, 1)]
    assert words in words_of(found[0]).text
    assert words_of(found[0]).title.endswith("since step 3")
    (later,) = inputs.Inputs().step(step(150, mixed=2, mixed_by=by, mixed_after=100))
    assert words_of(later).title.endswith("since a step from 101 to 150")


def hello(pid: int, rank: int = 0) -> Hello:
    return Hello(rank, rank, 2, "node1", pid, 7, DeviceInfo("cpu", 0, "d", 1), "glibc", 1.0)


def found(first: int, batches: list[int], before: list[int], rank: int = 0) -> list[Finding]:
    """Return the findings of a job that begins at step ``first`` after one with the batches ``before``."""
    detector = inputs.Resumes()
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
def test_batches_that_come_again_or_are_left_out_after_a_resume_are_named(first, batches, title):
    (finding,) = found(first, batches, FIFTY)
    assert (finding.step, words_of(finding).title) == (first, title)


@pytest.mark.parametrize(
    ("first", "batches", "before"),
    [
        (41, FIFTY[40:] * 3, FIFTY), (51, FIFTY, FIFTY), (1, FIFTY[40:], FIFTY), (1, FIFTY, FIFTY),
        (41, list(range(200, 240)), FIFTY), (41, FIFTY[:10], FIFTY[:10] * 5), (15, [7] * 20, [7] * 20),
        (41, [*FIFTY[: inputs.ALIKE - 1], 7, 8], FIFTY), (41, [0] * 20, [0] * 50),
    ],
    ids=[
        *("as before", "after the last step", "counted anew", "another training", "other data"),
        *("the same in each pass", "one batch", "too few alike", "unknown"),
    ],
)  # fmt: skip
def test_a_resume_with_its_own_data_raises_nothing(first, batches, before):
    assert found(first, batches, before) == []


def test_steps_without_an_update_which_an_optimizer_does_not_count_leave_no_batches_out():
    def told(overflows: int) -> list[Finding]:
        detector = inputs.Resumes()
        detector.hello(hello(1))
        for number, batch in enumerate(FIFTY, 1):
            detector.step(Step(0, number, 1.0, 1, [], batch_id=batch, overflow=number <= overflows))
        detector.hello(hello(2))
        steps = [Step(0, number, 1.0, 1, [], batch_id=batch) for number, batch in enumerate(FIFTY[40:], 39)]
        return [one for each in steps for one in detector.step(each)]

    assert told(2) == []
    assert len(told(1)) == 1


def test_it_is_over_with_the_next_training():
    detector = inputs.Resumes()
    steps = [(1, FIFTY), (41, FIFTY), (41, FIFTY[40:])]
    states = []
    for pid, (first, batches) in enumerate(steps, 1):
        states += [each.state for each in detector.hello(hello(pid))]
        for number, batch in enumerate(batches, first):
            states += [each.state for each in detector.step(Step(0, number, 1.0, 1, [], batch_id=batch))]
    assert states == ["raised", "resolved"]


def on_ranks(
    batches: list[list[int]], ranks: int = 2, config: dict[str, Any] | None = None, tokens: int = 8
) -> list[Finding]:
    """Return the findings of a job, by the batches of its ranks in each step."""
    detector = inputs.Copies()
    greeting = replace(hello(1), world_size=ranks, deepspeed_config=config)
    findings = [*detector.hello(greeting), *detector.hello(replace(greeting, rank=1))]
    for number, each in enumerate(batches, 1):
        for rank, batch in enumerate(each):
            findings += detector.step(Step(rank, number, 1.0, 1, [], batch_id=batch, tokens=tokens))
    return findings


SAME = [[number, number] for number in range(1, 30)]


def test_ranks_on_the_same_batches_are_named_until_they_are_not_and_steps_never_ended_forgotten():
    (finding, over) = on_ranks([[90, 91], *SAME, [92, 93]], config={"sequence_parallel_size": "auto"})
    assert (finding.state, finding.ranks, finding.step) == ("raised", (0, 1), 2)
    assert words_of(finding).title == "all 2 ranks train on the same batches since step 2"
    assert over.state == "resolved"
    (finding,) = on_ranks([[90, 91], *SAME], tokens=0)  # images
    assert finding.step == 2
    detector = inputs.Copies()
    detector.hello(replace(hello(1), world_size=3))
    for number in range(1, 1000):
        assert detector.step(Step(0, number, 1.0, 1, [], batch_id=number, tokens=1)) == []
    assert len(detector._unfinished) < 100


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        ([[number, number + 1] for number in range(1, 30)], {}),
        ([[7, 7]] * 30, {}),  # one batch is fitted on purpose
        ([[number, 0] for number in range(1, 30)], {}),  # tensor parallelism: the first of them tells it
        ([[number, number, number + 40, number + 40] for number in range(1, 30)], {"ranks": 4}),
        (SAME, {"config": {"sequence_parallel_size": 2}}),
        ([[1 + number % 3, 1 + number % 3] for number in range(1, 30)], {"tokens": 0}),  # perhaps not the samples
        (SAME[: inputs.COPIES - 1], {}),
    ],
)
def test_ranks_that_have_other_batches_or_share_them_on_purpose_are_fine(batches, options):
    assert on_ranks(batches, **options) == []


def fed(workers: int, every: int, micro_steps: int = 1, *, iterable: bool = True, steps: int = 80) -> list[Finding]:
    """Return the findings where each batch comes so many times in a row."""
    detector = inputs.Repeats()
    detector.hello(replace(hello(1), loader=DataLoaderInfo(workers=workers, iterable=iterable)))
    found: list[Finding] = []
    for number in range(1, steps + 1):
        first = (number - 1) * micro_steps
        repeated = sum(at % every != 0 for at in range(first, first + micro_steps))
        signs = Signs(repeated=repeated) if repeated else None
        found += detector.step(Step(0, number, 1.0, 1, [], batch_id=number, micro_steps=micro_steps, signs=signs))
    return found


@pytest.mark.parametrize(("workers", "micro_steps"), [(2, 1), (2, 4), (4, 1), (8, 2)])
def test_batches_that_come_once_from_each_worker_are_named(workers, micro_steps):
    (finding,) = fed(workers, workers, micro_steps, steps=inputs.OF_EACH * workers)
    title = f"each batch comes {workers} times in a row: the loader's {workers} workers read the same data"
    assert (words_of(finding).title, finding.step) == (title, 1)


@pytest.mark.parametrize(
    ("workers", "every", "options"),
    [(2, 1, {}), (2, 10**6, {}), (4, 2, {}), (2, 2, {"iterable": False}), (0, 2, {}), (8, 10**6, {})],
)
def test_batches_that_differ_or_are_repeated_otherwise_are_fine(workers, every, options):
    assert fed(workers, every, **options, steps=400) == []
