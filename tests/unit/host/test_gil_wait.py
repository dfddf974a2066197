"""When other threads of a process cannot run Python, judged from what is seen of them at several moments."""

import pytest
from ftmon.trainer.host.inspection.inspect import Sample, is_held_by_native_code

WAITS = (100, 110, 120)
"""Wakeups of a thread that waits for the GIL, at each sample."""
TIMES = (1.0, 1.03, 1.06)
ASLEEP = {7: ("S", 10)}


@pytest.mark.parametrize(
    ("wakeups", "first", "last", "held"),
    [
        (WAITS, ASLEEP, ASLEEP, True),
        (WAITS, {7: ("R", 10)}, {7: ("R", 20)}, True),
        (WAITS, {7: ("R", 10)}, {7: ("R", 11)}, False),
        (WAITS, {7: ("D", 10)}, ASLEEP, False),
        (WAITS, {7: ("S", 10), 8: ("S", 3)}, {7: ("S", 10), 8: ("R", 3)}, False),
        (WAITS, ASLEEP, {**ASLEEP, 9: ("R", 50)}, False),
        (WAITS, {**ASLEEP, 9: ("R", 50)}, ASLEEP, False),
        ((100, 110, 111), ASLEEP, ASLEEP, False),
        ((0, 0, 0), ASLEEP, ASLEEP, False),
    ],
)
def test_only_threads_that_sleep_or_have_computed_for_long_leave_the_gil_with_native_code(wakeups, first, last, held):
    samples = [Sample(at, at, *each) for at, *each in zip(TIMES, wakeups, (first, last, last), strict=True)]
    assert is_held_by_native_code(samples) is held


def test_samples_that_are_further_apart_than_half_a_poll_prove_nothing():
    samples = [Sample(at, at + 0.001, wakeups, ASLEEP) for at, wakeups in zip((1.0, 1.03, 1.06), WAITS, strict=True)]
    assert is_held_by_native_code(samples)
    # Before the middle one it may have slept for a tenth of a second, and had the GIL.
    samples[1] = samples[1]._replace(ended=1.05)
    assert not is_held_by_native_code(samples)
