"""Steps of loops with several optimizers, from real optimizers that update parameters without gradients."""

import pytest
import torch
from ftmon.trainer.probe.device.reading import Reading
from ftmon.trainer.probe.link.step_message import MOST_UPDATES, step_message
from ftmon.trainer.probe.phases import rounds
from ftmon.trainer.probe.phases.tracker import Counts, Tracker
from ftmon.trainer.probe.phases.updaters import Updaters
from ftmon.trainer.probe.values.losses import note_loss


class CountingMemory:
    measure = "cuda"
    device_index = 0
    samples = 0

    def sample(self):
        self.samples += 1
        return self.samples

    def read(self, _sample):
        return Reading(0, 0, 0, 0)


class Loop:
    """A training loop whose backward passes and updates are only reported."""

    def __init__(self):
        self.memory = CountingMemory()
        self.steps = []
        self.tracker = Tracker(self.memory, lambda: None, Counts(), self.steps.append)
        self.updaters = Updaters(self.tracker, self.steps.append, lambda: None)

    def optimizer(self, lr=0.1):
        made = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
        self.updaters.made(made)
        return made

    def backward(self, loss=1.0):
        self.tracker.enter("backward")
        self.tracker.notes.micro_steps += 1
        self.tracker.notes.losses.append(note_loss(torch.tensor(loss)))

    def update(self, optimizer):
        self.updaters.begin(optimizer)
        self.tracker.enter("optimizer")
        self.tracker.notes.lr = optimizer.param_groups[0]["lr"]
        self.updaters.end(None)

    def updates(self):
        """Number of each step's backward passes and updates."""
        self.updaters.flush()
        return [(raw.notes.micro_steps, max(1, len(raw.notes.parts))) for raw in self.steps]


@pytest.fixture
def loop():
    return Loop()


def test_an_optimizer_for_each_of_many_parameters_makes_one_step_of_a_round_at_a_linear_cost(loop, monkeypatch):
    compared = []
    original = rounds._common_loops
    monkeypatch.setattr(rounds, "_common_loops", lambda *sites: compared.append(sites) or original(*sites))
    judged = []
    begins = rounds.Rounds._begins
    monkeypatch.setattr(rounds.Rounds, "_begins", lambda *given: judged.append(given) or begins(*given))
    optimizers = [loop.optimizer() for _ in range(300)]
    for _ in range(4):
        loop.backward()
        for optimizer in optimizers:
            loop.update(optimizer)
    assert loop.updates() == [(1, 300)] * 4
    assert len(compared) < 10
    assert len(judged) < 4 * 310
    assert loop.memory.samples < 4 * 50
    message = step_message(loop.steps[-1], 0, loop.memory.read, 0)
    assert len(message.updates) == MOST_UPDATES
    assert message.phase("optimizer").count == 300


def test_an_inner_loop_that_makes_many_updates_is_one_over_data(loop):
    inner, second, outer = (loop.optimizer() for _ in range(3))
    turns = rounds.INNER_LIMIT + 10
    for _ in range(2):
        loop.backward()
        loop.update(outer)
        for _ in range(turns):
            loop.backward()
            loop.update(inner)
            loop.update(second)
    assert loop.updates() == [(2, 3), *[(1, 2)] * (turns - 1)] * 2


def test_an_optimizer_made_at_its_first_update_joins_the_step_that_has_just_ended(loop):
    optimizers = {}
    for turn in range(10):
        loop.backward()
        for name in "abc" if turn < 5 else "abcd":
            if name not in optimizers:
                optimizers[name] = loop.optimizer()
            loop.update(optimizers[name])
    assert loop.updates() == [(1, 1), *[(1, 3)] * 4, (1, 3), *[(1, 4)] * 4]
    assert {raw.notes.first for raw in loop.steps[1:]} == {id(optimizers["a"])}


def test_a_second_optimizer_that_trains_after_the_first_makes_steps_of_its_own_from_its_first_update_on(loop):
    first = loop.optimizer()
    for _ in range(3):
        loop.backward()
        loop.update(first)
    second = loop.optimizer()
    for _ in range(3):
        loop.backward()
        loop.update(second)
    assert loop.updates() == [(1, 1)] * 6


def test_short_lived_optimizers_that_update_in_one_line_share_no_step(loop):
    outer = loop.optimizer()
    loop.backward()
    loop.update(outer)
    inner = None
    for _ in range(4):
        inner = loop.optimizer()  # the one before is freed
        for _ in range(2):
            loop.backward()
            loop.update(inner)
    assert loop.updates() == [(1, 1)] * 9


def test_a_last_stage_whose_data_is_exhausted_has_as_many_steps_as_updates(loop):
    first, second = loop.optimizer(), loop.optimizer()

    def warm_up():
        for _ in range(2):
            loop.backward()
            loop.update(first)
        loop.updaters.exhausted()

    def train():
        for _ in range(3):
            loop.backward()
            loop.update(second)
        loop.updaters.exhausted()

    for stage in (warm_up, train):
        stage()
    assert loop.updates() == [(1, 1)] * 5


def test_the_learning_rate_is_that_of_the_first_of_the_run_also_where_another_updates_before_it(loop):
    sometimes, always = loop.optimizer(0.001), loop.optimizer(0.002)
    for turn in range(6):
        loop.backward(float(turn))
        loop.tracker.notes.grad_norm = turn + 0.5
        if turn % 2 == 1:
            loop.update(sometimes)
        loop.update(always)
    loop.updaters.flush()
    messages = [step_message(raw, 0, loop.memory.read, 0) for raw in loop.steps]
    assert [(message.loss, message.lr, message.grad_norm) for message in messages] == [
        (turn, 0.002, turn + 0.5) for turn in range(6)
    ]
