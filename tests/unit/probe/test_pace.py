"""How long a step usually takes."""

from ftmon.trainer.probe.phases.tracker import Pace


def test_before_the_first_step_nothing_is_known():
    assert Pace().usual == 0.0


def test_a_step_that_is_unlike_the_others_is_no_measure():
    pace = Pace()
    for seconds in (40.0, 0.5, 0.5, 0.5, 0.5, 0.001):
        pace.note(seconds)
    assert pace.usual == 0.5


def test_steps_that_have_become_longer_are_believed_after_five():
    pace = Pace()
    for _ in range(20):
        pace.note(0.1)
    for _ in range(5):
        assert pace.usual == 0.1
        pace.note(3.0)
    assert pace.usual == 3.0
