"""The largest value that fits, by few calls."""

from ftmon.protocol.analysis.estimates.largest import largest_that_fits
from hypothesis import given
from hypothesis import strategies as st

GIB = 2**30


@given(
    flat=st.integers(0, 10_000), slope=st.integers(1, 50), kink=st.integers(1, 5000), bend=st.integers(0, 100),
    capacity=st.integers(0, 300_000), step=st.sampled_from([1, 8, 64]),
)  # fmt: skip
def test_the_result_fits_and_the_next_value_does_not(
    flat: int, slope: int, kink: int, bend: int, capacity: int, step: int
) -> None:
    def peak(x: int) -> float:
        return max(flat, slope * x, slope * kink + (slope + bend) * (x - kink))

    found = largest_that_fits(peak, capacity, 1, 4097, step)
    assert len(found.tried) <= 26
    if found.value is None:
        assert peak(1) > capacity
        return
    assert (found.value - 1) % step == 0
    assert found.peak_bytes == peak(found.value) <= capacity
    assert found.at_the_end == (peak(1 + 4096 // step * step) <= capacity)
    if not found.at_the_end:
        assert peak(found.value + step) > capacity


def test_a_flat_then_straight_curve_takes_few_calls() -> None:
    found = largest_that_fits(lambda x: max(10_000.0, 4000 + 2.9 * x), 20_000, 1, 65_536)
    assert found.value == 5517
    assert len(found.tried) <= 8


def test_steps_of_memory_do_not_stop_the_search() -> None:
    found = largest_that_fits(lambda x: x // 512 * 512 * 100.0, 100_000, 1, 8192)
    assert found.value == 1023


def test_the_highest_value_is_said_to_be_the_end() -> None:
    found = largest_that_fits(float, 10_000, 1, 4096)
    assert (found.value, found.at_the_end) == (4096, True)


def test_known_peaks_are_not_predicted_again() -> None:
    tried = {100: 1000.0, 200: 2000.0, 4096: 40_960.0, 1: 10.0}
    asked: list[int] = []

    def predict(x: int) -> float:
        asked.append(x)
        return 10.0 * x

    found = largest_that_fits(predict, 1555, 1, 4096, tried=tried)
    assert found.value == 155
    assert asked
    assert all(100 < x < 200 for x in asked)
