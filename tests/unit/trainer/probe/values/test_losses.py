"""What a step's loss is, from the scalars that ``backward`` was called on and from what else is reported."""

import pytest
from ftmon.trainer.probe.phases.tracker import Notes
from ftmon.trainer.probe.values.losses import step_loss, updates

VALUES = (4.0, 8.0, 12.0, 16.0)


def noted(values=VALUES, **known):
    notes = Notes()
    notes.losses, notes.micro_steps = list(values), len(values)
    for name, value in known.items():
        setattr(notes, name, value)
    return notes


@pytest.mark.parametrize(
    ("known", "loss"),
    [
        ({}, 40),
        ({"values": (8.0, None)}, 8),
        ({"values": (None,)}, None),
        ({"values": ()}, None),
        ({"added_ranks": 2.0}, 80),
        ({"accumulation": 1}, 40),
        ({"accumulation": 4}, 10),
        ({"accumulation": 2}, 20),
        ({"accumulation": 8}, 10),
        ({"accumulation": 4, "sum_losses": True}, 40),
        ({"trainer_losses": [1.0, 2.0]}, 3),
        ({"trainer_losses": [1.0, 2.0], "reported": [5.0, 7.0]}, 6),
        ({"trainer_losses": [1.0, 2.0], "reported": [5.0, 7.0], "reported_loss": 0.5}, 0.5),
    ],
)
def test_losses_add_up_unless_an_engine_divides_them_and_reports_come_first(known, loss):
    assert step_loss(noted(**known)) == loss


@pytest.mark.parametrize(("divided_by", "micro_steps"), [(2, 2), (4, 4), (8, 4), (1, 4), (0, 4)])
def test_a_micro_batch_that_goes_backward_once_for_each_output_is_one(divided_by, micro_steps):
    notes = noted((None,) * 4, accumulation=divided_by)
    assert step_loss(notes) is None
    assert notes.micro_steps == micro_steps


def test_each_of_several_optimizers_has_the_mean_over_its_updates_of_the_losses_before_each():
    notes = Notes()
    for losses, key, lr in (((1.0, 2.0), 1, 0.1), ((5.0,), 2, 0.2), ((3.0, 4.0), 1, 0.3), ((), 3, 0.4)):
        notes.losses, notes.lr = list(losses), lr
        notes.end_part(key, f"optimizer {key}")
    found = updates(notes)
    expected = [("optimizer 1", 2, 4, 5.0, 0.3), ("optimizer 2", 1, 1, 5.0, 0.2), ("optimizer 3", 1, 0, None, 0.4)]
    assert [(each.name, each.count, each.micro_steps, each.loss, each.lr) for each in found.values()] == expected
