"""Which steps are read in full, from what the probe's calls and the steps took."""

import pytest
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from ftmon.trainer.probe.phases.budget import CHOICES, FIRST, SUSPICIOUS, Budget, Unusual
from ftmon.trainer.probe.values.signs import EVERY, is_examined

US = 1000


def full_steps(budget, steps, step_us, *, first=1, full_us=200, coarse_us=50):
    """Take steps; return which of them were full."""
    found = []
    for number in range(first, first + steps):
        found.append(budget.full)
        budget.end_step(number, (full_us if budget.full else coarse_us) * US, step_us * US)
    return found


@pytest.mark.parametrize(
    ("step_us", "every"),
    [(30_000, 5), (14_000, 10), (11_500, 25), (2_000, CHOICES[-1])],
    ids=["100 us", "its share", "just", "never within it"],
)
def test_the_mean_cost_is_within_the_share_and_100_us_if_any_choice_is(step_us, every):
    budget = Budget(0.005)
    assert all(full_steps(budget, FIRST, step_us))
    full_steps(budget, 170, step_us, first=FIRST + 1)
    assert budget.every == every
    found = full_steps(budget, 10 * every, step_us, first=201)
    seen = [number for number, full in enumerate(found, 201) if full]
    assert seen == list(range(200 + every, 201 + 10 * every, every))
    mean_us = (200 * 10 + 50 * (len(found) - 10)) / len(found)
    assert mean_us <= min(100, 0.005 * step_us) or every == CHOICES[-1]


@pytest.mark.parametrize(("step_us", "every"), [(90_000, 50), (800_000, 5), (2_000_000, 2), (3_000_000, 1)])
def test_figures_by_phase_are_read_at_least_every_five_seconds(step_us, every):
    budget = Budget(0.005)
    full_steps(budget, 200, step_us, full_us=900, coarse_us=120)
    assert budget.every == every


def test_what_followed_steps_cost_is_the_mean_of_their_block_and_blocks_are_short():
    budget = Budget(0.005)
    for step_us, every, block in ((14_000, 50, 8), (100_000, 25, 4), (300_000, 10, 1)):
        for number in range(1, 300):
            if budget.full:
                budget.end_step(number, 800 * US, step_us * US)
            else:
                budget.note_followed(40 * US, step_us * US)
                budget.passed(number)
        assert (budget.every, budget.block) == (every, block)


def test_another_share_has_another_limit_without_one_all_steps_are_full_and_examined_ones_always():
    budget = Budget(0.02)
    full_steps(budget, 200, 100_000, full_us=390)
    assert budget.every == 1, "400 us are 2 % of 20 ms"
    assert all(full_steps(Budget(0.0), 100, 1))
    for every in CHOICES:
        full = [number for number in range(1, 3000) if number % every == 0]
        examined = [number for number in range(1, 3000) if is_examined(number, every)]
        assert set(examined) <= set(full)
        assert len(examined) == 2999 // max(EVERY, every)


def test_a_suspicion_makes_the_next_steps_full_and_the_recorder_is_afforded_by_a_step_s_entries():
    budget = Budget(0.005)
    full_steps(budget, 200, 2_000)
    budget.suspect()
    full_steps(budget, 1, 2_000, first=201)
    assert all(full_steps(budget, SUSPICIOUS - 1, 2_000, first=202))
    assert not any(full_steps(budget, CHOICES[-1] - SUSPICIOUS - 1, 2_000, first=201 + SUSPICIOUS))
    budget = Budget(0.005)
    assert budget.affords(10**6), "nothing is known of the steps yet"
    full_steps(budget, 20, 50_000)
    assert budget.affords(3_000)
    assert not budget.affords(5_000)
    assert Budget(0.0).affords(10**9)


def step(peak, **figures):
    span = Span(1, 1, peak)
    return Step(0, 1, 1.0, 100, [PhaseRecord("forward", 0, 100, span, span)], **figures)


def test_a_higher_peak_is_unusual_once_a_slow_growth_when_it_has_added_up_and_so_is_a_loss_far_off():
    unusual = Unusual()
    nan = float("nan")
    taken = [step(1000, loss=1.0), step(1005, loss=1.0), step(2000, loss=1.0), step(1500, loss=1.0)]
    taken += [
        step(1500, loss=nan), step(1500, loss=nan), step(1500, loss=1.0, retries=1), step(900, loss=1.0, retries=1),
    ]  # fmt: skip
    assert [unusual.is_so(each) for each in taken] == [True, False, True, False, True, False, True, False]
    unusual = Unusual()
    found = [unusual.is_so(step(10_000 + 40 * number)) for number in range(10)]
    assert found == [True, False, False, True, False, False, True, False, False, True]
    unusual = Unusual()
    assert [unusual.is_so(step(1000, loss=2.0, grad_norm=1.0)) for _ in range(20)] == [True] + [False] * 19
    assert not unusual.is_so(step(1000, loss=19.0, grad_norm=9.0))
    assert unusual.is_so(step(1000, loss=21.0, grad_norm=1.0))
    assert unusual.is_so(step(1000, loss=2.0, grad_norm=1.0))
    assert unusual.is_so(step(1000, loss=2.0, grad_norm=11.0))
