"""Speed and time left: from the last few steps, reset by a change, and the mean once the run has ended."""

from collections.abc import Sequence

import pytest
from ftmon.protocol.messages import control, telemetry
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.cli.narrate import Narrator
from ftmon.tui.model.run import RunModel

STARTED = 1_780_000_000.0
NONE = Span(0, 0, 0)


def stepped(lengths: Sequence[float], total: int = 0, pauses: dict[int, float] | None = None) -> RunModel:
    """Give a model of one rank with steps of these seconds, 100 tokens each; some begin with an evaluation."""
    model = RunModel()
    model.apply(Frame(1, STARTED, telemetry.Plan(0, total_steps=total)))
    t = STARTED
    for number, length in enumerate(lengths, 1):
        pause = (pauses or {}).get(number, 0.0)
        records = [PhaseRecord("eval", 0, int(pause * 1e6), NONE, NONE)] if pause else []
        whole = length + pause
        step = Step(0, number, t, int(whole * 1e6), [*records, PhaseRecord("data", 0, 1, NONE, NONE)], tokens=100)
        t += whole
        model.apply(Frame(number + 1, t, step))
    return model


def test_three_slower_steps_give_the_new_speed_and_time_left() -> None:
    model = stepped([3.8] * 30 + [11.6] * 3, total=43)
    assert model.rates.seconds_per_step == pytest.approx(11.6)
    assert model.rates.tokens_per_second == pytest.approx(100 / 11.6)
    assert model.seconds_left == pytest.approx(10 * 11.6)


@pytest.mark.parametrize("since", [3, 4, 5, 6, 7, 8, 20])
def test_after_a_change_the_earlier_speed_never_returns(since: int) -> None:
    model = stepped([4.0] * 30 + [1.0] * since)
    assert model.rates.seconds_per_step == pytest.approx(1.0)


def test_one_slow_step_is_no_change_of_speed() -> None:
    for after in range(4):
        assert stepped([1.0] * 20 + [30.0] + [1.0] * after).rates.seconds_per_step == pytest.approx(1.0)


def test_the_slow_first_step_counts_only_while_it_is_the_only_one() -> None:
    assert stepped([60.0]).rates.seconds_per_step == pytest.approx(60.0)
    assert stepped([60.0, 1.0]).rates.seconds_per_step == pytest.approx(1.0)


def test_evaluations_are_part_of_time_left_and_of_no_step() -> None:
    model = stepped([1.0] * 40, total=80, pauses={11: 20.0, 21: 20.0, 31: 20.0})
    assert model.rates.seconds_per_step == pytest.approx(1.0)
    assert model.seconds_left == pytest.approx(40 * (1.0 + 60.0 / 40))


def test_steps_that_were_not_recorded_share_the_time_in_between() -> None:
    model = stepped([1.0] * 10)
    model.apply(Frame(100, STARTED + 15, Step(0, 15, STARTED + 14, 1_000_000, [], tokens=100)))
    assert model.rates.seconds_per_step == pytest.approx(1.0)


def test_an_ended_run_has_the_mean_over_its_steps_without_the_first() -> None:
    lengths = [60.0, *[1.0] * 50, *[3.0] * 50]
    model = stepped(lengths, pauses={70: 500.0})
    assert model.rates.seconds_per_step == pytest.approx(3.0)
    model.apply(Frame(1000, STARTED + 1000, control.RunState("finished", STARTED + 1000)))
    assert model.rates.seconds_per_step == pytest.approx(2.0)
    assert model.rates.tokens_per_second == pytest.approx(50.0)
    assert model.seconds_left is None


def test_the_plain_lines_print_the_speed_of_the_last_steps() -> None:
    model = stepped([3.8] * 30 + [11.6] * 3, total=43)
    text = "\n".join(Narrator().new_lines(model))
    assert "11.600 s/step" in text
    assert "1 m 56 s left" in text
