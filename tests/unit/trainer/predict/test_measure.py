"""Which choices are measured, and which of them is taken."""

from ftmon.protocol.errors import FtmonError
from ftmon.trainer.predict.choose import Candidate, Estimate
from ftmon.trainer.predict.measure import Measured, best, why_no_result

GIB = 1 << 30


def ranked(*speeds: float) -> list[Estimate]:
    return [
        Estimate(Candidate(1, "none", False, 0, 1 << place, 32 >> place), GIB, 1.0, speed)
        for place, speed in enumerate(speeds)
    ]


def measured(speeds: dict[int, float], found: list[Estimate]) -> tuple[list[int], list[int], list[str]]:
    """Measure with these speeds by micro-batch, 0: out of memory, -1: fails; return tried, resulting order, lines."""
    tried: list[int] = []

    def measure(one: Candidate) -> Measured:
        tried.append(one.micro_batch)
        speed = speeds[one.micro_batch]
        if speed < 0:
            raise FtmonError("rank 0 was killed by SIGKILL")
        return Measured(speed, 1.0, 2 * GIB) if speed else Measured(out_of_memory=True)

    result, lines = best(found, measure, lambda text: None)
    return tried, [one.candidate.micro_batch for one in result], lines


def test_the_fastest_of_the_three_best_is_taken_and_what_is_a_fifth_slower_is_not_measured():
    tried, order, lines = measured({1: 90, 2: 120, 4: 100, 8: 999}, ranked(110, 109, 108, 107))
    assert (tried, order) == ([1, 2, 4], [2, 4, 1, 8])
    assert lines[0] == "measured all weights, ZeRO 1, micro-batch 1 x 32: 90 tokens/s, 2.0 GiB reserved"
    tried, order, _ = measured({1: 90}, ranked(100, 79, 50))
    assert (tried, order) == ([1], [1, 2, 4])


def test_choices_are_measured_until_one_does_not_run_out_of_memory_and_the_best_of_them_taken():
    tried, order, _ = measured({1: 0, 2: 0, 4: 0, 8: 0, 16: 7}, ranked(100, 99, 98, 97, 20))
    assert (tried, order) == ([1, 2, 4, 8, 16], [16])
    assert measured({1: 0, 2: 0}, ranked(100, 99))[1] == []
    tried, order, lines = measured({1: 0, 2: 80, 4: 0}, ranked(100, 99, 98))
    assert (tried, order) == ([1, 2, 4], [2])
    assert lines[0] == "measured all weights, ZeRO 1, micro-batch 1 x 32: out of memory, so it is not chosen"


def test_a_training_that_fails_keeps_the_predicted_order_and_a_measurement_without_a_result_says_why():
    tried, order, lines = measured({1: -1}, ranked(100, 99))
    assert (tried, order) == ([1], [1, 2])
    assert lines == ["measured all weights, ZeRO 1, micro-batch 1 x 32: failed: rank 0 was killed by SIGKILL"]
    logs = ["settings: none\n", "compiling\nmodel.name: no such folder\n"]
    assert why_no_result([-9, None], logs) == "rank 0 was killed by SIGKILL; last line: settings: none"
    assert why_no_result([2, None], logs[1:]) == "model.name: no such folder"
    assert why_no_result([None, 0], logs) == "no result in 5 m 00 s; last line: settings: none"
    assert why_no_result([0, 0], ["", ""]) == "the ranks ended without a result"
