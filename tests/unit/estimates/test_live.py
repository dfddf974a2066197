"""Measured peaks beside predicted ones, and by what they part."""

from ftmon.protocol.analysis.estimates.time import Compared, compared, predicted
from ftmon.protocol.analysis.words import comparison_sentences
from ftmon.protocol.messages.memory import PredictedPhase, PredictedPoint, Prediction

GIB = 2**30


def phase(name: str, activations: int, parameters: int = 10 * GIB) -> PredictedPhase:
    parts = {"parameters": parameters, "activations": activations}
    return PredictedPhase(name, activations + parameters, 0, parts)


PREDICTION = Prediction(
    1.0,
    [
        PredictedPoint(rank, length, [phase("backward", (length // 1024 + rank) * GIB), phase("optimizer", 0)])
        for rank in (0, 4)
        for length in (1024, 4096)
    ],
    micro_batch=2,
    error=0.02,
)


def test_between_two_lengths_a_prediction_lies_on_the_line_through_both() -> None:
    found = predicted(PREDICTION, 0, "backward", 2 * 2048)
    assert found is not None
    assert found.allocated_peak_bytes == 12 * GIB
    assert found.parts == {"parameters": 10 * GIB, "activations": 2 * GIB}


def test_a_rank_that_was_not_run_is_like_the_nearest() -> None:
    found = predicted(PREDICTION, 3, "backward", 2 * 4096)
    assert found is not None
    assert found.parts["activations"] == 8 * GIB


def test_nothing_is_predicted_outside_of_the_lengths_or_of_another_phase() -> None:
    assert predicted(PREDICTION, 0, "backward", 2 * 8192) is None
    assert predicted(PREDICTION, 0, "backward", 0) is None
    assert predicted(PREDICTION, 0, "eval", 2 * 2048) is None
    assert predicted(Prediction(1.0), 0, "backward", 2 * 2048) is None


def one(name: str, measured: int, parts: dict[str, int] | None = None, length: int = 4096) -> Compared:
    found = compared(PREDICTION, 0, name, measured, 2 * length, parts)
    assert found is not None
    return found


def test_within_the_expected_error_figures_stand_alone() -> None:
    found = [one("backward", 14 * GIB + GIB // 5), one("optimizer", 10 * GIB)]
    assert not any(each.parted for each in found)
    assert comparison_sentences(found, 0.02) == [
        "predicted: backward 14.00 GiB (measured +1.4 %), optimizer 10.00 GiB (measured 0.0 %)"
    ]


def test_beyond_it_the_parts_that_make_it_are_named() -> None:
    parts = {"parameters": 10 * GIB, "activations": 5 * GIB, "buckets": GIB}
    found = [one("backward", 16 * GIB, parts), one("optimizer", 10 * GIB)]
    assert found[0].parts == (("activations", GIB), ("buckets", GIB))
    assert comparison_sentences(found, 0.02)[1] == (
        "backward was 2.00 GiB above its prediction, more than the expected error of 2 %: activations +1.00 GiB, "
        "buckets +1.00 GiB"
    )


def test_without_parts_the_phases_tell_where_it_is() -> None:
    assert comparison_sentences([one("backward", 16 * GIB), one("optimizer", 10 * GIB)], 0.02)[1].endswith(
        "; optimizer agrees"
    )
    alike = comparison_sentences([one("backward", 12 * GIB), one("optimizer", 8 * GIB)], 0.02)[1]
    assert "backward was 2.00 GiB below its prediction" in alike
    assert alike.endswith("; all phases by the same amount, so this memory stays allocated")


def test_a_few_mebibytes_of_a_small_run_are_no_difference() -> None:
    small = Prediction(1.0, [PredictedPoint(0, 8, [PredictedPhase("backward", 2**26)])], micro_batch=1, error=0.02)
    found = compared(small, 0, "backward", 2**26 + 2**22, 8)
    assert found is not None
    assert not found.parted
