"""Updates without effect, weights that stand still or are not finite, gradients and edits that are lost."""

import math
from typing import Any

import pytest
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.analysis.learning.updates import BARE, STILL, ZERO, Updates
from ftmon.protocol.analysis.words import Words
from ftmon.protocol.messages.telemetry import Goodbye, Heartbeat, LostEdit, PhaseRecord, Signs, Span, Step
from msgspec.structs import replace
from simulated_run import Sim

INF = math.inf


def step(
    number: int, rank: int = 0, loss: float = 1.0, lr: float = 1e-3, signs: Signs | None = None, **more: Any
) -> Step:
    return Step(rank, number, 1.0, 1, [], loss=loss, lr=lr, signs=signs, **more)


def found(detector: Updates, steps: list[Step]) -> list[tuple[int, str, str, int | None]]:
    return [(each.step, one.kind, one.state, one.step) for each in steps for one in detector.step(each)]


def test_three_skipped_updates_in_a_row_are_told_where_there_is_no_scaler_and_counted_at_the_end():
    detector = Updates()
    steps = [step(number, overflow=number >= 21, grad_norm=INF if number >= 21 else 1.0) for number in range(1, 61)]
    assert found(detector, steps) == [(23, "updates_skipped", "raised", 21)]
    (last,) = detector.goodbye(Goodbye(0, 2.0, 60, "finished"))
    words = words_of(last)
    assert words.title == "gradients are not finite since step 21: 40 updates without effect"
    assert "scaler" not in f"{words.text} {words.remedy}"
    assert found(detector, [step(61)]) == [(61, "updates_skipped", "resolved", 21)]


def test_a_loss_scaler_that_looks_for_its_scale_skips_on_purpose_and_looks_for_none_in_bf16():
    assert found(Updates(), [step(number, overflow=True, loss_scale=1024.0) for number in range(1, 30)]) == []
    detector = Updates()
    detector.hello(Sim(1).hello(0, precision="fp16"))
    assert found(detector, [step(number, overflow=True) for number in range(1, 30)]) == []
    detector = Updates()
    detector.hello(Sim(1).hello(0, matmul_precision="bf16"))
    steps = [step(number, overflow=number > 9, loss_scale=2.0**16) for number in range(1, 30)]
    (one,) = (found for each in steps for found in detector.step(each))
    assert (one.kind, one.step) == ("updates_skipped", 10)
    assert "bf16 needs no loss scaler" in words_of(one).text


def test_batches_that_are_left_out_one_after_another_are_told_by_heartbeats_until_the_next_update():
    detector = Updates()
    assert found(detector, [step(20), step(21)]) == []
    beats = [Heartbeat(0, 22, "data", 1.0, 1, 1.0, left_out=left_out) for left_out in (3, 99, 100, 300)]
    (one,) = (each for beat in beats for each in detector.beat(beat))
    assert (one.kind, one.state, one.severity, one.step) == ("updates_skipped", "raised", "error", 21)
    assert words_of(one).title == "no batch is trained on since step 21: 100 batches left out"
    (last,) = detector.goodbye(Goodbye(0, 2.0, 21, "finished"))
    assert words_of(last).title.endswith("300 batches left out")
    assert found(detector, [step(22)]) == [(22, "updates_skipped", "resolved", 0)]
    assert Updates().beat(beats[-1]) == [], "nothing was trained on before"


def test_weights_that_are_not_finite_are_told_at_their_step_once_and_not_where_the_loss_was_not_finite():
    bad = Signs(weights="nan")
    steps = [step(20), step(21, signs=bad), step(21, 1, signs=bad), step(22, loss=math.nan, signs=bad)]
    assert found(Updates(), steps) == [(21, "weights_not_finite", "raised", 21)]
    assert found(Updates(), [step(5, loss=math.nan, signs=bad)]) == []


@pytest.mark.parametrize(
    ("lr", "signs", "raised"),
    [
        (1e-3, Signs(weights="same"), STILL),
        (1e-3, Signs(weights="same", no_gradients=True), BARE),
        (1e-3, Signs(no_gradients=True), 0),  # an optimizer that frees its gradients
        (0.0, None, ZERO),
        (1e-3, None, 0),
        (0.0, Signs(weights="same"), ZERO),
    ],
)
def test_steps_that_change_nothing_are_told_with_the_learning_rate(lr, signs, raised):
    detector = Updates()
    steps = [step(number, lr=lr, signs=signs) for number in range(1, 100)]
    assert found(detector, steps) == ([(raised, "weights_unchanged", "raised", 1)] if raised else [])
    assert bool(found(detector, [step(100)])) == bool(raised)


def test_weights_and_modes_looked_at_in_some_steps_break_no_row_and_a_part_left_in_evaluation_is_told():
    coarse = [replace(Sim(1).phase("forward"), coarse=True)]

    def made(number: int, sign: Signs) -> Step:
        full = number % 10 == 0
        one = step(number, signs=sign if full else None, memory_every=10)
        return one if full else replace(one, phases=coarse)

    detector = Updates()
    expected = [(60, "weights_unchanged", "raised", 10)]
    assert found(detector, [made(number, Signs(weights="same")) for number in range(1, 100)]) == expected
    wanted = [(100, "weights_unchanged", "resolved", 10)]
    assert found(detector, [made(number, Signs(pending=0)) for number in range(100, 111)]) == wanted
    signs = Signs(evaluating_part="encoder")
    steps = [
        step(number, signs=signs if number < 60 else None)
        if number % 10 == 0
        else replace(step(number, memory_every=10), phases=coarse)
        for number in range(30, 70)
    ]
    detector = Updates()
    raised, resolved = (one for each in steps for one in detector.step(each))
    assert words_of(raised).title == "encoder, a part of the model, trains in evaluation mode since step 30"
    assert (raised.facts.steps, resolved.state) == (5, "resolved")


def test_a_schedule_that_begins_and_ends_at_0_and_weights_that_rest_for_a_while_are_fine():
    rates = [0.0] + [1e-3] * 50 + [0.0]
    assert found(Updates(), [step(number, lr=rate) for number, rate in enumerate(rates, 1)]) == []
    # The first sampled parameter has no gradient, the others are looked at in every eighth step.
    signs = [None if number % 8 == 0 else Signs(weights="same") for number in range(1, 400)]
    assert found(Updates(), [step(number, signs=each) for number, each in enumerate(signs, 1)]) == []


def test_a_model_left_in_evaluation_mode_and_clipping_after_the_update_are_told():
    steps = [step(number, signs=Signs(evaluating=True) if 42 <= number < 60 else None) for number in range(40, 70)]
    assert found(Updates(), steps) == [(46, "evaluation_mode", "raised", 42), (60, "evaluation_mode", "resolved", 42)]
    steps = [step(number, grad_norm=0.5, signs=Signs(clipped="late")) for number in range(2, 6)]
    assert found(Updates(), steps) == [(4, "clipping", "raised", 2)]
    assert found(Updates(), [replace(each, grad_norm=0.0, lr=None) for each in steps]) == []


def test_a_mode_or_weights_read_at_the_end_of_a_block_may_have_changed_since_the_last_look():
    detector, coarse = Updates(), [PhaseRecord("backward", 0, 1, Span(0, 0, 0), Span(0, 0, 0), coarse=True)]
    for number in range(40, 42):
        detector.step(replace(step(number), phases=coarse))
    for number in range(42, 46):
        assert detector.step(step(number, signs=Signs(evaluating=True))) == []
    (one,) = detector.step(step(46, signs=Signs(evaluating=True)))
    assert words_of(one).title == "the model trains in evaluation mode since step 42, or one of the 7 before"
    detector, coarse = Updates(), [PhaseRecord("backward", 0, 1, Span(0, 0, 0), Span(0, 0, 0), coarse=True)]
    steps = [step(number) for number in range(1, 11)]
    steps += [replace(step(number), phases=coarse, memory_every=50) for number in range(11, 30)]
    (told,) = [one for each in [*steps, step(30, signs=Signs(weights="nan"))] for one in detector.step(each)]
    assert words_of(told).title == "weights are not finite since a step from 11 to 30: the backward"


def test_weights_that_were_lost_before_an_update_are_told_with_the_step_before():
    lost = step(22, loss=math.nan, signs=Signs(weights_lost=True))
    detector = Updates()
    (one,) = (found for each in (step(21, loss=0.5), lost, lost) for found in detector.step(each))
    assert (one.kind, one.step, one.facts.loss, one.facts.at_latest) == ("weights_not_finite", 21, 0.5, True)
    assert Updates().step(lost) == [], "nothing is known of the step before: its loss is told"


def test_micro_batches_that_join_the_next_pass_and_those_that_are_never_applied():
    detector = Updates()
    steps = [step(number, rank, signs=Signs(pending=2)) for number in (2, 4, 6) for rank in (1, 0)]
    joined = [one for each in steps for one in detector.step(each)]
    seen = [(one.severity, one.step, one.ranks, one.facts.times) for one in joined]
    assert seen == [("info", 2, (1,), times) for times in (1, 2, 3)]
    assert len({one.condition for one in joined}) == 1
    assert "2 micro-batches of one pass" in words_of(joined[0]).title
    assert "So did 3 passes so far." in words_of(joined[2]).text
    (zeroed,) = detector.step(step(8, 1, signs=Signs(dropped=1)))
    assert words_of(zeroed).title == "1 micro-batch at the end of a pass over the data was never applied"
    assert zeroed.condition != joined[0].condition
    (left,) = detector.goodbye(Goodbye(1, 2.0, 9, "finished", pending=3))
    assert words_of(left).title == "3 micro-batches at the end were never applied"
    (both,) = detector.goodbye(Goodbye(0, 2.0, 9, "finished", pending=2))
    assert (both.state, both.ranks, both.facts.micro_batches) == ("updated", (0, 1), 3)
    assert both.condition == left.condition != joined[0].condition
    (one,) = Updates().goodbye(Goodbye(0, 2.0, 9, "finished", pending=1))
    assert words_of(one).title == "1 micro-batch at the end was never applied"
    assert detector.goodbye(Goodbye(0, 2.0, 9, "failed", pending=3)) == []


def test_a_learning_rate_that_no_optimizer_is_meant_for_is_in_the_title_and_the_first_thing_to_try():
    def told(lr: float) -> Words:
        (one,) = Updates().step(step(4, lr=lr, signs=Signs(weights="nan")))
        return words_of(one)

    assert told(9.5e4).title == "weights are not finite since step 4: the backward, at a learning rate of 9.5e+04"
    assert told(9.5e4).remedy.startswith("Lower the learning rate of 9.5e+04 first.")
    assert "rate" not in told(1e-3).title + told(1e-3).remedy
    assert "at a learning rate of 0.001" in told(1e-3).text


@pytest.mark.parametrize(("overwritten", "why"), [(True, "fp32 copy"), (False, "modifier_rank")])
def test_a_change_inside_gathered_parameters_is_told_with_its_line(overwritten, why):
    detector = Updates()
    edit = LostEdit(0, 7, 1.0, ["0.weight"], 1, "train.py:52 main", overwritten)
    (told,) = detector.edit(edit)
    assert "0.weight at train.py:52 main" in words_of(told).text
    assert why in words_of(told).text
    assert detector.edit(edit) == []
    (other,) = detector.edit(replace(edit, where="train.py:60 main"))
    assert other.condition != told.condition


@pytest.mark.parametrize(
    ("loss", "norm", "zero", "raised"),
    [
        (0.0, None, True, True),
        (0.0, None, False, False),  # of normalised rewards, whose gradients are not 0
        (0.0, 0.5, True, False),
        (0.6931, None, True, True),
        (0.6931, None, False, False),
    ],
)
def test_a_loss_that_stays_the_same_is_told_where_its_gradients_are_0(loss, norm, zero, raised):
    signs = Signs(zero_gradients=zero)
    steps = [
        step(number, loss=loss if number < 40 else 1.0, grad_norm=norm, signs=signs if 1 < number < 6 else None)
        for number in range(1, 60)
    ]
    expected = [(ZERO, "zero_loss", "raised", 1), (40, "zero_loss", "resolved", 1)]
    assert found(Updates(), steps) == (expected if raised else [])
    assert found(Updates(), [replace(each, loss=loss + each.step / 1000) for each in steps]) == []


def test_a_norm_of_0_is_told_once_where_gradients_are_looked_for_in_some_steps():
    coarse = [PhaseRecord("backward", 0, 1, Span(0, 0, 0), Span(0, 0, 0), coarse=True)]
    steps = [step(number, loss=2.0, grad_norm=0.0) for number in range(1, 60)]
    bare = [
        replace(each, signs=Signs(weights="same", no_gradients=True))
        if each.step % 8 == 1
        else replace(each, phases=coarse, memory_every=8)
        for each in steps
    ]
    assert [kind for _, kind, _, _ in found(Updates(), bare)] == ["weights_unchanged"]


def test_a_loss_or_a_norm_that_is_0_from_the_first_step_on_is_told_until_it_is_not():
    steps = [step(number, loss=float(number > 30), grad_norm=float(number > 30)) for number in range(1, 60)]
    loss = [(ZERO, "zero_loss", "raised", 1), (31, "zero_loss", "resolved", 1)]
    assert found(Updates(), steps) == loss
    norm = [(ZERO, "zero_norm", "raised", 1), (31, "zero_norm", "resolved", 1)]
    assert found(Updates(), [replace(each, loss=2.0) for each in steps]) == norm
    solved = [step(number, loss=float(number < 5), grad_norm=float(number < 5)) for number in range(1, 60)]
    assert found(Updates(), solved) == []
    ignored = Signs(labelled=1, unlabelled=1)
    assert found(Updates(), [replace(each, signs=ignored, loss=0.0) for each in steps]) == []
    still = Signs(labelled=1, unlabelled=1, weights="same")
    assert found(Updates(), [step(number, signs=still, loss=2.0, grad_norm=0.0) for number in range(1, 60)]) == []


def test_a_body_without_gradients_weights_put_back_and_parameters_that_no_optimizer_has_are_told_once():
    detector = Updates()
    signs = Signs(detached=3, detached_first="body.0.weight")
    (one,) = (found for number in (101, 102) for found in detector.step(step(number, signs=signs)))
    assert (one.kind, one.severity, one.step) == ("not_in_optimizer", "warning", 101)
    assert words_of(one).title == "body.0.weight and 2 other parameters get no gradient: not trained"
    detector = Updates()
    steps = [step(number, rank, signs=Signs(put_back=number == 4)) for number in range(1, 9) for rank in range(2)]
    assert found(detector, steps) == [(4, "weights_put_back", "raised", 1)]
    detector = Updates()
    steps = [step(1, rank, signs=Signs(left_out=3, left_out_first="lm_head.weight")) for rank in range(2)]
    (told,) = [one for each in steps for one in detector.step(each)]
    assert words_of(told).title == "no optimizer updates lm_head.weight and 2 other parameters: not trained"


@pytest.mark.parametrize(
    ("reduced", "ranks", "told"),
    [((), 2, [(600, "gradients_apart", "raised", 1)]), ((10,), 2, []), ((), 1, [])],
    ids=["never", "once", "in one rank"],
)
def test_gradients_that_are_never_reduced_are_told_and_not_where_ranks_average_now_and_then(reduced, ranks, told):
    coarse = replace(Sim(1).phase("forward"), coarse=True)
    steps = [
        step(number, rank, signs=None if number in reduced or rank >= ranks else Signs(apart=True), memory_every=200)
        if number <= 30 or number % 200 == 0
        else replace(step(number, rank, memory_every=200), phases=[coarse])
        for number in range(1, 1000)
        for rank in range(2)
    ]
    assert found(Updates(), steps) == told


def test_weights_that_an_engine_overwrites_or_does_not_load_are_told_once_unless_the_edit_was():
    steps = [step(3, rank, signs=Signs(unloaded=True)) for rank in range(2)]
    assert found(Updates(), steps) == [(3, "weights_not_loaded", "raised", 3)]
    steps = [step(1, rank, signs=Signs(overwritten=True)) for rank in range(2)]
    assert found(Updates(), steps) == [(1, "weights_overwritten", "raised", 1)]
    detector = Updates()
    detector.edit(LostEdit(0, 0, 1.0, ["0.weight"], 1, "train.py:52 main", True))
    assert found(detector, steps) == []


@pytest.mark.parametrize("how", ["zero", "scaled", "discarded", "replaced", "kept"])
def test_gradients_that_are_clipped_by_mistake_are_told_once_with_the_first_step(how):
    detector = Updates()
    steps = [step(number, signs=Signs(clipped=how) if number in (2, 3, 9, 20) else None) for number in range(1, 30)]
    assert found(detector, steps) == [(9, "clipping", "raised", 2)]
