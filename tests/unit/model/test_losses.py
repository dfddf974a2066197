"""The loss that is shown: of one step, over all ranks."""

import pytest
from ftmon.protocol.messages.telemetry import Closing, PhaseRecord, Span, Step, Update
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.cli.narrate import loss_words
from ftmon.tui.model.run import RunModel

SPAN = Span(10, 10, 10)


def model_of(*messages):
    model = RunModel()
    for seq, message in enumerate(messages, 1):
        model.apply(Frame(seq, 1000.0 + seq, message))
    return model


def step(rank, number, loss, **more):
    phases = [PhaseRecord("forward", 0, 10, SPAN, SPAN)]
    return Step(rank, number, 1000.0 + number, 1000, phases, loss=loss, **more)


def test_the_loss_is_the_mean_of_the_last_step_that_the_ranks_have_in_common():
    model = model_of(step(0, 1, 8.0), step(1, 1, 4.0), step(0, 2, 1.0))
    assert model.loss == 6.0
    model.apply(Frame(4, 1010.0, step(1, 2, 2.0)))
    assert model.loss == 1.5


def test_a_rank_far_behind_does_not_hold_the_loss_back():
    model = model_of(step(1, 1, 4.0), *(step(0, number, float(number)) for number in range(1, 101)))
    assert model.loss == 100.0


def test_ranks_are_weighted_by_their_label_tokens_where_all_know_them():
    weighted = model_of(step(0, 1, 8.0, label_tokens=300), step(1, 1, 4.0, label_tokens=100))
    assert weighted.loss == pytest.approx(7.0)
    assert weighted.losses.means(10) == [pytest.approx(7.0)]
    assert model_of(step(0, 1, 8.0, label_tokens=300), step(1, 1, 4.0)).loss == 6.0


def test_both_losses_are_shown_where_two_engines_train_also_of_one_that_updates_now_and_then():
    def both(rank, number, critic, actor):
        updates = [Update("Critic", loss=critic)] + ([Update("Actor", loss=actor)] if actor is not None else [])
        return step(rank, number, critic, updates=updates)

    model = model_of(both(0, 1, 1.0, 5.0), both(1, 1, 3.0, 7.0), both(0, 2, 4.0, None), both(1, 2, 6.0, None))
    assert model.losses_by_name == {"Critic": 5.0, "Actor": 6.0}
    assert model.loss == 5.0
    assert loss_words(model) == ["loss Critic 5.0000, Actor 6.0000"]


def test_a_final_evaluation_counts_as_the_peak_and_as_no_step():
    record = PhaseRecord("eval", 0, 10, SPAN, SPAN, resident=Span(10, 10, 900))
    model = model_of(step(0, 1, 8.0), Closing(0, 1, 1002.0, 1000, [record]))
    assert (model.step, model.ranks[0].last.step, len(model.ranks[0].steps)) == (1, 1, 1)
    assert (model.peak.bytes, model.peak.place) == (900, "eval after step 1")
