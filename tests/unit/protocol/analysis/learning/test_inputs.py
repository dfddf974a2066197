"""Rows without labels, ends that are never learned, documents that see each other."""

from math import nan
from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.analysis.learning.inputs import ENDS, Inputs
from ftmon.protocol.messages.telemetry import Goodbye, Signs, Step


def step(number: int, rank: int = 0, micro_steps: int = 1, **signs: Any) -> Step:
    return Step(rank, number, 1.0, 1, [], micro_steps=micro_steps, loss=1.0, signs=Signs(**signs) if signs else None)


EMPTY = {"labelled": 2, "unlabelled": 2}
HALF = {"labelled": 2, "unlabelled": 1}


def states(detector: Inputs, steps: list[Step]) -> list[tuple[int, str, str]]:
    """Return the step, kind and state of each finding."""
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
def test_rows_without_labels_are_raised_when_they_are_no_exception(
    signs: list[dict[str, int]], expected: list[tuple[int, str, str]]
) -> None:
    assert states(Inputs(), [step(number, micro_steps=2, **each) for number, each in enumerate(signs, 1)]) == expected


def test_one_micro_batch_without_labels_whose_loss_is_lost_is_raised_at_once_and_resolved_after_forty_others() -> None:
    detector = Inputs()
    lost = msgspec.structs.replace(step(4, labelled=1, unlabelled=1), loss=nan)
    found = [one for each in (*map(step, range(1, 4)), lost) for one in detector.step(each)]
    assert [(one.state, one.severity, one.step) for one in found] == [("raised", "warning", 4)]
    assert "not a number" in words_of(found[0]).text
    assert states(detector, [step(number) for number in range(5, 60)]) == [(44, "no_labels", "resolved")]


def test_each_rank_without_labels_is_named_with_the_figures_of_its_end() -> None:
    detector = Inputs()
    for number in range(1, 41):
        detector.step(step(number, 0, 2))
        detector.step(step(number, 1, 2, **(EMPTY if number > 10 else {})))
    (found,) = detector.goodbye(Goodbye(1, 2.0, 40, "finished"))
    assert (found.state, found.ranks, found.step) == ("updated", (1,), 11)
    assert words_of(found).title == "no label tokens in 60 of 60 micro-batches on rank 1 since step 11"
    assert detector.goodbye(Goodbye(0, 2.0, 40, "finished")) == []
    (last,) = [found for number in range(41, 90) for found in detector.step(step(number, 1, 2))]
    assert last.state == "resolved"


def test_half_of_the_micro_batches_without_labels_are_named_with_the_first_of_them() -> None:
    detector = Inputs()
    found = [one for at in range(1, 70) for one in detector.step(step(at, 0, 2, **(HALF if at > 9 else {})))]
    assert [(one.state, one.step) for one in found] == [("raised", 10)]


def test_an_end_that_is_among_the_inputs_and_never_a_label_is_raised_until_it_is_one() -> None:
    detector = Inputs()
    found = states(detector, [step(number, ends=4) for number in range(1, 11)])
    assert found == [(ENDS // 4, "end_never_learned", "raised")]
    assert states(detector, [step(11, ends=4, learned_ends=1)]) == [(11, "end_never_learned", "resolved")]
    assert states(Inputs(), [step(number, ends=4, learned_ends=4) for number in range(1, 50)]) == []


@pytest.mark.parametrize(
    ("by", "words"), [("mask", "attention mask"), ("cache", "cache"), ("batch", "Flash"), ("encoder", "encoder")]
)
def test_documents_that_see_each_other_are_told_with_their_cause_once_for_each_rank(by: str, words: str) -> None:
    detector = Inputs()
    found = [each for rank in (1, 0, 1) for each in detector.step(step(3, rank, mixed=2, mixed_by=by))]
    assert [each.ranks for each in found] == [(1,), (0, 1)]
    assert words in words_of(found[0]).text
    assert words_of(found[0]).title.endswith("since step 3")
    (later,) = Inputs().step(step(150, mixed=2, mixed_by=by, mixed_after=100))
    assert words_of(later).title.endswith("since a step from 101 to 150")
