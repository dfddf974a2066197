"""Which steps are read in full, from what the probe's calls and the steps took."""

import pytest
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from ftmon.trainer.probe.phases.budget import CHOICES, FIRST, SUSPICIOUS, Budget, Unusual

US = 1000


def full_steps(budget, steps, step_us, *, full_us=200, coarse_us=50):
    """Take steps; return which of them were full."""
    found = []
    for _ in range(steps):
        found.append(budget.full)
        budget.end_step((full_us if budget.full else coarse_us) * US, step_us * US)
    return found


@pytest.mark.parametrize(
    ("step_us", "every"),
    [(100_000, 1), (30_000, 2), (14_000, 10), (2_000, CHOICES[-1])],
    ids=["within the budget", "somewhat over it", "the mean is within it", "never within it"],
)
def test_the_mean_cost_is_within_the_share_if_any_choice_is(step_us, every):
    budget = Budget(0.005)
    assert all(full_steps(budget, FIRST, step_us))
    full_steps(budget, 200, step_us)
    assert budget.every == every
    found = full_steps(budget, 10 * every, step_us)
    assert sum(found) == 10
    mean_us = (200 * 10 + 50 * (len(found) - 10)) / len(found)
    assert mean_us <= 0.005 * step_us or every == CHOICES[-1]


def test_without_a_budget_all_steps_are_full():
    assert all(full_steps(Budget(0.0), 100, 1))


def test_a_suspicion_makes_the_next_steps_full():
    budget = Budget(0.005)
    full_steps(budget, 200, 2_000)
    budget.suspect()
    full_steps(budget, 1, 2_000)
    assert all(full_steps(budget, SUSPICIOUS - 1, 2_000))
    assert not all(full_steps(budget, CHOICES[-1], 2_000))


def test_the_recorder_is_afforded_by_the_entries_and_the_time_of_a_step():
    budget = Budget(0.005)
    assert budget.affords(10**6), "nothing is known of the steps yet"
    full_steps(budget, 20, 50_000)
    assert budget.affords(3_000)
    assert not budget.affords(5_000)
    assert Budget(0.0).affords(10**9)


def step(peak, **figures):
    span = Span(1, 1, peak)
    return Step(0, 1, 1.0, 100, [PhaseRecord("forward", 0, 100, span, span)], **figures)


def test_a_higher_peak_or_a_change_for_the_worse_is_unusual_once():
    unusual = Unusual()
    nan = float("nan")
    taken = [step(1000, loss=1.0), step(1005, loss=1.0), step(2000, loss=1.0), step(1500, loss=1.0)]
    taken += [
        step(1500, loss=nan),
        step(1500, loss=nan),
        step(1500, loss=1.0, retries=1),
        step(900, loss=1.0, retries=1),
    ]
    assert [unusual.is_so(each) for each in taken] == [True, False, True, False, True, False, True, False]


def test_a_slow_growth_is_unusual_each_time_it_has_added_up():
    unusual = Unusual()
    found = [unusual.is_so(step(10_000 + 40 * number)) for number in range(10)]
    assert found == [True, False, False, True, False, False, True, False, False, True]
