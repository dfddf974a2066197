"""Whose updates are the steps, from real optimizers that update parameters without gradients."""

import gc

import pytest
import torch
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.guard import Guard
from ftmon.trainer.probe.link.publisher import MOST_UPDATES, step_message
from ftmon.trainer.probe.loop import updates as module
from ftmon.trainer.probe.loop.updates import OTHERS, Updaters
from ftmon.trainer.probe.phases.budget import Budget
from ftmon.trainer.probe.phases.tracker import Counts, Tracker


class CountingMemory:
    measure = "cuda"
    device_index = 0
    samples = 0

    def sample(self):
        self.samples += 1
        return self.samples

    def read(self, _sample):
        return Reading(0, 0, 0, 0)


class Engine(torch.nn.Module):
    """As DeepSpeed's, it has the model inside."""

    def __init__(self, kind=torch.nn.Linear, *sizes):
        super().__init__()
        self.module = kind(1, 1, *sizes)


class Loop:
    """A training loop whose backward passes and updates are only reported."""

    def __init__(self):
        self.memory = CountingMemory()
        self.steps = []
        self.met = []
        self.tracker = Tracker(self.memory, lambda: None, Counts(), self.steps.append, Guard(), Budget(0))
        self.updaters = Updaters(self.tracker, self.met.append)

    def backward(self, loss=1.0):
        self.tracker.enter("backward")
        self.tracker.notes.micro_steps += 1
        self.tracker.notes.losses.append(loss)

    def update(self, by, loss=None, number=None):
        if loss is not None:
            self.backward(loss)
        self.tracker.enter("optimizer")
        self.tracker.notes.lr = getattr(by, "defaults", {}).get("lr")
        self.updaters.end(by, number)

    def updates(self, count, *by, loss=None):
        for _ in range(count):
            for each in by:
                self.update(each, loss)

    def messages(self):
        return [step_message(raw, 0, self.memory.read, 0) for raw in self.steps]

    def losses(self):
        """Return each step's loss and those of its optimizers."""
        return [(step.loss, {each.name: each.loss for each in step.updates}) for step in self.messages()]


def optimizer(kind=torch.optim.SGD, lr=0.1):
    return kind([torch.nn.Parameter(torch.ones(1))], lr=lr)


@pytest.fixture
def loop():
    return Loop()


def test_a_step_is_an_update_of_the_first_optimizer_and_has_the_losses_of_both(loop):
    critic, actor = optimizer(lr=0.2), optimizer(torch.optim.Adam)
    for turn in range(3):
        loop.update(critic, 1.0 + turn)
        loop.update(actor, 10.0 + turn)
    assert loop.losses() == [(1.0, {}), (2.0, {"Adam": 10.0, "SGD": 2.0}), (3.0, {"Adam": 11.0, "SGD": 3.0})]
    last = loop.messages()[-1]
    assert (last.step, last.lr, last.micro_steps, last.phase("optimizer").count) == (3, 0.2, 2, 2)


def test_a_backward_and_a_clipping_for_several_updates_are_the_step_s(loop):
    first, second = optimizer(), optimizer()
    loop.update(first)
    loop.backward(5.0)
    loop.tracker.notes.grad_norm = 0.5
    loop.update(second)
    loop.update(first)
    step = loop.messages()[-1]
    assert (step.loss, step.grad_norm, [each.name for each in step.updates]) == (5.0, 0.5, ["SGD 2", "SGD"])


def test_the_optimizer_that_the_script_names_owns_the_steps_for_as_long_as_it_exists(loop):
    named, other = optimizer(), optimizer()
    loop.updaters.watch(named)
    loop.updates(OTHERS + 1, other)
    assert not loop.steps
    loop.update(named)
    assert len(loop.steps) == 1
    del named
    gc.collect()
    loop.update(other)
    assert len(loop.steps) == 2


def test_an_engine_owns_the_steps_also_where_an_optimizer_has_stepped_before_it(loop):
    bare, engine, second = optimizer(), Engine(), Engine(torch.nn.Bilinear, 1)
    loop.update(bare)
    for number in (7, 8):
        loop.update(engine, 2.0, number)
        loop.update(second, 3.0, 70)
        loop.update(bare, 4.0)
    assert [raw.number for raw in loop.steps] == [1, 7, 8]
    assert loop.losses()[-1] == (2.0, {"Bilinear": 3.0, "SGD": 4.0, "Linear": 2.0})
    assert loop.met == [[engine.module, second.module]]


@pytest.mark.parametrize("named", [False, True])
def test_an_engine_that_is_made_later_owns_the_steps_unless_one_is_named(loop, named):
    first, later = Engine(), Engine()
    loop.update(first)
    if named:
        loop.updaters.watch(first)
    loop.updaters.made_engine()
    loop.update(later)
    assert len(loop.steps) == (1 if named else 2)


def test_a_second_optimizer_that_trains_after_the_first_owns_the_steps_in_the_end(loop):
    first, second = optimizer(), optimizer()
    loop.update(first)
    loop.updates(OTHERS + 2, second)
    assert (len(loop.steps), loop.messages()[1].updates[0].count) == (4, OTHERS)


def test_short_lived_optimizers_own_their_steps(loop):
    for _ in range(4):
        inner = optimizer()
        loop.updates(2, inner, loss=1.0)
        del inner
        gc.collect()
    assert loop.losses() == [(1.0, {})] * 8


@pytest.mark.parametrize(
    ("seconds", "same_model", "numbers"), [(9, False, [1, 2, 1]), (9, True, [1, 2, 3]), (1, False, [1, 2, 3])]
)
def test_another_training_counts_its_steps_from_1(loop, monkeypatch, seconds, same_model, numbers):
    now = [0]
    monkeypatch.setattr(module, "perf_counter_ns", lambda: now[0])
    model = torch.nn.Linear(1, 1)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.updates(2, first)
    now[0] += seconds * 10**9
    if not same_model:
        del model
    del first
    gc.collect()
    second = optimizer() if not same_model else torch.optim.SGD(model.parameters(), lr=0.1)
    loop.update(second)
    assert [raw.number for raw in loop.steps] == numbers


def test_an_optimizer_for_each_of_many_parameters_costs_few_memory_samples(loop):
    optimizers = [optimizer() for _ in range(300)]
    for _ in range(4):
        loop.backward()
        loop.updates(1, *optimizers)
    assert len(loop.steps) == 4
    assert loop.memory.samples < 4 * 50
    last = loop.messages()[-1]
    assert (len(last.updates), last.phase("optimizer").count, last.loss) == (MOST_UPDATES, 300, 1.0)
