"""The largest value that fits, by few rounds."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from ftmon.protocol.analysis.estimates.ranking import Largest, Need, largest_that_fit, round_numbers
from hypothesis import given
from hypothesis import strategies as st


class Runs:
    """Runs of a known curve, counted."""

    def __init__(self, peak: Callable[[int], float], capacities: Sequence[float]) -> None:
        self.peak = peak
        self.capacities = capacities
        self.rounds: list[list[int]] = []

    def __call__(self, values: list[int]) -> list[Need]:
        assert sorted(set(values)) == values
        assert not set(values) & {value for earlier in self.rounds for value in earlier}
        self.rounds.append(values)
        return [Need(self.peak(x), [self.peak(x) <= each for each in self.capacities]) for x in values]


@given(
    flat=st.integers(0, 10_000), slope=st.integers(1, 50), kink=st.integers(1, 5000), bend=st.integers(0, 100),
    capacities=st.lists(st.integers(0, 300_000), min_size=1, max_size=4), step=st.sampled_from([1, 8, 64]),
)  # fmt: skip
def test_each_result_fits_and_the_next_value_does_not(flat, slope, kink, bend, capacities, step):
    def peak(x: int) -> float:
        return max(flat, slope * x, slope * kink + (slope + bend) * (x - kink))

    values = range(1, 4098, step)
    runs = Runs(peak, capacities)
    for capacity, found in zip(capacities, largest_that_fit(values, capacities, runs), strict=True):
        fitting = [value for value in values if peak(value) <= capacity]
        if not fitting:
            assert found == Largest(None, 1)
        elif len(fitting) == len(values):
            assert found == Largest(values[-1], None)
        else:
            assert found == Largest(fitting[-1], fitting[-1] + step)
    assert len(runs.rounds) <= 1 + 3 + 12, "the ends, lines, and halving 4,097 values"


def test_a_flat_then_straight_curve_takes_few_rounds_for_many_capacities():
    capacities = [1000 * gib for gib in (8, 12, 16, 24, 40, 48, 80, 96, 141, 180, 288)]
    runs = Runs(lambda x: max(10_000.0, 4000 + 2.9 * x), capacities)
    found = largest_that_fit(round_numbers(131_072), capacities, runs)
    for capacity, one in zip(capacities, found, strict=True):
        exact = int((capacity - 4000) / 2.9) if capacity >= 10_000 else None
        if exact is None:
            assert one == Largest(None, 1)
            continue
        assert one.value is not None
        assert one.above is not None
        assert one.value <= exact < one.above <= one.value * 1.008
    assert len(runs.rounds) <= 4


def test_a_value_that_fails_below_larger_ones_is_not_passed_nor_do_steps_of_memory_stop_the_search():
    def fails(first: int, end: int) -> Callable[[list[int]], list[Need]]:
        return lambda values: [Need(10.0 * x, [10.0 * x <= 40_000 and not first <= x < end]) for x in values]

    assert largest_that_fit(range(100, 100_001, 300), [40_000], fails(1000, 1100)) == [Largest(700, 1000)]
    run = fails(3870, 3890)
    assert largest_that_fit(range(1, 100_001), [40_000], run) == [Largest(4000, 4001)]
    shares = largest_that_fit(range(1, 100_001), [40_000], run, confirm=(0.99, 0.97))
    assert shares == [Largest(3869, 3870)], "shares of a result that do not fit lower it"
    (found,) = largest_that_fit(range(1, 8193), [100_000], Runs(lambda x: x // 512 * 512 * 100.0, [100_000]))
    assert found == Largest(1023, 1024)
    runs = Runs(float, [10])
    assert largest_that_fit([8], [10], runs) == [Largest(8, None)]
    assert runs.rounds == [[8]]


def test_round_numbers_reach_the_end_and_are_near_each_other():
    assert round_numbers(1) == [1]
    assert round_numbers(300)[:256] == [*range(1, 256), 256]
    assert round_numbers(300)[-3:] == [296, 298, 300]
    found = round_numbers(100_001, step=3)
    assert found[-1] == 99_999
    assert all(number % 3 == 0 for number in found)
    assert all(after <= before * 1.008 for before, after in pairwise(found) if before >= 3 * 128)
